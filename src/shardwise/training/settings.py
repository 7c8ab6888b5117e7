"""The settings of a training run, checked when made, and the checks of an exact run before it starts.

They are what ``shardwise train --help`` explains, what a TOML file fills, and what a checkpoint records.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from shardwise.core.errors import ConfigError
from shardwise.core.files import shown
from shardwise.training import bounds
from shardwise.training.bounds import Checked, Folder, Range, checked, require, with_values
from shardwise.training.optimizer_settings import OptimizerSettings
from shardwise.training.setting_groups import (
    CorpusSettings,
    ModelSettings,
    ParallelSettings,
    ProfileSettings,
    RecomputeSettings,
    TrainingSettings,
)


def exact_micro_batch_size(global_batch_size: int, exact_parts: int) -> int:
    """Samples of a micro-batch, the same at every layout: as many micro-batches as parts, or of one sample each."""
    return global_batch_size // exact_parts if global_batch_size % exact_parts == 0 else 1


def check_exact(
    parts: int, *, tp: int, pp: int, dp: int, sequence_length: int | None, fsdp: bool, dtype: str, rng: str
) -> None:
    """Refuse what would not have the same bits at every layout.

    Args:
        parts: ``parallel.exact_parts``.
        tp, pp, dp: ranks along each axis.
        sequence_length: tokens in a sample; None where a fine-tuning run takes the model's, which is known once its
            folder was looked at.
        fsdp, dtype, rng: the settings of these names.

    Raises:
        ConfigError: what it is, and what to do.
    """
    for axis, size in (("parallel.tp", tp), ("parallel.pp", pp), ("data-parallel ranks", dp)):
        require(
            size & (size - 1) == 0 and size <= parts,
            f"parallel.exact is for powers of two up to parallel.exact-parts {parts}, and there are {size} for {axis}; "
            "use another number of ranks, more exact-parts, or no --exact",
        )
    if sequence_length is not None:
        check_exact_length(sequence_length, parts)
    for excluded, what in (
        (fsdp, "parallel.fsdp, whose sums are PyTorch's"),
        (dtype == "float64", "training.dtype float64, whose products differ with the layout"),
        (rng != "global", f"training.rng {rng}, by which each rank draws its own"),
    ):
        require(not excluded, f"parallel.exact has no exact form of {what}; leave one of them out")


def check_exact_length(length: int, parts: int) -> None:
    """Refuse a sequence of ``length`` tokens that cannot be cut into so many equal parts, with a ConfigError."""
    require(
        length % parts == 0,
        f"parallel.exact cuts a sequence into {parts} equal parts (parallel.exact-parts), and it has {length} tokens; "
        f"the largest exact-parts that works is {_largest_power_of_two_in(length)}",
    )


def _largest_power_of_two_in(number: int) -> int:
    return number & -number


_BYTES = {"auto": 4, "float32": 4, "tf32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "pure-bfloat16": 2}


@dataclass(frozen=True)
class RunSettings(Checked):
    """What a run is told whatever model it trains.

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
        peak_tflops: the most that one rank's device can do, in TFLOP/s, of which metrics say how much was used; known
            of many GPUs, and measured on a CPU, if not given.
        parallel: how the model is split.
        recompute: what is computed again in the backward, in place of being kept.
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

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.data), "no text to train on; pass --data with files or folders, or --data stdlib")
        self.profile.check_steps(0, self.training.steps)

    @property
    def sequence_length(self) -> int:
        """Tokens in a sample."""
        raise NotImplementedError

    @property
    def model_name(self) -> str:
        """What people call the model."""
        raise NotImplementedError

    def micro_batch_size(self, dp: int) -> int:
        """Samples per forward and backward on one of ``dp`` data-parallel ranks."""
        if self.training.micro_batch_size is not None:
            return self.training.micro_batch_size
        if self.parallel.exact:
            return exact_micro_batch_size(self.training.global_batch_size, self.parallel.exact_parts)
        return 1 if self.parallel.pp > 1 else max(1, self.training.global_batch_size // dp)

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
        parts, usual = self.parallel.exact_parts, ParallelSettings.exact_parts
        require(
            self.parallel.exact or parts == usual,
            f"parallel.exact-parts {parts} is for exact runs, and parallel.exact is off; add --exact, or leave "
            "exact-parts out",
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
        if self.parallel.exact:
            check_exact(
                self.parallel.exact_parts,
                tp=tp,
                pp=pp,
                dp=dp,
                sequence_length=self.model.sequence_length,  # type: ignore[attr-defined]
                fsdp=self.parallel.fsdp,
                dtype=self.training.dtype,
                rng=self.training.rng,
            )
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

    def __post_init__(self) -> None:
        super().__post_init__()
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

    @property
    def sequence_length(self) -> int:
        """Tokens in a sample."""
        return self.model.sequence_length

    @property
    def model_name(self) -> str:
        """What people call the model."""
        return self.model.architecture
