"""Settings of a training step: parallelism, steps, and the optimizer.

Each class is a frozen dataclass that checks its values on construction, and corresponds to a table of a run's TOML
file. The settings of a whole run are in ``shardwise.run.settings``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from shardwise.training import bounds
from shardwise.training.bounds import Checked, Range, refuse, require

if TYPE_CHECKING:
    from torch import nn

    from shardwise.training.optimizer.optimizer import ShardedOptimizer


@dataclass(frozen=True)
class ParallelSettings(Checked, prefix="parallel."):
    """Settings of the model's parallelism.

    Attributes:
        tp: number of ranks that split each layer; the number of data-parallel ranks is all ranks divided by tp * pp *
            cp.
        sequence_parallel: split activations between tensor-parallel regions along the sequence, which saves memory.
        tp_comm_overlap: with sequence_parallel, overlap the gathers and sums of the linear layers with their products,
            shard by shard; on GPUs through symmetric memory if possible. The banner reports the method.
        pp: number of pipeline stages that share the layers; the text sample at the end of a run needs one stage.
        cp: number of ranks that share the positions of each sample (context parallelism), for long samples.
        cp_comm_type: with cp, how attention reaches the positions of other ranks: "all_gather" gathers keys and
            values, "a2a" exchanges positions for heads, and "p2p" takes keys and values one rank after the other. The
            choice of "auto" between the first two depends on heads and mask, and the banner reports it.
        pipeline_schedule: order of forward and backward steps. "interleaved" needs virtual_stages over 1.
        virtual_stages: number of parts of the model on each stage.
        fsdp: split weights, gradients and optimizer state over the data-parallel ranks with PyTorch's fully_shard; a
            layer's weights are gathered when it is computed.
        zero: 1 splits the optimizer state and the fp32 copies of weights over the data-parallel ranks; 0 keeps all of
            them on each rank.
        exact: give results the same bits at every tp, pp, cp and number of data-parallel ranks, with or without
            sequence_parallel; costs some time.
        ep: number of ranks that divide the experts of a model between them; they may be data-parallel ranks.
        etp: number of ranks that split each expert; if not given, tp, or 1 with exact.
        ep_comm_type: how tokens reach the ranks of their experts: "a2a" sends each choice of a token to the ranks that
            hold the expert, and "all_gather" all tokens to all ranks. "auto" chooses what sends fewer bytes; the banner
            reports its choice.
        exact_parts: with exact, number of parts into which sums are cut, a power of two; tp, pp and dp may be at most
            this, and cp times tp, 2 or dp.
    """

    tp: Annotated[int, bounds.RANKS, tyro.conf.arg(aliases=("--tp",))] = 1
    sequence_parallel: Annotated[bool, tyro.conf.arg(aliases=("--sequence-parallel",))] = False
    tp_comm_overlap: Annotated[bool, tyro.conf.arg(aliases=("--tp-comm-overlap",))] = False
    pp: Annotated[int, bounds.RANKS, tyro.conf.arg(aliases=("--pp",))] = 1
    cp: Annotated[int, bounds.RANKS, tyro.conf.arg(aliases=("--cp",))] = 1
    cp_comm_type: Annotated[Literal["auto", "all_gather", "a2a", "p2p"], tyro.conf.arg(aliases=("--cp-comm-type",))] = (
        "auto"
    )
    pipeline_schedule: Annotated[
        Literal["gpipe", "1f1b", "interleaved", "zero-bubble"], tyro.conf.arg(aliases=("--pipeline-schedule",))
    ] = "1f1b"
    virtual_stages: Annotated[int, bounds.RANKS, tyro.conf.arg(aliases=("--virtual-stages",))] = 1
    fsdp: Annotated[bool, tyro.conf.arg(aliases=("--fsdp",))] = False
    zero: Annotated[int, Range(0, 1), tyro.conf.arg(aliases=("--zero",))] = 0
    exact: Annotated[bool, tyro.conf.arg(aliases=("--exact",))] = False
    exact_parts: Annotated[int, bounds.PARTS, tyro.conf.arg(aliases=("--exact-parts",))] = bounds.DEFAULT_PARTS
    ep: Annotated[int, bounds.RANKS, tyro.conf.arg(aliases=("--ep",))] = 1
    etp: Annotated[int | None, bounds.RANKS, tyro.conf.arg(aliases=("--etp",))] = None
    ep_comm_type: Annotated[Literal["auto", "all_gather", "a2a"], tyro.conf.arg(aliases=("--ep-comm-type",))] = "auto"

    def _check_together(self) -> None:
        require(
            self.sequence_parallel or not self.tp_comm_overlap,
            "parallel.tp-comm-overlap needs --parallel.sequence-parallel, whose gathers and sums it overlaps",
        )
        require(
            not (self.exact and self.tp_comm_overlap),
            "parallel.exact cannot be used with --parallel.tp-comm-overlap: exact makes products and sums over fixed "
            "parts at any number of ranks",
        )
        require(
            self.cp > 1 or self.cp_comm_type == "auto",
            f"parallel.cp-comm-type {self.cp_comm_type} is for --parallel.cp of at least 2, and it is {self.cp}; leave "
            "it out",
        )
        require(
            self.virtual_stages == 1 or (self.pp > 1 and self.pipeline_schedule == "interleaved"),
            f"parallel.virtual-stages {self.virtual_stages} needs --parallel.pipeline-schedule interleaved (it is "
            f"{self.pipeline_schedule!r}) and --parallel.pp of at least 2 (it is {self.pp})",
        )
        require(
            self.pp == 1 or self.pipeline_schedule != "interleaved" or self.virtual_stages > 1,
            "parallel.pipeline-schedule 'interleaved' needs --parallel.virtual-stages of at least 2",
        )
        require(
            not (self.fsdp and self.zero),
            "parallel.fsdp cannot be used with --parallel.zero 1: fsdp splits optimizer state too",
        )
        require(
            not (self.fsdp and self.pp > 1 and self.pipeline_schedule == "zero-bubble"),
            "parallel.fsdp cannot be used with --parallel.pipeline-schedule 'zero-bubble': fully_shard sums the "
            "gradients of a layer when its backward ends, and zero-bubble computes those of weights later; use '1f1b', "
            "'gpipe' or 'interleaved'",
        )
        parts = self.exact_parts
        require(parts & (parts - 1) == 0, f"parallel.exact-parts is {parts}; it must be a power of two, such as 8")

    def check_exact(self, dp: int, sequence_length: int | None, training: TrainingSettings) -> None:
        """If a run is exact, check that all its settings have an exact form."""
        if (parts := self.parts) is None:
            return
        sizes = {"parallel.tp": self.tp, "parallel.pp": self.pp, "data-parallel ranks": dp}
        if self.cp > 1:
            what = "parallel.cp times the largest of 2, parallel.tp and the number of data-parallel ranks"
            sizes[what] = self.cp * max(2, self.tp, dp)
        for axis, size in sizes.items():
            require(
                size & (size - 1) == 0 and size <= parts,
                f"parallel.exact is for powers of two up to parallel.exact-parts {parts}, and there are {size} for "
                f"{axis}; use another number of ranks, more exact-parts, or no --exact",
            )
        if sequence_length is not None:
            self.check_length(sequence_length)
        refuse(
            "--exact has no exact form of {}; leave one of them out",
            (self.fsdp, "parallel.fsdp, whose sums are PyTorch's"),
            (
                self.cp_comm_type not in ("auto", "a2a"),
                f"parallel.cp-comm-type {self.cp_comm_type}, whose sums of gradients round by the number of ranks",
            ),
            (training.dtype == "float64", "training.dtype float64, whose products differ with the layout"),
            (training.rng != "global", f"training.rng {training.rng}, whose random numbers differ from rank to rank"),
        )

    def check_length(self, length: int) -> None:
        """Raise ConfigError if a run is exact and a sequence of ``length`` tokens cannot be cut into its parts."""
        parts = self.parts or 1
        require(
            length % parts == 0,
            f"parallel.exact cuts a sequence into {parts} equal parts (parallel.exact-parts), and it has {length} "
            f"tokens; the largest exact-parts that works is {length & -length}",
        )

    def check_ep(self, num_experts: int) -> None:
        """Raise ConfigError unless ``ep`` ranks can hold as many experts each."""
        require(
            num_experts % self.ep == 0,
            f"the {num_experts} experts of the model are not a multiple of parallel.ep {self.ep}; change one",
        )

    def check_experts(self, world_size: int, num_experts: int | None) -> None:
        """Raise ConfigError unless the experts can be divided among the ranks."""
        if num_experts is None:
            for name, value in self.changed("ep", "etp", "ep_comm_type"):
                # With exact, etp is 1.
                is_default = self.exact and name.endswith("etp") and value == 1
                require(
                    is_default, f"{name} {value} is about the experts of a model, and this one has none; leave it out"
                )
            return
        self.check_ep(num_experts)
        etp = self.expert_tp
        require(
            world_size % (self.ep * etp * self.pp) == 0,
            f"parallel.ep {self.ep} x etp {etp} x parallel.pp {self.pp} does not divide the {world_size} ranks",
        )
        refuse(
            "experts cannot be used with {}",
            (self.exact and etp > 1, f"parallel.exact and etp {etp}"),
            # Otherwise the fused AdamW may update parts of a vector on a rank.
            (self.exact and self.ep > self.exact_parts, f"parallel.exact and ep {self.ep} over exact-parts"),
            (self.exact and self.cp > 1, f"parallel.exact and parallel.cp {self.cp}"),
            (self.exact and self.ep_comm_type == "all_gather", "parallel.exact and parallel.ep-comm-type all_gather"),
            (
                self.exact and self.pp > 1 and self.pipeline_schedule == "zero-bubble",
                "parallel.exact and parallel.pipeline-schedule zero-bubble",
            ),
        )

    @property
    def parts(self) -> int | None:
        """Number of parts into which sums are cut; None unless results are exact."""
        return self.exact_parts if self.exact else None

    @property
    def expert_tp(self) -> int:
        """Number of ranks that split each expert."""
        return self.etp or (self.tp if self.parts is None else 1)

    @property
    def fewest_ranks(self) -> int:
        """The smallest number of ranks that both the dense layers and the experts can be split over."""
        return self.pp * math.lcm(self.tp * self.cp, self.ep * self.expert_tp)

    def shards_fully(self, dp: int) -> bool:
        """Whether weights are fully sharded: ``fsdp`` is on, and there are several data-parallel ranks."""
        return self.fsdp and dp > 1


@dataclass(frozen=True)
class TrainingSettings(Checked, prefix="training."):
    """Settings of the length of training, its steps, and its checkpoints.

    Attributes:
        steps: total number of optimizer steps.
        global_batch_size: number of samples per step, over all ranks.
        micro_batch_size: number of samples per forward and backward on a rank; if not given, all samples of the rank at
            once, or one with pipeline stages.
        seed: seed of initial weights, the order of samples, and dropout.
        eval_every: number of steps between evaluations on the held-out data; 0 evaluates only at the end. If not given,
            a tenth of the steps, with so few of the data before the end that evaluations take little time.
        save_every: number of steps between checkpoints; 0 saves only by save_minutes and at the end.
        save_minutes: minutes between checkpoints, which are saved at the end of a step; 0 saves only by save_every and
            at the end. SIGTERM, SIGINT (Ctrl-C) and SIGHUP save a checkpoint and end the run.
        keep_checkpoints: number of newest checkpoints to keep.
        asynchronous_saves: copy the state to host memory, as many bytes as each rank writes, and write it while
            training continues. Off, training waits for the disk, and no memory is needed for the copy.
        dtype: dtype of parameters and computation; "auto" is "bfloat16" on CUDA, and "float32" elsewhere. "tf32" is
            fp32 whose products read 11 bits of each factor, several times as fast on CUDA's tensor cores. With
            dtypes "bfloat16" and "float16", gradients are summed in fp32, and the optimizer updates fp32 copies of the
            weights; "float16" scales the loss, and skips steps whose gradient overflows. "pure-bfloat16" keeps no
            copies, which saves memory but loses updates too small for bf16.
        doctor_every: number of steps between comparisons of the parameters that ranks hold copies of; the run stops at
            the first that differs. 0 compares them only before the first step.
        tensorboard: another name of --track tensorboard, which writes to ``out/tensorboard``.
        loss: "linear_fused" computes the output layer and the loss together, without gathering logits; "plain" computes
            one after the other.
        rng: random numbers of dropout: "global" draws the same masks at every tp, so that the run does not depend on
            tp; "per_rank" draws different masks on each rank, which takes less time and memory.
    """

    steps: Annotated[int, Range(1, 10**9), tyro.conf.arg(aliases=("--steps",))] = 500
    global_batch_size: Annotated[int, bounds.BATCH, tyro.conf.arg(aliases=("--batch-size",))] = 16
    micro_batch_size: Annotated[int | None, bounds.BATCH] = None
    seed: Annotated[int, bounds.SEED] = 1234
    eval_every: Annotated[int | None, bounds.STEPS] = None
    save_every: Annotated[int, bounds.STEPS] = 0
    # At most ten years.
    save_minutes: Annotated[float, Range(0, 5_000_000)] = 10.0
    keep_checkpoints: Annotated[int, Range(1, 10**6)] = 2
    asynchronous_saves: bool = True
    dtype: Literal["auto", "float32", "tf32", "float64", "bfloat16", "float16", "pure-bfloat16"] = "auto"
    doctor_every: Annotated[int, bounds.STEPS, tyro.conf.arg(aliases=("--doctor-every",))] = 0
    tensorboard: bool = False
    loss: Literal["plain", "linear_fused"] = "linear_fused"
    rng: Literal["per_rank", "global"] = "global"

    @property
    def evaluation_interval(self) -> int:
        """Number of steps between evaluations; 0 for none before the end."""
        return max(1, self.steps // 10) if self.eval_every is None else self.eval_every


Schedule = Literal["constant", "linear", "cosine", "wsd"]
"""Shape of the learning rate from its highest value, after the warm-up, to its last."""


_DECAY_SHARE, _MOMENTUM = 0.2, 0.95

# fp32 can represent this number, with room for a few products.
_LARGE = 1e30
RATE = Range(0, _LARGE, low_included=False)
"""Range of a learning rate."""

DECAY = Range(0, 10_000)
"""Range of a weight decay."""


@dataclass(frozen=True)
class OptimizerSettings(Checked, prefix="optimizer."):
    """Settings of the optimizer and the learning rate.

    Attributes:
        name: "adamw", or "muon" for the weight matrices of transformer layers, with AdamW for all else.
        learning_rate: highest learning rate.
        schedule: shape of the learning rate after the warm-up: "constant" keeps it, "linear" and "cosine" lower it
            until the last step, and "wsd" (warm-up, stable, decay) keeps it and then lowers it linearly over the last
            decay_share of the steps.
        final_learning_rate_ratio: last learning rate divided by the highest, from 0 to 1; not used by "constant".
        warmup_steps: number of steps over which the learning rate rises from 0.
        decay_share: fraction of all steps over which "wsd" falls; 0.2 if not given.
        weight_decay: decoupled weight decay of matrices and embeddings, per unit of learning rate.
        beta1: decay of the running mean of the gradient.
        beta2: decay of the running mean of the squared gradient.
        epsilon: number added to the root mean square of the gradient.
        clip_grad_norm: maximum global gradient norm, to which larger gradients are scaled down. 0 turns clipping off.
        momentum: decay of the running mean of the gradient in "muon"; 0.95 if not given.
        matrix_learning_rate_ratio: learning rate of the matrices of "muon", divided by learning_rate; 1 if not given.
    """

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: Annotated[float, RATE, tyro.conf.arg(aliases=("--lr",))] = 3e-3
    schedule: Schedule = "cosine"
    final_learning_rate_ratio: Annotated[float, bounds.SHARE] = 0.1
    warmup_steps: Annotated[int, bounds.STEPS] = 20
    decay_share: Annotated[float | None, bounds.SHARE] = None
    weight_decay: Annotated[float, DECAY] = 0.1
    beta1: Annotated[float, bounds.PROBABILITY] = 0.9
    beta2: Annotated[float, bounds.PROBABILITY] = 0.95
    # Without epsilon the update of a weight that never had a gradient is 0 / 0; smaller values vanish in fp32.
    epsilon: Annotated[float, Range(1e-30, 10_000)] = 1e-8
    clip_grad_norm: Annotated[float, Range(0, _LARGE)] = 1.0
    momentum: Annotated[float | None, bounds.PROBABILITY] = None
    matrix_learning_rate_ratio: Annotated[float | None, Range(0, _LARGE)] = None

    def _check_together(self) -> None:
        for switch, choice, names in (
            ("name", "muon", ("momentum", "matrix_learning_rate_ratio")),
            ("schedule", "wsd", ("decay_share",)),
        ):
            given = getattr(self, switch)
            for name, value in self.changed(*names):
                words = f"{name} {value} is for --optimizer.{switch} {choice}, and it is {given!r}; change one"
                require(given == choice, words)

    def learning_rate_at(self, step: int, steps: int) -> float:
        """Return the learning rate of step ``step`` (from 0) of ``steps``: a linear rise, then the schedule.

        "cosine" is Loshchilov and Hutter 2017 (arXiv:1608.03983), "wsd" Hu et al. 2024 (arXiv:2404.06395). After
        ``steps`` steps the rate stays that of the last step.

        >>> options = {"schedule": "linear", "warmup_steps": 2, "final_learning_rate_ratio": 0.0}
        >>> plan = OptimizerSettings(learning_rate=1.0, **options)
        >>> [plan.learning_rate_at(step, 6) for step in range(6)]
        [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
        """
        highest, final_ratio = self.learning_rate, self.final_learning_rate_ratio
        if step < self.warmup_steps:
            return highest * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return highest
        falling = steps - self.warmup_steps
        if self.schedule == "wsd":
            falling = min(falling, round((_DECAY_SHARE if self.decay_share is None else self.decay_share) * steps))
        progress = min(1.0, max(0.0, (step + 1 - (steps - falling)) / max(1, falling)))
        left = 0.5 * (1.0 + math.cos(math.pi * progress)) if self.schedule == "cosine" else 1.0 - progress
        return highest * (final_ratio + (1.0 - final_ratio) * left)

    def make(self, model: nn.Module) -> ShardedOptimizer:
        """Build the optimizer of ``model``."""
        from shardwise.training.optimizer.adamw import AdamW
        from shardwise.training.optimizer.exact_adamw import ExactAdamW
        from shardwise.training.optimizer.muon import Muon

        options: dict[str, Any] = {
            "learning_rate": self.learning_rate,
            "weight_decay": self.weight_decay,
            "betas": (self.beta1, self.beta2),
            "epsilon": self.epsilon,
        }
        parts = getattr(getattr(model, "config", None), "exact_parts", None)
        adamw = AdamW if parts is None else partial(ExactAdamW, parts=parts)
        if self.name == "adamw":
            return adamw(model, **options)
        momentum, ratio = self.momentum, self.matrix_learning_rate_ratio
        options["momentum"] = _MOMENTUM if momentum is None else momentum
        return Muon(model, matrix_learning_rate_ratio=1.0 if ratio is None else ratio, adamw=adamw, **options)


class StepSettings(Checked):
    """Settings of a run that a step reads; ``RunSettings`` adds the others.

    Attributes:
        parallel: settings of the model's parallelism.
        optimizer: settings of the optimizer and the learning rate.
        training: settings of the length of training, its steps, and its checkpoints.
        model: settings of the model, including ``sequence_length``.
    """

    parallel: ParallelSettings
    optimizer: OptimizerSettings
    training: TrainingSettings
    model: Any

    @property
    def sequence_length(self) -> int:
        """Number of tokens in a sample; known once it is given or read from the model that the run starts from."""
        length: int | None = self.model.sequence_length
        assert length is not None
        return length

    def micro_batch_size(self, dp: int) -> int:
        """Return the number of samples per forward and backward on one of ``dp`` data-parallel ranks."""
        batch, given = self.training.global_batch_size, self.training.micro_batch_size
        if given is not None:
            return given
        if (parts := self.parallel.parts) is not None:
            return micro_batch_size_of_parts(batch, parts)
        return 1 if self.parallel.pp > 1 else max(1, batch // dp)


def micro_batch_size_of_parts(global_batch_size: int, parts: int) -> int:
    """Return the micro-batch size, the same at every layout: one micro-batch per part, or else of one sample."""
    return global_batch_size // parts if global_batch_size % parts == 0 else 1
