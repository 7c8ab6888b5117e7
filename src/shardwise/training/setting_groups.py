"""The groups of a run's settings: model, parallel, recompute, training, corpus and profile.

Each is a plain frozen dataclass, checked when made, and a table of a run's TOML file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from shardwise.training import bounds
from shardwise.training.bounds import Checked, Range, require

_WIDTH = Range(1, 1 << 20)
_SAMPLES = Range(1, 10**6)
SEQUENCE = Range(2, 1 << 24)
"""Of tokens in a sample."""


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
    # The 256 bytes and the end-of-text token at least; at most four times the largest that anybody uses.
    vocab_size: Annotated[int, Range(257, 1 << 22)] = 4096
    sequence_length: Annotated[int, SEQUENCE] = 256
    tie_embeddings: bool = True
    dropout: Annotated[float, bounds.PROBABILITY] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_multiple("model.hidden-size", self.hidden_size, "model.num-heads", self.num_heads)
        groups = self.num_query_groups or self.num_heads
        _require_multiple("model.num-heads", self.num_heads, "model.num-query-groups", groups)
        require(
            self.architecture != "llama" or self.hidden_size // self.num_heads % 2 == 0,
            f"rotary positions need heads of even width; {self.hidden_size} / {self.num_heads} is odd",
        )


@dataclass(frozen=True)
class ParallelSettings(Checked, prefix="parallel."):
    """How the model is split.

    Attributes:
        tp: ranks that split each layer; what tp and pp leave of the ranks is data parallelism.
        sequence_parallel: split what lies between tensor-parallel regions along the sequence, which saves memory.
        tp_comm_overlap: with sequence_parallel let the linear layers multiply what ranks gather as it arrives, and send
            what they sum as it is made; on GPUs through symmetric memory where they can. The banner says which way.
        pp: pipeline stages, which share out the layers; the text sample at the end of a run needs one stage.
        pipeline_schedule: the order in which stages take micro-batches forward and back. "interleaved" goes with
            virtual_stages over 1.
        virtual_stages: parts of the model on each stage.
        fsdp: split weights, gradients and optimizer state over the data-parallel ranks, by PyTorch's fully_shard; a
            layer's weights are gathered when it is computed.
        zero: 1 splits the optimizer's state and fp32 copies of weights over the data-parallel ranks; 0 keeps all of
            them on each.
        exact: results have the same bits at every tp, sequence_parallel or not, every pp and every number of
            data-parallel ranks; costs some time.
        exact_parts: with exact, into how many parts sums are cut: the most ranks of a kind; a power of two.
    """

    tp: Annotated[int, bounds.RANKS, tyro.conf.arg(aliases=("--tp",))] = 1
    sequence_parallel: Annotated[bool, tyro.conf.arg(aliases=("--sequence-parallel",))] = False
    tp_comm_overlap: Annotated[bool, tyro.conf.arg(aliases=("--tp-comm-overlap",))] = False
    pp: Annotated[int, bounds.RANKS, tyro.conf.arg(aliases=("--pp",))] = 1
    pipeline_schedule: Annotated[
        Literal["gpipe", "1f1b", "interleaved", "zero-bubble"], tyro.conf.arg(aliases=("--pipeline-schedule",))
    ] = "1f1b"
    virtual_stages: Annotated[int, bounds.RANKS, tyro.conf.arg(aliases=("--virtual-stages",))] = 1
    fsdp: Annotated[bool, tyro.conf.arg(aliases=("--fsdp",))] = False
    zero: Annotated[int, Range(0, 1), tyro.conf.arg(aliases=("--zero",))] = 0
    exact: Annotated[bool, tyro.conf.arg(aliases=("--exact",))] = False
    exact_parts: Annotated[int, Range(1, 1024), tyro.conf.arg(aliases=("--exact-parts",))] = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.sequence_parallel or not self.tp_comm_overlap,
            "parallel.tp-comm-overlap is about the gathers and sums of --parallel.sequence-parallel, which is off; use "
            "both, or neither",
        )
        require(
            not (self.exact and self.tp_comm_overlap),
            "parallel.exact and --parallel.tp-comm-overlap exclude each other: exact makes products and sums over "
            "fixed parts, whatever the ranks; leave one out",
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
            "parallel.fsdp and --parallel.zero 1 exclude each other: fsdp splits optimizer state too; leave one out",
        )
        require(
            not (self.fsdp and self.pp > 1 and self.pipeline_schedule == "zero-bubble"),
            "parallel.fsdp and --parallel.pipeline-schedule 'zero-bubble' exclude each other: fully_shard sums the "
            "gradients of a layer when its backward ends, and zero-bubble computes those of weights later; use '1f1b', "
            "'gpipe' or 'interleaved'",
        )

        parts = self.exact_parts
        require(parts & (parts - 1) == 0, f"parallel.exact-parts is {parts}; it must be a power of two, such as 8")

    def shards_fully(self, dp: int) -> bool:
        """Whether ``fsdp`` asks for it, and any of ``dp`` data-parallel ranks has another to share the weights with."""
        return self.fsdp and dp > 1


@dataclass(frozen=True)
class RecomputeSettings(Checked, prefix="recompute."):
    """What is computed again in the backward, in place of being kept: less memory for more time, the same bits.

    Attributes:
        granularity: "full" keeps the input of layers only, and takes about a third more time; "selective" recomputes
            parts of every layer, those of modules.
        method: with "full": "uniform" keeps the input of every num_layers-th layer and recomputes all of them; "block"
            recomputes the first num_layers layers of each stage, and keeps what the others need.
        num_layers: see method.
        modules: with "selective": attention between its projections (core_attn), the norms before attention and MLP,
            the MLP, or its activation alone (mlp_act).
    """

    granularity: Literal["none", "full", "selective"] = "none"
    method: Literal["uniform", "block"] = "uniform"
    num_layers: Annotated[int, Range(1, 10_000)] = 1
    modules: tuple[Literal["core_attn", "layernorm", "mlp", "mlp_act"], ...] = ("core_attn",)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, granularity in (("method", "full"), ("num_layers", "full"), ("modules", "selective")):
            value = getattr(self, name)
            require(
                self.granularity == granularity or value == getattr(type(self), name),
                f"recompute.{name.replace('_', '-')} {value} needs --recompute.granularity {granularity} (it is "
                f"{self.granularity!r})",
            )
        require(bool(self.modules), "recompute.modules names nothing; name at least one module, such as core_attn")
        require(
            not {"mlp", "mlp_act"} <= set(self.modules),
            "recompute.modules has mlp and mlp_act, which is a part of it; choose one of them",
        )

    def config_fields(self) -> dict[str, Any]:
        """The fields of a model's config that say so."""
        full, selective = self.granularity == "full", self.granularity == "selective"
        return {
            "recompute_granularity": self.granularity if full or selective else None,
            "recompute_method": self.method if full else None,
            "recompute_num_layers": self.num_layers if full else None,
            "recompute_modules": self.modules if selective else None,
        }


@dataclass(frozen=True)
class TrainingSettings(Checked, prefix="training."):
    """How long, in which steps, and what is kept.

    Attributes:
        steps: optimizer steps in all.
        global_batch_size: samples per step, over all ranks.
        micro_batch_size: samples per forward and backward on a rank; if not given all of the rank's at once, or one
            where there are pipeline stages, which take turns with micro-batches.
        seed: of initial weights, the order of samples, and dropout.
        eval_every: steps between measurements on the held-out text; 0 measures only at the end.
        save_every: steps between checkpoints; 0 saves by save_minutes and at the end alone.
        save_minutes: minutes between checkpoints, at the end of a step; 0 saves by save_every and at the end alone.
            SIGTERM, SIGINT (Ctrl-C) and SIGHUP save too, and end the run.
        keep_checkpoints: newest checkpoints to keep.
        asynchronous_saves: copy what is to be saved, and write it while the run trains on; off, training waits for the
            disk, and the host needs no memory for the copy: on each rank as many bytes as it writes.
        dtype: of parameters and computation; "auto" is "bfloat16" on CUDA, and "float32" elsewhere. "tf32" is "float32"
            whose products read 11 bits of each factor, several times as fast on CUDA's tensor cores. With "bfloat16"
            and "float16" gradients are summed in fp32, and the optimizer updates fp32 copies of the weights; "float16"
            scales the loss, and skips steps whose gradient overflows. "pure-bfloat16" keeps no copies: less memory, and
            steps too small for bf16 are lost.
        tensorboard: also write the metrics for TensorBoard, into ``out/tensorboard``.
        loss: "linear_fused" computes output layer and loss in one, without the logits of all ranks; "plain" one
            after the other.
        rng: whose numbers dropout draws: "global" draws the same masks at every tp, so that the run does not depend on
            it; "per_rank" lets each rank draw its own, which takes less time and memory.
    """

    steps: Annotated[int, Range(1, 10**9)] = 500
    global_batch_size: Annotated[int, _SAMPLES] = 16
    micro_batch_size: Annotated[int | None, _SAMPLES] = None
    seed: Annotated[int, bounds.SEED] = 1234
    eval_every: Annotated[int, bounds.STEPS] = 0
    save_every: Annotated[int, bounds.STEPS] = 0
    # At most ten years.
    save_minutes: Annotated[float, Range(0, 5_000_000)] = 10.0
    keep_checkpoints: Annotated[int, Range(1, 10**6)] = 2
    asynchronous_saves: bool = True
    dtype: Literal["auto", "float32", "tf32", "float64", "bfloat16", "float16", "pure-bfloat16"] = "auto"
    tensorboard: bool = False
    loss: Literal["plain", "linear_fused"] = "linear_fused"
    rng: Literal["per_rank", "global"] = "global"


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
        active: steps after these, of which the trace is.
    """

    enabled: Annotated[bool, tyro.conf.arg(aliases=("--profile",))] = False
    wait: Annotated[int, bounds.STEPS] = 5
    # PyTorch warns of results without.
    warmup: Annotated[int, Range(1, 1_000)] = 1
    # Each is some megabytes.
    active: Annotated[int, Range(1, 1_000)] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("wait", "warmup", "active"):
            value = getattr(self, name)
            require(
                self.enabled or value == getattr(type(self), name),
                f"profile.{name} {value} is for --profile, which is not given; give it, or leave the other out",
            )

    @property
    def num_steps(self) -> int:
        """Those that a run must do for the trace to be whole."""
        return self.wait + self.warmup + self.active if self.enabled else 0

    def check_steps(self, first: int, last: int) -> None:
        """Raise ConfigError unless the steps from ``first`` to before ``last`` suffice."""
        require(
            self.num_steps <= last - first,
            f"profile.wait {self.wait}, profile.warmup {self.warmup} and profile.active {self.active} are "
            f"{self.num_steps} steps, and there are {last - first} to do; lower them",
        )
