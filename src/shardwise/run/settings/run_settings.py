"""Settings of a training run, checked when made.

They are what ``shardwise train --help`` explains, what a TOML file fills, and what a checkpoint records.
"""

import dataclasses
import json
import os
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

import tyro

from shardwise.core.errors import ConfigError
from shardwise.core.files import shown
from shardwise.models.recomputation import Recomputation
from shardwise.training import bounds
from shardwise.training.bounds import Checked, Folder, Range, checked, require, with_values
from shardwise.training.step_settings import OptimizerSettings, ParallelSettings, StepSettings, TrainingSettings

_WIDTH = Range(1, 1 << 20)


def _require_multiple(name: str, value: int, of: str, divisor: int) -> None:
    require(value % divisor == 0, f"{name} {value} is not a multiple of {of} {divisor}")


@dataclass(frozen=True)
class ModelSettings(Checked, prefix="model."):
    """The model's sizes and kind.

    Attributes:
        architecture: "llama" (rotary positions, RMSNorm, SwiGLU, no biases) or "gpt" (learned positions, LayerNorm,
            GELU, biases).
        num_layers: number of transformer layers.
        hidden_size: width of the residual stream.
        num_heads: number of attention heads.
        num_query_groups: number of key-value heads; as many as heads if not given.
        ffn_hidden_size: width of the MLP; 4 x hidden_size for "gpt" and 8/3 of it, rounded up to a multiple of 32, for
            "llama" if not given.
        vocab_size: number of token ids, which the tokenizer is trained to.
        sequence_length: tokens in a training sample; the longest context.
        tie_embeddings: use the embedding's weight as the output layer's.
        dropout: probability of dropping an element of residual branches and attention weights, from 0 to 1.
    """

    architecture: Literal["llama", "gpt"] = "llama"
    num_layers: Annotated[int, Range(1, 10_000)] = 4
    hidden_size: Annotated[int, _WIDTH] = 256
    num_heads: Annotated[int, _WIDTH] = 4
    num_query_groups: Annotated[int | None, _WIDTH] = None
    ffn_hidden_size: Annotated[int | None, Range(1, 1 << 22)] = None
    # At least the 256 bytes and the end-of-text token; at most four times the largest in use.
    vocab_size: Annotated[int, Range(257, 1 << 22)] = 4096
    sequence_length: Annotated[int, bounds.SEQUENCE] = 256
    tie_embeddings: bool = True
    dropout: Annotated[float, bounds.PROBABILITY] = 0.0

    def _check_together(self) -> None:
        _require_multiple("model.hidden-size", self.hidden_size, "model.num-heads", self.num_heads)
        groups = self.num_query_groups or self.num_heads
        _require_multiple("model.num-heads", self.num_heads, "model.num-query-groups", groups)
        require(
            self.architecture != "llama" or self.hidden_size // self.num_heads % 2 == 0,
            f"rotary positions need heads of even width; {self.hidden_size} / {self.num_heads} is odd",
        )


@dataclass(frozen=True)
class RecomputeSettings(Checked, Recomputation, prefix="recompute."):
    """Recomputation in the backward: less memory for more time, the same bits."""

    num_layers: Annotated[int, Range(1, 10_000)] = 1

    def _check_together(self) -> None:
        Recomputation.__post_init__(self)


@dataclass(frozen=True)
class CorpusSettings(Checked, prefix="corpus."):
    """How the text is read.

    Attributes:
        held_out_fraction: share of the text, by bytes, that is not trained on but measured on, between 0 and 1.
        text_key: field of a JSON record that holds the text.
    """

    held_out_fraction: Annotated[float, Range(0, 1, low_included=False, high_included=False)] = 0.03
    text_key: str = "text"


@dataclass(frozen=True)
class ProfileSettings(Checked, prefix="profile."):
    """A trace of some steps by torch.profiler, from each rank, which changes no number.

    Attributes:
        enabled: write the trace, a file for each rank in ``out/profile``, for chrome://tracing or Perfetto.
        wait: steps to leave out, from the first that the run does.
        warmup: steps after these in which the profiler runs already, and nothing is kept.
        active: traced steps, after these.
    """

    enabled: Annotated[bool, tyro.conf.arg(aliases=("--profile",))] = False
    wait: Annotated[int, bounds.STEPS] = 5
    # PyTorch warns of results without.
    warmup: Annotated[int, Range(1, 1_000)] = 1
    # Each is some megabytes.
    active: Annotated[int, Range(1, 1_000)] = 3

    def _check_together(self) -> None:
        for name, value in self.changed("wait", "warmup", "active"):
            words = f"{name} {value} is for --profile, which is not given; give it, or leave the other out"
            require(self.enabled, words)

    @property
    def num_steps(self) -> int:
        """Steps that a run must do for the trace to be whole."""
        return self.wait + self.warmup + self.active if self.enabled else 0

    def check_steps(self, first: int, last: int) -> None:
        """Raise ConfigError unless the steps from ``first`` to before ``last`` suffice."""
        require(
            self.num_steps <= last - first,
            f"profile.wait {self.wait}, profile.warmup {self.warmup} and profile.active {self.active} are "
            f"{self.num_steps} steps, and there are {last - first} to do; lower them",
        )


_BYTES = {"auto": 4, "float32": 4, "tf32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "pure-bfloat16": 2}


@dataclass(frozen=True)
class RunSettings(StepSettings):
    """Settings of every training run.

    Attributes:
        data: files and folders of text, JSON lines, JSON arrays, Parquet or Arrow; "stdlib" is this machine's Python
            standard library.
        out: folder for checkpoints, metrics, pictures and the tokenizer.
        resume: "auto" continues from the newest checkpoint in ``out`` if there is one; "never" starts anew and refuses
            a folder that has checkpoints; "restart" starts anew and deletes them.
        device: "auto", "cpu" or "cuda".
        special_tokens: read the names of special tokens in the text, such as <|endoftext|>, as these tokens, for text
            that was joined with them; otherwise they are letters, and no document can end itself.
        timeout: seconds that a rank waits for another in a step before all end with an error that names it. Preparing
            and saving may take longer, but a rank that shows no sign of life for that long ends the run there too.
        validate: compare each collective's shapes and dtypes between the ranks before it is made, in every step; by
            default in the first step only. Costs a message more for each; for finding errors.
        peak_tflops: the most that one rank's device can do, in TFLOP/s; metrics show the share that was used. If not
            given it is known for many GPUs, and measured on a CPU.
        parallel: how the model is split.
        recompute: parts that the backward computes again, instead of keeping them.
        optimizer: AdamW or Muon, and the learning rate of each step.
        training: how long, in which steps, and what is kept.
        profile: a trace of some steps.
        corpus: how the text is read.
    """

    data: tuple[str, ...] = ()
    out: Annotated[str, Folder()] = "runs/train"
    resume: Literal["auto", "never", "restart"] = "never"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    special_tokens: bool = False
    timeout: Annotated[float, bounds.TIMEOUT] = bounds.DEFAULT_TIMEOUT
    validate: bool = False
    peak_tflops: Annotated[float | None, Range(0, 1e6, low_included=False)] = None
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    recompute: RecomputeSettings = field(default_factory=RecomputeSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    profile: ProfileSettings = field(default_factory=ProfileSettings)
    corpus: CorpusSettings = field(default_factory=CorpusSettings)

    def _check_together(self) -> None:
        require(bool(self.data), "no text to train on; pass --data with files or folders, or --data stdlib")
        self.profile.check_steps(0, self.training.steps)

    @property
    def model_name(self) -> str:
        """The model's name, for people."""
        return str(self.model.architecture)

    def on_device(self, device_type: str) -> Self:
        """The settings with the dtype that is meant on such a device, such as ``"cuda"``.

        Raises:
            ConfigError: the device has no such dtype.
        """
        dtype = self.training.dtype
        require(
            dtype != "tf32" or device_type == "cuda",
            f"training.dtype is 'tf32', which CUDA's tensor cores have, and this rank computes on {device_type}; use "
            "float32",
        )
        if dtype != "auto":
            return self
        usual: Literal["bfloat16", "float32"] = "bfloat16" if device_type == "cuda" else "float32"
        return dataclasses.replace(self, training=dataclasses.replace(self.training, dtype=usual))

    def check_effect(self, num_layers: int | None = None) -> None:
        """Check that no setting is without effect for the lack of another.

        Args:
            num_layers: of the model; None where it is not known yet.

        Raises:
            ConfigError: one is; the message names the setting to change.
        """
        for name, value in self.parallel.changed("exact_parts"):
            require(
                self.parallel.exact,
                f"{name} {value} is for exact runs, and parallel.exact is off; add --exact, or leave exact-parts out",
            )
        number = self.recompute.num_layers
        require(
            num_layers is None or number <= num_layers,
            f"recompute.num-layers {number} is more than the {num_layers} layers of the model; use {num_layers} at "
            "most",
        )

    def check_world(self, world_size: int) -> None:
        """Check the settings against the number of ranks.

        Raises:
            ConfigError: ``tp`` and ``pp`` do not divide the ranks, the batch cannot be shared out, or a setting is
                without effect.
        """
        self.check_effect()
        tp, pp = self.parallel.tp, self.parallel.pp
        split = f"parallel.tp {tp}" if pp == 1 else f"parallel.tp {tp} x parallel.pp {pp}"
        require(
            world_size % (tp * pp) == 0,
            f"{split} does not divide the {world_size} ranks; start a multiple of {tp * pp} with --nproc",
        )
        dp = world_size // (tp * pp)
        self.parallel.check_exact(dp, self.model.sequence_length, self.training)
        batch, micro = self.training.global_batch_size, self.micro_batch_size(dp)
        require(
            batch % dp == 0,
            f"training.global-batch-size {batch} is not a multiple of the {dp} data-parallel ranks "
            f"({world_size} ranks / {'tp' if pp == 1 else 'tp x pp'} {tp * pp})",
        )
        require(
            batch // dp % micro == 0,
            f"{batch // dp} samples per rank and step are not a multiple of training.micro-batch-size {micro}",
        )
        require(
            self.parallel.virtual_stages == 1 or batch // dp // micro % pp == 0,
            f"{batch // dp // micro} micro-batches per rank and step are not a multiple of parallel.pp {pp}, as "
            "parallel.pipeline-schedule 'interleaved' needs; change training.global-batch-size or "
            "training.micro-batch-size",
        )

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values; the inverse of ``from_json``."""
        value: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """From ``to_json``'s values.

        Raises:
            ConfigError: an unknown or impossible field, which is named.
        """
        if not isinstance(value, dict):
            raise ConfigError(f"settings is {shown(value)}; it must be an object")
        return with_values(cls, checked(cls, value, "settings, maybe of another version: "))


@dataclass(frozen=True)
class Settings(RunSettings):
    """One training run of a new model.

    Attributes:
        model: the model's sizes and kind.
    """

    model: ModelSettings = field(default_factory=ModelSettings)

    def _check_together(self) -> None:
        super()._check_together()
        require(
            self.model.num_heads >= self.parallel.tp,
            f"parallel.tp {self.parallel.tp} is more than the {self.model.num_heads} attention heads; lower it or "
            "raise model.num-heads",
        )
        parallel = self.parallel
        stages = parallel.pp * parallel.virtual_stages
        require(
            self.model.num_layers >= stages,
            f"model.num-layers {self.model.num_layers} is less than the {stages} parts of parallel.pp {parallel.pp} x "
            f"parallel.virtual-stages {parallel.virtual_stages}; each needs a layer",
        )

    def check_world(self, world_size: int) -> None:
        """Check the settings against the number of ranks, and the model against this machine's memory.

        Raises:
            ConfigError: as ``RunSettings.check_world``; or one rank's weights are more than the memory there is.
        """
        self.check_effect(self.model.num_layers)
        super().check_world(world_size)
        if "SC_PHYS_PAGES" not in os.sysconf_names:
            return
        model, ranks = self.model, self.parallel.tp * self.parallel.pp
        # Keys and values, biases and norms left out.
        per_layer = 2 * model.hidden_size**2 + 2 * model.hidden_size * (model.ffn_hidden_size or 4 * model.hidden_size)
        num_parameters = model.num_layers * per_layer + model.vocab_size * model.hidden_size
        share = num_parameters * _BYTES[self.training.dtype] // ranks
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        require(
            share <= memory,
            f"a model of model.num-layers {model.num_layers}, model.hidden-size {model.hidden_size} and "
            f"model.vocab-size {model.vocab_size} has {num_parameters:.1e} parameters, {share / 1e9:,.0f} GB of "
            f"weights per rank, and this machine has {memory / 1e9:,.0f} GB; use a smaller model, or more ranks",
        )
