"""Settings of a training run, checked when they are created.

``shardwise train --help`` explains them, a TOML file sets them, and a checkpoint records them.
"""

import dataclasses
import json
import math
import os
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

import tyro

from shardwise.core.errors import ConfigError
from shardwise.core.json_text import shown
from shardwise.models.experts import Balanced, Dropped
from shardwise.models.recomputation import Recomputation
from shardwise.training import bounds
from shardwise.training.bounds import Checked, Folder, Range, checked, refuse, require, with_values
from shardwise.training.step_settings import OptimizerSettings, ParallelSettings, StepSettings, TrainingSettings

TrackerName = Literal["wandb", "trackio", "mlflow", "tensorboard"]
"""Name of an experiment tracker: its package, and the extra that installs it."""

_WIDTH = Range(1, 1 << 20)
_EXPERTS = Range(1, 1 << 16)
_COEFFICIENT = Range(0, 1e6)
# Tables of settings of earlier versions, with the values of runs that did not use them.
_REMOVED_TABLES: dict[str, dict[str, Any]] = {
    "labels": {"task": "text-generation", "label_names": []},
    "distillation": {"divergence": "forward", "temperature": 1.0, "alpha": 0.5},
}


def _require_multiple(name: str, value: int, of: str, divisor: int) -> None:
    require(value % divisor == 0, f"{name} {value} is not a multiple of {of} {divisor}")


@dataclass(frozen=True)
class ModelSettings(Checked, prefix="model."):
    """Sizes and kind of the model.

    Attributes:
        architecture: "llama" (rotary positions, RMSNorm, SwiGLU, no biases) or "gpt" (learned positions, LayerNorm,
            GELU, biases).
        num_layers: number of transformer layers.
        hidden_size: width of the residual stream.
        num_heads: number of attention heads.
        num_query_groups: number of key-value heads; if not given, num_heads.
        ffn_hidden_size: width of the MLP; if not given, 4 x hidden_size for "gpt", and 8/3 of hidden_size, rounded up
            to a multiple of 32, for "llama".
        vocab_size: vocabulary size to which the tokenizer is trained.
        sequence_length: tokens in a training sample, and maximum context of the model.
        tie_embeddings: share one weight between the embedding and the output layer.
        dropout: probability of dropping an element of residual branches and attention weights, from 0 to 1.
        num_experts: number of experts in each layer, instead of its MLP; none if not given.
        num_experts_per_tok: number of experts that each token goes to.
        expert_ffn_hidden_size: width of an expert; if not given, that of the MLP divided by num_experts_per_tok, and
            rounded up to a multiple of 8, so that a token costs as much as without experts.
        expert_capacity_factor: in training, an expert takes at most this factor times the mean number of a sequence's
            tokens; if not given, all tokens.
        expert_drops_by: tokens that a full expert takes: those with the highest weights ("probability"), or the first
            ones of a sequence ("position").
        router_aux_loss: coefficient of the loss that balances the experts.
        router_balance: tokens whose loads the loss balances: those of each "sequence", of a rank's "micro_batch", or of
            the micro-batches that all data-parallel ranks compute at the same time ("global").
        router_bias_rate: rate of a bias that balances the experts without a loss, such as 0.001; 0 for none.
        router_z_loss: coefficient of the loss that bounds the logits of the router.
        router_force_balance: let experts take turns, instead of the choice by scores, so that their loads are even; for
            measurements of speed and to debug.
    """

    architecture: Literal["llama", "gpt"] = "llama"
    num_layers: Annotated[int, Range(1, 10_000)] = 4
    hidden_size: Annotated[int, _WIDTH] = 256
    num_heads: Annotated[int, _WIDTH] = 8
    num_query_groups: Annotated[int | None, _WIDTH] = None
    ffn_hidden_size: Annotated[int | None, Range(1, 1 << 22)] = None
    # Minimum: the 256 bytes and the end-of-text token. Maximum: four times the largest vocabulary in use.
    vocab_size: Annotated[int, Range(257, 1 << 22)] = 4096
    sequence_length: Annotated[int, bounds.SEQUENCE] = 256
    tie_embeddings: bool = True
    dropout: Annotated[float, bounds.PROBABILITY] = 0.0
    num_experts: Annotated[int | None, _EXPERTS] = None
    num_experts_per_tok: Annotated[int, _EXPERTS] = 2
    expert_ffn_hidden_size: Annotated[int | None, Range(1, 1 << 22)] = None
    expert_capacity_factor: Annotated[float | None, Range(0, 1 << 20, low_included=False)] = None
    expert_drops_by: Dropped = "probability"
    router_aux_loss: Annotated[float, _COEFFICIENT] = 0.01
    router_balance: Balanced = "sequence"
    router_bias_rate: Annotated[float, _COEFFICIENT] = 0.0
    router_z_loss: Annotated[float, _COEFFICIENT] = 0.0
    router_force_balance: bool = False

    def _check_together(self) -> None:
        if self.num_experts is None:
            of_router = (
                "router_aux_loss",
                "router_balance",
                "router_bias_rate",
                "router_z_loss",
                "router_force_balance",
            )
            of_capacity = ("expert_capacity_factor", "expert_drops_by")
            of_experts = ("num_experts_per_tok", "expert_ffn_hidden_size", *of_capacity, *of_router)
            for name, value in self.changed(*of_experts):
                require(False, f"{name} {value} is for --model.num-experts, which is not given; leave it out")
        else:
            require(
                self.num_experts_per_tok <= self.num_experts,
                f"model.num-experts-per-tok {self.num_experts_per_tok} is more than model.num-experts "
                f"{self.num_experts}",
            )
            require(
                self.expert_capacity_factor is not None or self.expert_drops_by == "probability",
                f"model.expert-drops-by {self.expert_drops_by} is for model.expert-capacity-factor, which is not given",
            )
            require(
                self.architecture == "llama",
                "model.num-experts is for model.architecture llama: experts have no biases",
            )
        _require_multiple("model.hidden-size", self.hidden_size, "model.num-heads", self.num_heads)
        groups = self.num_query_groups or self.num_heads
        _require_multiple("model.num-heads", self.num_heads, "model.num-query-groups", groups)
        require(
            self.architecture != "llama" or self.hidden_size // self.num_heads % 2 == 0,
            f"rotary positions need heads of even width; {self.hidden_size} / {self.num_heads} is odd",
        )


@dataclass(frozen=True)
class RecomputeSettings(Checked, Recomputation, prefix="recompute."):
    """Recomputation in the backward pass: less memory, more time, the same bits."""

    num_layers: Annotated[int, Range(1, 10_000)] = 1

    def _check_together(self) -> None:
        Recomputation.__post_init__(self)


@dataclass(frozen=True)
class CorpusSettings(Checked, prefix="corpus."):
    """Reading and splitting of the text.

    Attributes:
        held_out_fraction: fraction of the text, by bytes, for evaluation instead of training; between 0 and 1.
        text_key: field of a JSON record that holds the text.
        split: weights of the training, validation and test part of token files (.idx), by sequences, as in Megatron,
            such as 969,30,1; if not given, held_out_fraction is the validation part.
        tokenizer: tokenizer.json, or its folder, that made the token files; finetune uses the model's own.
    """

    held_out_fraction: Annotated[float, Range(0, 1, low_included=False, high_included=False)] = 0.03
    text_key: str = "text"
    split: str | None = None
    tokenizer: str | None = None


@dataclass(frozen=True)
class ProfileSettings(Checked, prefix="profile."):
    """A trace of some steps by torch.profiler on each rank; it does not change the results.

    Attributes:
        enabled: write the trace for chrome://tracing or Perfetto, one file per rank in ``out/profile``.
        wait: number of steps to skip from the first step of this start of the run.
        warmup: number of steps after these in which the profiler runs and its records are discarded.
        active: number of steps to trace after the warm-up.
    """

    enabled: Annotated[bool, tyro.conf.arg(aliases=("--profile",))] = False
    wait: Annotated[int, bounds.STEPS] = 5
    # Without a warm-up, PyTorch warns about skewed results.
    warmup: Annotated[int, Range(1, 1_000)] = 1
    # Each step takes some megabytes.
    active: Annotated[int, Range(1, 1_000)] = 3

    def _check_together(self) -> None:
        for name, value in self.changed("wait", "warmup", "active"):
            words = f"{name} {value} is for --profile, which is not given; give it, or leave the other out"
            require(self.enabled, words)

    @property
    def num_steps(self) -> int:
        """Number of steps that a complete trace takes."""
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
            standard library; NAME.idx is a pair of Megatron's token files. With weights, a blend: 0.7 web 0.3 code.
        out: folder for checkpoints, metrics, pictures and the tokenizer.
        resume: "auto" continues from the newest checkpoint in ``out`` if there is one; "never" starts anew and refuses
            a folder that has checkpoints; "restart" starts anew and deletes them.
        device: "auto", "cpu" or "cuda".
        special_tokens: parse the names of special tokens in the text, such as ``<|endoftext|>``, as these tokens, for
            text whose documents were joined with them; otherwise they are letters, and text cannot end a document.
        timeout: maximum seconds to wait for a rank in a step; then all ranks end with an error that names it.
            Preparing and saving may take longer, but even then a rank without heartbeats for that long ends the run.
        validate: before each collective of every step, check that the ranks agree on shapes and dtypes; if not given,
            only in the first step. For debugging; costs an additional message per collective.
        record_routing: folder for the experts that each token goes to in each step, for debugging.
        replay_routing: folder of an earlier run's ``record_routing``, with the same data, seed and batch size; tokens
            go to these experts at any layout and dtype, so that runs differ by rounding and not by choices.
        track: experiment trackers that get metrics, settings, plan and report; a failing one never stops the run.
        peak_tflops: peak TFLOP/s of one rank's device, the reference for the utilisation in the metrics; if not given,
            known for many GPUs, and measured on a CPU.
        parallel: kinds of parallelism.
        recompute: parts that the backward pass computes again instead of storing them.
        optimizer: AdamW or Muon, and the learning rate of each step.
        training: length, batch sizes, precision and checkpoints.
        profile: trace of some steps.
        corpus: reading and splitting of the text.
    """

    data: tuple[str, ...] = ()
    out: Annotated[str, Folder()] = "runs/train"
    resume: Literal["auto", "never", "restart"] = "never"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    special_tokens: bool = False
    timeout: Annotated[float, bounds.TIMEOUT] = bounds.DEFAULT_TIMEOUT
    validate: bool = False
    record_routing: Annotated[str | None, Folder()] = None
    replay_routing: Annotated[str | None, Folder()] = None
    track: tuple[TrackerName, ...] = ()
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
        require(
            self.record_routing is None or self.replay_routing is None,
            "record-routing cannot be used with --replay-routing: a replayed run makes the choices of its recording",
        )

    @property
    def trackers(self) -> tuple[str, ...]:
        """The trackers of ``track``, and TensorBoard if ``training.tensorboard`` asks for it."""
        return tuple(dict.fromkeys((*self.track, *(["tensorboard"] if self.training.tensorboard else []))))

    @property
    def model_name(self) -> str:
        """Name of the model, for messages."""
        return str(self.model.architecture)

    def on_device(self, device_type: str) -> Self:
        """Return the settings with the dtype that "auto" means on a device type such as ``"cuda"``."""
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
        """Check that no setting is without effect because another is missing."""
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
        """Check the settings against the number of ranks."""
        self.check_effect()
        sizes = {"tp": self.parallel.tp, "pp": self.parallel.pp, "cp": self.parallel.cp}
        several = {name: size for name, size in sizes.items() if name == "tp" or size > 1}
        split, pp, together = " x ".join(several), sizes["pp"], math.prod(sizes.values())
        require(
            world_size % together == 0,
            f"{' x '.join(f'parallel.{name} {size}' for name, size in several.items())} does not divide the "
            f"{world_size} ranks; start a multiple of {together} with --nproc, torchrun or on_ranks",
        )
        dp, length = world_size // together, self.model.sequence_length
        require(
            length is None or length >= sizes["cp"],
            f"model.sequence-length {length} is less than parallel.cp {sizes['cp']}; each rank needs a position",
        )
        self.parallel.check_exact(dp, self.model.sequence_length, self.training)
        batch, micro = self.training.global_batch_size, self.micro_batch_size(dp)
        require(
            batch % dp == 0,
            f"training.global-batch-size {batch} is not a multiple of the {dp} data-parallel ranks "
            f"({world_size} ranks / {split} {together})",
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
        """Convert to plain JSON values; the inverse of ``from_json``."""
        value: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Create settings from the values of ``to_json``, also of an earlier version (see ``without_removed``)."""
        if not isinstance(value, dict):
            raise ConfigError(f"settings is {shown(value)}; it must be an object")
        kept = without_removed(value)
        return with_values(cls, checked(cls, kept, "settings, maybe of another version: "))


def without_removed(values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of an earlier version's run without the tables of removed features."""
    for table, unused in _REMOVED_TABLES.items():
        given = values.get(table)
        for name, value in given.items() if isinstance(given, dict) else ():
            require(
                value == unused.get(name),
                f"the run has {table}.{name} {shown(value)}, a setting of an earlier version; resume it with that one",
            )
    return {name: value for name, value in values.items() if name not in _REMOVED_TABLES}


@dataclass(frozen=True)
class Settings(RunSettings):
    """Settings of a training run of a new model.

    Attributes:
        model: sizes and kind of the model.
    """

    model: ModelSettings = field(default_factory=ModelSettings)

    def _check_together(self) -> None:
        super()._check_together()
        require(
            self.model.num_heads >= self.parallel.tp,
            f"parallel.tp {self.parallel.tp} is more than the {self.model.num_heads} attention heads; lower it or "
            "raise model.num-heads",
        )
        parallel, model = self.parallel, self.model
        # Before the batch is compared with the ranks, whose number follows from ep.
        parallel.check_ep(model.num_experts or parallel.ep)
        if parallel.exact:
            refuse(
                "--exact has no exact form of {}; leave one of them out",
                (model.expert_capacity_factor, f"--model.expert-capacity-factor {model.expert_capacity_factor}"),
                (model.router_balance == "global", "--model.router-balance global"),
            )
        stages = parallel.pp * parallel.virtual_stages
        require(
            self.model.num_layers >= stages,
            f"model.num-layers {self.model.num_layers} is less than the {stages} parts of parallel.pp {parallel.pp} x "
            f"parallel.virtual-stages {parallel.virtual_stages}; each needs a layer",
        )

    def check_world(self, world_size: int) -> None:
        """Check the settings against the number of ranks, and the model against this machine's memory."""
        self.check_effect(self.model.num_layers)
        super().check_world(world_size)
        self.parallel.check_experts(world_size, self.model.num_experts)
        if "SC_PHYS_PAGES" not in os.sysconf_names:
            return
        model, ranks = self.model, self.parallel.tp * self.parallel.pp
        # A lower bound, without keys and values, biases and norms.
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
