"""Planted faults that ``shardwise.doctor`` is judged by, written before it and without knowing how it works.

The tool records a run of a parallel model and the same run on one rank. From both it names the first wrong module and
the kind of the fault. A ``Script`` is a run of a model that is not Shardwise's (``programs``). An ``OurFault`` is a
change in Shardwise itself, and the arguments of the run in which it shows. Answers are not
to be changed to suit the tool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from doctor.programs import Options, Watcher, by_hand, with_dtensor, with_transformers
from torch.distributed import ProcessGroup

KINDS = (
    # A partial sum that was never summed over ranks.
    "never summed",
    # Summed twice, times tp, averaged, or any constant factor.
    "scaled",
    # Every rank has the value of one rank.
    "one rank's copy",
    # Copies that must be equal differ between ranks, and their sum explains nothing.
    "drifted",
    "wrong group",
    # Shards in another order, or rows offset by n.
    "misplaced",
    # The value of an earlier step or micro-batch.
    "stale",
    # A gradient counted twice or not at all in the gradient norm.
    "norm",
    # Scaled by the number of micro-batches, or summed again with each.
    "micro-batches",
    # Dropout masks that repeat or differ between ranks where they must not.
    "random stream",
    # Positions that restart on each rank.
    "positions",
    # Labels shifted or ignored wrongly, or divided by a local count.
    "labels",
    # Ranks train on the same samples, or skip some.
    "samples",
)

Family = Literal["transformers", "dtensor", "by hand"]
Passes = Literal["forward", "backward", "update"]

_PROGRAMS: dict[Family, Callable[[ProcessGroup, Watcher, str, torch.dtype, Options], None]] = {
    "by hand": by_hand,
    "dtensor": with_dtensor,
    "transformers": with_transformers,
}

_USUAL = Options()


@dataclass(frozen=True)
class Script:
    """A training run of a model that is not Shardwise's.

    Attributes:
        name: name of the fault, which is unique; or of the layout of a sound run.
        family: the program.
        ranks: number of ranks.
        kind: one of ``KINDS``; "" for a sound run.
        modules: names of modules and parameters of the one-rank model that are right answers; "" is the whole model,
            for a fault outside of any module, or in all of them.
        passes: where the first wrong tensor appears; in "forward" for a sound run.
        options: layout and variant.
        dtype: dtype of the model.
        fault: name of the fault in ``programs``; "" for a sound run.
    """

    name: str
    family: Family
    ranks: int
    kind: str
    modules: tuple[str, ...]
    passes: Passes
    options: Options = _USUAL
    dtype: torch.dtype = torch.float32
    fault: str = ""

    def run(self, group: ProcessGroup, watcher: Watcher, planted: bool, dtype: torch.dtype | None = None) -> None:
        """Train two steps."""
        program = _PROGRAMS[self.family]
        program(group, watcher, self.fault if planted else "", dtype or self.dtype, self.options)


_SEQUENCE = Options(sequence=True)
_DP = Options(tp=1)
_SGD = Options(optimizer="sgd")
_QWEN = Options(architecture="qwen3")


def _hand(
    fault: str, kind: str, modules: tuple[str, ...], passes: Passes, options: Options = _USUAL, ranks: int = 2
) -> Script:
    return Script(f"by hand: {fault}", "by hand", ranks, kind, modules, passes, options, fault=fault)


def _dtensor(fault: str, kind: str, modules: tuple[str, ...], passes: Passes, options: Options = _USUAL) -> Script:
    return Script(f"dtensor: {fault}", "dtensor", 2, kind, modules, passes, options, fault=fault)


def _hugging(fault: str, kind: str, modules: tuple[str, ...], passes: Passes, options: Options = _USUAL) -> Script:
    return Script(f"transformers: {fault}", "transformers", 2, kind, modules, passes, options, fault=fault)


SCRIPTS = (
    _hand("output not summed", "never summed", ("layers.1.attention.output", "layers.1.attention"), "forward"),
    _hand(
        "input gradient not summed", "never summed", ("layers.0.mlp.up", "layers.0.mlp", "layers.0.norm2"), "backward"
    ),
    _hand(
        "gradients of the last norm not summed",
        "never summed",
        ("norm", "norm.weight", "norm.bias"),
        "backward",
        _SEQUENCE,
    ),
    _hand(
        "gradient not summed over replicas",
        "never summed",
        ("layers.1.mlp.down.weight", "layers.1.mlp.down"),
        "backward",
        _DP,
    ),
    _hand("output summed twice", "scaled", ("layers.0.mlp.down", "layers.0.mlp"), "forward"),
    _hand(
        "sum with a sum as its backward",
        "scaled",
        ("layers.1.attention.output", "layers.1.attention.output.weight"),
        "backward",
    ),
    _hand("gradient averaged over replicas", "scaled", ("head.weight", "head"), "backward", _DP),
    _hand("embedding of the first rank", "one rank's copy", ("tokens",), "forward"),
    _hand(
        "gradients of the last norm of the first rank",
        "one rank's copy",
        ("norm", "norm.weight", "norm.bias"),
        "backward",
        _SEQUENCE,
    ),
    _hand("other initial values on the last rank", "drifted", ("positions", "positions.weight"), "forward"),
    _hand(
        "larger update on the last rank",
        "drifted",
        ("layers.1.norm1", "layers.1.norm1.weight", "layers.1.norm1.bias"),
        "update",
    ),
    _hand(
        "output summed over the replicas",
        "wrong group",
        ("layers.0.mlp.down", "layers.0.mlp"),
        "forward",
        Options(tp=2),
        ranks=4,
    ),
    _hand(
        "gradient summed over the wrong ranks",
        "wrong group",
        ("head.weight", "head"),
        "backward",
        Options(tp=2),
        ranks=4,
    ),
    _hand(
        "halves of a column layer exchanged",
        "misplaced",
        ("layers.1.mlp.up", "layers.1.mlp.up.weight", "layers.1.mlp.up.bias"),
        "forward",
    ),
    _hand("vocabulary offset by one", "misplaced", ("tokens",), "forward"),
    _hand(
        "parts of the sequence in another order",
        "misplaced",
        ("layers.0.mlp.down", "layers.0.mlp"),
        "forward",
        _SEQUENCE,
    ),
    _hand(
        "gathered input of the micro-batch before",
        "stale",
        ("layers.0.mlp.up.weight", "layers.0.mlp.up"),
        "backward",
        _SEQUENCE,
    ),
    _hand(
        "update of one weight lost on the last rank",
        "stale",
        ("layers.1.norm1.weight", "layers.1.norm1"),
        "update",
        _DP,
    ),
    _hand("replicated gradients counted on each rank", "norm", ("",), "update", _SGD),
    _hand("norm of the rank's own gradients", "norm", ("",), "update", _SGD),
    _hand(
        "gradient summed again with each micro-batch",
        "micro-batches",
        ("layers.0.mlp.up", "layers.0.mlp.up.weight", "layers.0.mlp.up.bias"),
        "backward",
        _DP,
    ),
    _hand(
        "parts of the sequence share a dropout mask",
        "random stream",
        ("layers.0.attention_dropout",),
        "forward",
        Options(sequence=True, dropout=0.2),
    ),
    _hand(
        "replicas share a dropout mask",
        "random stream",
        ("layers.0.attention_dropout",),
        "forward",
        Options(tp=1, dropout=0.2),
    ),
    _hand(
        "each rank its own dropout mask", "random stream", ("layers.0.mlp_dropout",), "forward", Options(dropout=0.2)
    ),
    _hand("positions restart on each rank", "positions", ("positions",), "forward", _SEQUENCE),
    _hand("mean over the rank's own labels", "labels", ("loss",), "forward", _DP),
    _hand("samples of two ranks overlap", "samples", ("", "tokens"), "forward", _DP),
    _dtensor("output left partial", "never summed", ("layers.0.down",), "forward"),
    _dtensor(
        "norm left out of the plan",
        "never summed",
        ("layers.1.mlp_norm.weight", "layers.1.mlp_norm"),
        "backward",
        _SEQUENCE,
    ),
    _dtensor(
        "gradient averaged over ranks",
        "scaled",
        ("layers.1.attention.value.weight", "layers.1.attention.value"),
        "backward",
    ),
    _dtensor("other initial values on the last rank", "drifted", ("positions", "positions.weight"), "forward"),
    _dtensor(
        "heads of a value in another order",
        "misplaced",
        ("layers.0.attention.value", "layers.0.attention.value.weight"),
        "forward",
    ),
    _dtensor("positions restart on each rank", "positions", ("positions",), "forward", _SEQUENCE),
    _dtensor("labels shifted twice", "labels", ("head", ""), "backward"),
    _dtensor("replicated gradients counted on each rank", "norm", ("",), "update", _SGD),
    _hugging(
        "output not summed", "never summed", ("model.layers.1.self_attn.o_proj", "model.layers.1.self_attn"), "forward"
    ),
    _hugging(
        "input gradient not summed",
        "never summed",
        ("model.layers.0.mlp.up_proj", "model.layers.0.mlp", "model.layers.0.post_attention_layernorm"),
        "backward",
    ),
    _hugging(
        "norm of query heads never summed",
        "never summed",
        ("model.layers.1.self_attn.q_norm.weight", "model.layers.1.self_attn.q_norm"),
        "backward",
        _QWEN,
    ),
    _hugging("output averaged", "scaled", ("model.layers.0.mlp.down_proj", "model.layers.0.mlp"), "forward"),
    _hugging(
        "input gradient summed twice",
        "scaled",
        ("model.layers.1.mlp", "model.layers.1.post_attention_layernorm"),
        "backward",
    ),
    _hugging("logits gathered in another order", "misplaced", ("lm_head",), "forward"),
    _hugging("other values on the last rank", "drifted", ("model.norm", "model.norm.weight"), "forward"),
    _hugging("output of the micro-batch before", "stale", ("model.layers.0.self_attn.v_proj",), "forward"),
    # The hooks of transformers 5.23 for these norms sum a gradient that already has the micro-batches before.
    _hugging(
        "gradient summed again with each micro-batch",
        "micro-batches",
        ("model.layers.1.self_attn.q_norm.weight", "model.layers.1.self_attn.q_norm"),
        "backward",
        _QWEN,
    ),
    _hugging("split gradients not counted", "norm", ("",), "update", _SGD),
)


def _sound(
    name: str, family: Family, options: Options = _USUAL, dtype: torch.dtype = torch.float32, ranks: int = 2
) -> Script:
    return Script(f"{family}: {name}", family, ranks, "", (), "forward", options, dtype)


SOUND = (
    _sound("tp 2", "by hand"),
    _sound("tp 2, bf16", "by hand", dtype=torch.bfloat16),
    _sound("tp 2, a bias of keys", "by hand", Options(key_bias=True)),
    _sound("tp 2, sequence parallel, dropout", "by hand", Options(sequence=True, dropout=0.2)),
    _sound("tp 2, sequence parallel, fp64", "by hand", _SEQUENCE, torch.float64),
    _sound("dp 2, dropout", "by hand", Options(tp=1, dropout=0.2)),
    _sound("dp 2, sgd", "by hand", Options(tp=1, optimizer="sgd")),
    _sound("tp 2, dp 2", "by hand", Options(tp=2), ranks=4),
    _sound("tp 2, dp 2, sequence parallel, bf16", "by hand", Options(tp=2, sequence=True), torch.bfloat16, 4),
    _sound("tp 2", "dtensor"),
    _sound("tp 2, sequence parallel", "dtensor", _SEQUENCE),
    _sound("tp 2, sequence parallel, fp64", "dtensor", _SEQUENCE, torch.float64),
    _sound("tp 2, bf16", "dtensor", dtype=torch.bfloat16),
    _sound("llama, tp 2", "transformers"),
    _sound("llama, tp 2, bf16", "transformers", dtype=torch.bfloat16),
    _sound("qwen 3, tp 2, fp64", "transformers", _QWEN, torch.float64),
)


@dataclass(frozen=True)
class OurFault:
    """A change of one expression in Shardwise, and the run in which it shows.

    The run on one rank is made with the changed source, too, and comes to what it would without the change. In runs of
    one rank, ``--nproc``, ``--tp``, ``--pp`` and the settings that need several ranks are left out.

    Attributes:
        name: name of the fault, which is unique.
        function, old, new: the change, as in ``harness.faults.Fault``.
        arguments: arguments of ``shardwise train``, without ``--data`` and ``--out``.
        kind: one of ``KINDS``.
        modules: names of modules and parameters of the one-rank model that are right answers, as for ``Script``.
        passes: where the first wrong tensor appears.
    """

    name: str
    function: str
    old: str
    new: str
    arguments: tuple[str, ...]
    kind: str
    modules: tuple[str, ...]
    passes: Passes


_SIZES = (
    *("--model.num-layers", "2", "--model.hidden-size", "64", "--model.num-heads", "4"),
    *("--model.sequence-length", "64", "--model.vocab-size", "301"),
    *("--training.steps", "2", "--training.global-batch-size", "4", "--optimizer.warmup-steps", "0"),
)
_TINY = (*_SIZES, "--training.dtype", "float32")
_TP = ("--nproc", "2", "--tp", "2", *_TINY)
_SEQUENCE_PARALLEL = (*_TP, "--sequence-parallel")
_REPLICAS = ("--nproc", "2", *_TINY)
_PP = ("--nproc", "2", "--pp", "2", *_TINY)
_GPT = ("--model.architecture", "gpt")
_TWO_MICRO_BATCHES = ("--training.micro-batch-size", "1")

OUR_FAULTS = (
    OurFault(
        "attention's output never summed",
        "attention:SelfAttention.__init__",
        "sizes=[n * head_dim for n in self._head_sizes],",
        "sizes=[n * head_dim for n in self._head_sizes], parallelism=type(RowLinear._usual_parallelism[0]).LOCAL,",
        _TP,
        "never summed",
        ("decoder.layers.0.self_attention.linear_proj", "decoder.layers.0.self_attention"),
        "forward",
    ),
    OurFault(
        "gradient of the attention's input never summed",
        "attention:SelfAttention.__init__",
        "intervals=layout.intervals,",
        "intervals=layout.intervals, parallelism=type(ColumnLinear._usual_parallelism[0]).LOCAL,",
        _TP,
        "never summed",
        (
            "decoder.layers.1.self_attention.linear_qkv",
            "decoder.layers.1.self_attention",
            "decoder.layers.1.input_layernorm",
        ),
        "backward",
    ),
    OurFault(
        "gradients of norms never summed under sequence parallelism",
        "finalize:finalize_gradients_",
        '_summed_over(model, "tp")',
        "[]",
        _SEQUENCE_PARALLEL,
        "never summed",
        ("decoder.final_layernorm.weight", "decoder.final_layernorm"),
        "backward",
    ),
    OurFault(
        "gradient of a tied weight never summed over the stages",
        "finalize:finalize_gradients_",
        "sum_tied_embedding_gradients_(model, embd_group=embd_group)",
        "pass",
        (*_PP, *_TWO_MICRO_BATCHES),
        "never summed",
        ("embedding.word_embeddings.weight", "embedding.word_embeddings", "output_layer"),
        "backward",
    ),
    OurFault(
        "gradients of copied key-value heads never summed",
        "finalize:finalize_gradients_",
        "copies.write_back_()",
        "pass",
        (*_TP, "--model.num-query-groups", "1"),
        "never summed",
        ("decoder.layers.1.self_attention.linear_qkv.weight", "decoder.layers.1.self_attention.linear_qkv"),
        "backward",
    ),
    OurFault(
        "end of a bucket sent before its gradient is there",
        "gradient_buffers:GradientBuffers._start_next",
        "reduce(bucket.data, group=self.group, may_overwrite=True)",
        "reduce(bucket.data[: bucket.starts[-1]], group=self.group, may_overwrite=True)",
        _REPLICAS,
        "never summed",
        ("embedding.word_embeddings.weight", "embedding.word_embeddings"),
        "backward",
    ),
    OurFault(
        "gradient of a row layer's output times tp",
        "linear:TensorParallelLinear.backward",
        "grad_output = grad_output.to(weight.dtype)",
        "grad_output = all_reduce(grad_output.to(weight.dtype), group=group) "
        "if parallelism is LinearParallelism.ROW else grad_output.to(weight.dtype)",
        _TP,
        "scaled",
        ("decoder.layers.1.mlp.linear_fc2", "decoder.layers.1.mlp.linear_fc2.weight", "decoder.layers.1.mlp"),
        "backward",
    ),
    OurFault(
        "outputs of row layers times tp",
        "row:RowLinear.forward",
        "self._apply_linear(input_, bias, sequence)",
        "(lambda output: output + (self.group.size() - 1) * output.detach())"
        "(self._apply_linear(input_, bias, sequence))",
        _TP,
        "scaled",
        ("decoder.layers.0.self_attention.linear_proj", "decoder.layers.0.self_attention"),
        "forward",
    ),
    OurFault(
        "embeddings of one rank",
        "embedding:VocabEmbedding.forward",
        "functools.partial(moves.reduce, group=self.group)",
        "lambda output: ((output := output + 0.0), "
        "torch.distributed.broadcast(output.detach(), group=self.group, group_src=0))[0]",
        _TP,
        "one rank's copy",
        ("embedding.word_embeddings", "embedding"),
        "forward",
    ),
    OurFault(
        "gradients of norms of one rank under sequence parallelism",
        "finalize:_sum_over_ranks_",
        "gradient.copy_(total)",
        "torch.distributed.broadcast(gradient, group=group, group_src=0)",
        _SEQUENCE_PARALLEL,
        "one rank's copy",
        ("decoder.final_layernorm.weight", "decoder.final_layernorm"),
        "backward",
    ),
    OurFault(
        "learning rates differ between replicas",
        "trainer:Trainer._update",
        "set_learning_rate_(self.optimizer, learning_rate)",
        "set_learning_rate_(self.optimizer, learning_rate * (1 + self.dp_group.rank() / 2))",
        _REPLICAS,
        "drifted",
        ("", "embedding.word_embeddings", "embedding.word_embeddings.weight"),
        "update",
    ),
    OurFault(
        "row layers summed over all ranks",
        "linear:_multiply",
        "output = all_reduce(output, group=group, may_overwrite=True)",
        "output = all_reduce(output, group=torch.distributed.group.WORLD, may_overwrite=True)",
        ("--nproc", "4", "--tp", "2", *_TINY),
        "wrong group",
        ("decoder.layers.0.self_attention.linear_proj", "decoder.layers.0.self_attention"),
        "forward",
    ),
    OurFault(
        "vocabulary of the embedding offset by one",
        "embedding:look_up_own",
        "local = ids - start",
        "local = ids - (start + 1 if start else 0)",
        _TP,
        "misplaced",
        ("embedding.word_embeddings", "embedding"),
        "forward",
    ),
    OurFault(
        "vocabulary of the loss offset by one",
        "vocabulary:columns_of",
        "start, stop = interval",
        "start, stop = interval[0] + (interval[0] > 0), interval[1]",
        _TP,
        "misplaced",
        ("", "output_layer"),
        "forward",
    ),
    OurFault(
        "parts of the sequence in another order",
        "token_embedding:TokenEmbedding.forward",
        "hidden = moves.scatter(hidden, dim=0, group=self.tp_group)",
        "hidden = moves.scatter(hidden.roll(s // 2, 0), dim=0, group=self.tp_group)",
        (*_SEQUENCE_PARALLEL, *_GPT),
        "misplaced",
        ("embedding", "embedding.dropout"),
        "forward",
    ),
    OurFault(
        "gathered input of the first micro-batch",
        "linear:TensorParallelLinear.backward",
        "input_ = gathered_input.wait()",
        "input_ = globals().setdefault('_kept', {}).setdefault(weight.data_ptr(), gathered_input.wait().clone())",
        (*_SEQUENCE_PARALLEL, "--tp-comm-overlap", *_TWO_MICRO_BATCHES),
        "stale",
        ("decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.1.mlp.linear_fc1"),
        "backward",
    ),
    OurFault(
        "parameters of ZeRO not gathered",
        "optimizer:ZeroOptimizer.step",
        "self.parameters.gather_()",
        "pass",
        (*_REPLICAS, "--zero", "1"),
        "stale",
        ("", "embedding.word_embeddings", "embedding.word_embeddings.weight"),
        "update",
    ),
    OurFault(
        "weights of other ranks not rounded from their fp32 copies",
        "optimizer:MasterWeights.step",
        "self.round_()",
        "self.round_() if torch.distributed.get_rank() == 0 else None",
        ("--nproc", "2", "--tp", "2", *_SIZES, "--training.dtype", "bfloat16"),
        "stale",
        ("", "embedding.word_embeddings", "embedding.word_embeddings.weight"),
        "update",
    ),
    OurFault(
        "replicated gradients counted on every rank",
        "grad_norm:_counted_here",
        "if layout.dim is None and rank > 0:",
        "if False:",
        (*_TP, *_GPT),
        "norm",
        ("",),
        "update",
    ),
    OurFault(
        "gradients of other ranks not counted",
        "grad_norm:own_squares",
        "groups = [group for group in (tp_group, sharing, pp_group) if group is not None]",
        "groups = [group for group in (sharing, pp_group) if group is not None]",
        _TP,
        "norm",
        ("",),
        "update",
    ),
    OurFault(
        "loss divided by the labels of a micro-batch",
        "trainer:Trainer.step",
        "means_of(self.objective, output, batch, num_labels)",
        "means_of(self.objective, output, batch, num_labels // (len(batches) if self.tp_group.size() > 1 else 1))",
        (*_TP, *_TWO_MICRO_BATCHES),
        "micro-batches",
        ("", "output_layer", "decoder.final_layernorm"),
        "backward",
    ),
    OurFault(
        "one slice of the dropout mask for all parts of the sequence",
        "dropout:global_keep_mask",
        "total, first = sum(sizes), sum(sizes[:rank])",
        "total, first = sum(sizes), 0",
        (*_SEQUENCE_PARALLEL, "--model.dropout", "0.1"),
        "random stream",
        ("embedding.dropout", "embedding"),
        "forward",
    ),
    OurFault(
        "positions restart on each part of the sequence",
        "token_embedding:TokenEmbedding.forward",
        "places.first(s, offset) if position_ids is None",
        "places.first(s // self.tp_group.size(), offset).repeat(self.tp_group.size(), 1) if position_ids is None",
        (*_SEQUENCE_PARALLEL, *_GPT),
        "positions",
        ("embedding.position_embeddings", "embedding", "embedding.dropout"),
        "forward",
    ),
    OurFault(
        "loss divided by the rank's own labels",
        "trainer:Trainer.train_step",
        "loader.num_labels(step)",
        "sum(int((batch.labels != -100).sum()) for batch in prepared[2])",
        _REPLICAS,
        "labels",
        ("", "output_layer", "decoder.final_layernorm"),
        "backward",
    ),
    OurFault(
        "samples of two ranks overlap",
        "loader:BatchSchedule.micro_batches",
        "first = dp_rank * of_rank",
        "first = dp_rank * (of_rank - 1)",
        _REPLICAS,
        "samples",
        ("", "embedding.word_embeddings", "embedding"),
        "forward",
    ),
)
