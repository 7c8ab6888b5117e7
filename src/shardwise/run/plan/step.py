"""Bytes that a step keeps and sends on one rank: the tables of ``docs/accounting.md``.

Activations are those that the forward keeps for the backward, of one micro-batch.

A tensor that two parts keep is one storage, counted with the part that needs it first. Sums of parts are therefore what
a layer keeps, and sums of layers what a model does.

Traffic is that of all layers and micro-batches. A collective's bytes are what a rank contributes to it. What the rank
sends is more or less, by the ring that moves it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from shardwise.core.sharding import balanced_sizes
from shardwise.models.description import ModelDescription
from shardwise.models.recomputation import Recomputation
from shardwise.models.transformer.heads import split_heads
from shardwise.run.plan.parameters import (
    Parameter,
    StageChunk,
    buffer_elements,
    is_tied,
    rows_of_first_rank,
    shares_of,
    units_of,
)
from shardwise.run.plan.workload import Mesh, Workload


@dataclass(frozen=True)
class LocalSizes:
    """One tensor-parallel rank's share of a micro-batch.

    Attributes:
        s, b: tokens of a sample, samples.
        own: tokens of all samples between tensor-parallel regions: ``s·b``, or this rank's shard of it.
        h, d: hidden size, width of a head.
        a, g: query and key-value heads of this rank.
        is_even: each of its key-value heads has as many of its query heads.
        f, v: width of the MLP and vocabulary, this rank's part.
        t: tensor-parallel ranks.
        e: bytes of an element.
    """

    s: int
    b: int
    own: int
    h: int
    d: int
    a: int
    g: int
    is_even: bool
    f: int
    v: int
    t: int
    e: int

    @classmethod
    def of(
        cls, model: ModelDescription, *, s: int, b: int, e: int, tp: int, rank: int, splits_sequence: bool
    ) -> LocalSizes:
        """The share of ``rank``."""
        heads = split_heads(model.num_attention_heads, model.num_query_groups, tp)
        queries = heads.queries_of_groups(rank)
        return cls(
            s=s,
            b=b,
            own=b * (balanced_sizes(s, tp)[rank] if splits_sequence else s),
            h=model.hidden_size,
            d=model.kv_channels,
            a=sum(queries),
            g=len(queries),
            is_even=len(set(queries)) == 1,
            f=balanced_sizes(model.ffn_hidden_size, tp)[rank],
            v=balanced_sizes(model.vocab_size, tp)[rank],
            t=tp,
            e=e,
        )

    @property
    def wide(self) -> int:
        """Bytes of a number that is computed in fp32, or in fp64 for fp64."""
        return max(4, self.e)


def norm(x: LocalSizes, normalization: str) -> int:
    """A norm between tensor-parallel regions."""
    return _norm_of(x, normalization, x.own, x.h)


def _norm_of(x: LocalSizes, normalization: str, rows: int, width: int) -> int:
    if normalization == "LayerNorm":
        return x.e * rows * width + 2 * x.e * rows
    if x.e == 2:
        return 8 * rows * width + 4 * rows
    return x.e * rows * width + x.e * rows


def column_linear(x: LocalSizes) -> int:
    """A column-parallel linear layer on hidden states."""
    return x.e * x.own * x.h


def row_linear(x: LocalSizes, features: int) -> int:
    """A row-parallel linear layer whose input has ``features`` on this rank."""
    return x.e * x.s * x.b * features


def activation(x: LocalSizes, *, gated: bool, keeps_activated_gate: bool = True) -> int:
    """The MLP's activation, its output left out."""
    if not gated:
        return x.e * x.s * x.b * x.f
    return (3 if keeps_activated_gate else 2) * x.e * x.s * x.b * x.f


def attention_core(
    x: LocalSizes,
    *,
    is_rotary: bool = False,
    norms: str | None = None,
    norms_over_heads: bool = False,
    mask: Literal["window", "alibi"] | None = None,
    dropout: bool = False,
    dropout_is_global: bool = False,
    is_recomputed: bool = False,
) -> int:
    """Attention between its projections, its output included; ``shared_by_layers`` counts what all layers share.

    Args:
        x: the rank's share.
        is_rotary: queries and keys are rotated.
        norms, norms_over_heads: the kind of norm on queries and keys, if any; it is one over all heads of a token.
        mask: forbidden tokens, or additions to scores, other than the causal ones.
        dropout, dropout_is_global: on the attention weights; its masks are those of one rank.
        is_recomputed: all but its inputs and its output.
    """
    tokens = x.s * x.b
    queries, keys, weights = tokens * x.a * x.d, tokens * x.g * x.d, x.a * x.s * x.s * x.b
    elements = {"projected": queries + 2 * keys, "q": queries, "k": keys, "v": keys}
    # Queries that do not lie evenly spaced in the projection's output are copied.
    if x.is_even:
        q, k, v = ("projected" if x.g in (1, x.a) else "q"), "projected", "projected"
    else:
        q, k, v = "q", "k", "v"
    kept, extra = set(), 0
    if norms is not None and norms_over_heads:
        # Single operations: the square, the normalised heads, and in 16 bits all of them wide, with the weight.
        kept |= set() if x.e < x.wide else {q, k}
        copies = 1 if x.e == x.wide else 3
        weight = (x.a + x.g) * x.d if x.e < x.wide else 0
        extra += x.wide * (copies * (queries + keys) + 2 * tokens + weight)
    elif norms is not None:
        if norms == "RMSNorm" and x.e == 2:
            extra += 8 * (queries + keys)
        else:
            kept |= {q, k}
        extra += _norm_of(x, norms, tokens * (x.a + x.g), 0)
    if norms is not None or is_rotary:
        q, k = "new q", "new k"
        elements |= {"new q": queries, "new k": keys}
    if is_recomputed:
        kept |= {q, k, v}
        return x.e * (sum(elements[name] for name in kept) + queries) + extra
    # PyTorch's own attention has no form of either on a CPU that does without the matrix of weights.
    is_math = (dropout or mask == "alibi") and not (dropout and dropout_is_global)
    if x.g < x.a and (not x.is_even or dropout or is_math):
        # Keys and values once more for each of their queries.
        k, v = "repeated k", "repeated v"
        elements |= {"repeated k": queries, "repeated v": queries}
    if is_math:
        # Queries and keys are scaled, all in fp32: softmax, and with dropout its mask and their product.
        q, k = "scaled q", "scaled k"
        wide = queries * x.wide // x.e
        elements |= {"scaled q": wide, "scaled k": wide, "wide v": wide}
        v = "wide v" if x.e < x.wide else v
        extra += (3 if dropout else 1) * x.wide * weights
    elif dropout:
        # Softmax, dropout's mask, what it leaves, and what is forbidden.
        per_head = x.a if mask == "alibi" else 1
        extra += (x.wide + 1 + x.e) * weights + per_head * (x.s * x.s + (x.s if mask is not None else 0))
        q = "q" if x.g == 1 < x.a and q == "projected" else q
    else:
        extra += x.wide * tokens * x.a
    kept |= {q, k, v}
    return x.e * (sum(elements[name] for name in kept) + queries) + extra


def residual_dropout(x: LocalSizes, *, is_global: bool = False) -> int:
    """Dropout on a residual branch: its mask, in the tensor's dtype or of a byte."""
    return (1 if is_global else x.e) * x.own * x.h


def embedding(x: LocalSizes) -> int:
    """The embedding of the vocabulary: ids, and which of them are not this rank's."""
    return 8 * x.s * x.b + x.s * x.b * (x.t > 1)


def loss(x: LocalSizes) -> int:
    """The loss of logits, which it turns into their gradient."""
    return x.e * x.s * x.b * x.v + (9 + 3 * x.wide) * x.s * x.b


def fused_loss(x: LocalSizes, memory_budget: int) -> int:
    """Output layer and loss in one, its input included: hidden states of all tokens, their gradient, and the logits."""
    tokens = x.s * x.b
    logits = x.e * tokens * x.v
    hidden = 2 * x.e * tokens * x.h
    if logits <= memory_budget:
        return hidden + logits + x.wide * tokens
    return hidden + 8 * tokens + 3 * x.wide * tokens


def shared_by_layers(x: LocalSizes, workload: Workload) -> int:
    """Tensors that all layers of a micro-batch read: rotary cosines and sines, and the mask of a window."""
    model = workload.model
    tables = (model.position_embedding_type == "rope") + (model.window_rotary_base is not None)
    shared = tables * x.e * x.s * x.d
    if any(_mask(model, x.s, index) == "window" for index in range(model.num_layers)) and not (
        model.attention_dropout > 0 and workload.dropout_is_global
    ):
        shared += x.e * x.s * x.s
    return shared


def _mask(model: ModelDescription, s: int, index: int) -> Literal["window", "alibi"] | None:
    if model.position_embedding_type == "alibi":
        return "alibi"
    windows = model.windowed_layers is None or model.windowed_layers[index]
    before = model.window_size[0] if model.window_size is not None and windows else -1
    return "window" if 0 <= before < s - 1 else None


def mlp(x: LocalSizes, workload: Workload, recomputation: Recomputation) -> int:
    """The MLP of a layer."""
    if recomputation.recomputes("mlp"):
        return column_linear(x)
    gated = workload.model.gated_linear_unit
    inner = (2 if gated else 1) * x.e * x.s * x.b * x.f
    if recomputation.recomputes("mlp_act"):
        return column_linear(x) + inner
    least = workload.fuses_swiglu_from
    fuses = workload.model.activation == "silu" and least is not None and 2 * x.s * x.b * x.f >= least
    return column_linear(x) + activation(x, gated=gated, keeps_activated_gate=not fuses) + row_linear(x, x.f)


def layer(x: LocalSizes, workload: Workload, recomputation: Recomputation, index: int = 0) -> int:
    """The layer ``index`` of the model, counted from 0, without its recomputed parts."""
    model = workload.model
    rotates = model.rotary_layers is None or model.rotary_layers[index]
    core = attention_core(
        x,
        is_rotary=model.position_embedding_type == "rope" and rotates,
        norms=model.normalization if model.qk_layernorm else None,
        norms_over_heads=model.qk_layernorm_over_heads,
        mask=_mask(model, x.s, index),
        dropout=model.attention_dropout > 0,
        dropout_is_global=workload.dropout_is_global,
        # Scores with a soft cap are computed again in any case.
        is_recomputed=recomputation.recomputes("core_attn") or model.attention_logit_softcap is not None,
    )
    kept = core + column_linear(x) + mlp(x, workload, recomputation)
    # A norm that is recomputed keeps its input instead of its output, which the linear layers would keep.
    is_before, is_after = model.norm_position in ("pre", "sandwich"), model.norm_position != "pre"
    before = 2 * is_before * (not recomputation.recomputes("layernorm"))
    kept += (before + 2 * is_after) * norm(x, model.normalization)
    if model.parallel_residual and before and not (model.normalization == "RMSNorm" and x.e == 2):
        # Both norms have one input.
        kept -= column_linear(x)
    if model.hidden_dropout > 0:
        kept += 2 * residual_dropout(x, is_global=workload.dropout_is_global)
    return kept


def layers(x: LocalSizes, workload: Workload, recomputation: Recomputation, indices: range) -> int:
    """The layers of a stage or chunk."""
    number = len(indices)
    if recomputation.granularity != "full":
        return sum(layer(x, workload, recomputation, index) for index in indices)
    if recomputation.method == "uniform":
        return -(-number // recomputation.num_layers) * column_linear(x)
    recomputed = min(number, recomputation.num_layers)
    left = sum(layer(x, workload, recomputation, index) for index in indices[recomputed:])
    return recomputed * column_linear(x) + left


def part(x: LocalSizes, workload: Workload, recomputation: Recomputation, part: StageChunk) -> int:
    """All of a pipeline stage, or of one of its chunks."""
    model = workload.model
    kept = layers(x, workload, recomputation, part.layers)
    kept += shared_by_layers(x, workload)
    if part.is_first:
        kept += embedding(x)
        if model.position_embedding_type == "learned_absolute" and (
            model.embedding_layernorm or model.hidden_dropout == 0
        ):
            # Positions were added to the whole sequence, and the shard is a view of it.
            kept += x.e * (x.s * x.b - x.own) * x.h
        if model.embedding_layernorm:
            kept += norm(x, model.normalization)
        if model.hidden_dropout > 0:
            kept += residual_dropout(x, is_global=workload.dropout_is_global)
    if part.is_last:
        if model.final_layernorm:
            kept += norm(x, model.normalization)
        kept += fused_loss(x, workload.loss_memory_budget) if workload.fuses_loss else column_linear(x) + loss(x)
    return kept


def recomputed_at_a_time(x: LocalSizes, workload: Workload, recomputation: Recomputation, number: int) -> int:
    """Bytes while a backward recomputes: the span of layers, or the parts, that it recomputes as one."""
    gathered = x.e * x.s * x.b * x.h if x.own < x.s * x.b else 0
    if recomputation.granularity == "none":
        return gathered
    whole = layer(x, workload, Recomputation())
    if recomputation.granularity == "selective":
        return whole - layer(x, workload, recomputation) + gathered
    span = min(number, recomputation.num_layers) if recomputation.method == "uniform" else 1
    return span * whole + gathered


@dataclass
class Traffic:
    """The collectives of one rank in a step.

    Attributes:
        calls: number of calls by axis (``"tp"``, ``"pp"``, ``"dp"``), collective, and bytes contributed to each.
    """

    calls: Counter[tuple[str, str, int]] = field(default_factory=Counter)

    def add(self, axis: str, name: str, num_bytes: int, times: int = 1) -> None:
        if num_bytes and times:
            self.calls[axis, name, num_bytes] += times

    def sent(self, mesh: Mesh, axis: str | None = None) -> int:
        """Bytes that the rank sends if collectives go round in a ring."""
        sizes = {"tp": mesh.tp, "dp": mesh.dp, "pp": mesh.pp}
        total = 0
        for (of, name, num_bytes), times in self.calls.items():
            if axis in (None, of):
                total += times * _sent_in_ring(name, num_bytes, 2 if name == "all_reduce" and of == "pp" else sizes[of])
        return total


def _sent_in_ring(name: str, num_bytes: int, ranks: int) -> int:
    if name == "send":
        return num_bytes
    if name == "all_gather":
        return (ranks - 1) * num_bytes
    once = (ranks - 1) * num_bytes // ranks
    return 2 * once if name == "all_reduce" else once


def traffic_of(
    workload: Workload, mesh: Mesh, parts: Sequence[StageChunk], x: LocalSizes, params: Sequence[Sequence[Parameter]]
) -> Traffic:
    """The traffic in a step of a rank with the parts ``parts`` and the parameters ``params``."""
    traffic = Traffic()
    all_params = [param for own in params for param in own]
    times = mesh.num_micro_batches(workload)
    if mesh.tp > 1:
        for part in parts:
            _tensor_parallel(traffic, workload, mesh, part, x, times)
        summed = 0
        for param in all_params:
            if param.is_of_heads or (param.is_partial and mesh.splits_sequence):
                summed += rows_of_first_rank(param, mesh.dp) if mesh.shards_fully else param.numel
            summed += param.num_shared
        traffic.add("tp", "all_reduce", workload.gradient_bytes * summed)
        if workload.optimizer == "muon":
            # Shards to the ranks that have whole matrices, and about as much back.
            traffic.add("tp", "all_to_all", _bytes_of_matrices(workload, mesh, all_params), 2)
    if mesh.pp > 1:
        hidden = x.e * x.own * x.h
        for part in parts:
            traffic.add("pp", "send", hidden, times * ((not part.is_last) + (not part.is_first)))
        for param in all_params:
            if is_tied(workload, param):
                traffic.add("pp", "all_reduce", workload.gradient_bytes * param.numel)
    if mesh.dp > 1:
        _data_parallel(traffic, workload, mesh, parts, params, times)
    return traffic


def _bytes_of_matrices(workload: Workload, mesh: Mesh, params: Sequence[Parameter]) -> int:
    """About the bytes of Muon's matrices on a rank, once data-parallel ranks have shared them out."""
    deals = mesh.dp if mesh.splits_state or mesh.shards_fully else 1
    return workload.element_bytes * sum(param.numel for param in params if param.is_matrix) // deals


def _tensor_parallel(
    traffic: Traffic, workload: Workload, mesh: Mesh, part: StageChunk, x: LocalSizes, times: int
) -> None:
    model, hidden, own = workload.model, x.e * x.s * x.b * x.h, x.e * x.own * x.h
    gathers = reductions = 0
    # Of each layer two in the forward, two in the backward, and what recomputing it repeats.
    number = len(part.layers)
    reductions += 4 * number + _repeated_reductions(workload, mesh, number)
    gathers += 6 * number
    if model.qk_layernorm_over_heads:
        # The squares of queries and keys, of all heads of a token.
        again = number if mesh.recomputation.granularity == "full" else 0
        traffic.add("tp", "all_reduce", 2 * x.wide * x.s * x.b, times * (2 * number + again))
    learned = model.position_embedding_type == "learned_absolute"
    if part.is_first:
        if mesh.splits_sequence and learned:
            # Positions are added to the whole sequence first.
            traffic.add("tp", "all_reduce", hidden, times)
        else:
            reductions += 1
        gathers += 1
    if part.is_last:
        reductions += 1
        gathers += 1 if workload.fuses_loss else 2
        traffic.add("tp", "all_gather", 3 * x.wide * x.s * x.b, times)
    if mesh.splits_sequence:
        traffic.add("tp", "all_gather", own, times * gathers)
        traffic.add("tp", "reduce_scatter", hidden, times * reductions)
    else:
        traffic.add("tp", "all_reduce", hidden, times * reductions)


def _repeated_reductions(workload: Workload, mesh: Mesh, number: int) -> int:
    """Reductions that recomputing ``number`` layers repeats in a backward: all of a span but its last one."""
    recomputation = mesh.recomputation
    if recomputation.granularity != "full":
        return 0
    if recomputation.method == "block":
        spans, recomputed = min(number, recomputation.num_layers), min(number, recomputation.num_layers)
    else:
        spans, recomputed = -(-number // recomputation.num_layers), number
    # Dropout's mask is kept after the last one, so that it is repeated too.
    return 2 * recomputed - (0 if workload.model.hidden_dropout > 0 else spans)


def _data_parallel(
    traffic: Traffic,
    workload: Workload,
    mesh: Mesh,
    parts: Sequence[StageChunk],
    params: Sequence[Sequence[Parameter]],
    times: int,
) -> None:
    e, wide = workload.element_bytes, workload.gradient_bytes
    all_params = [param for own in params for param in own]
    if workload.optimizer == "muon" and (mesh.splits_state or mesh.shards_fully):
        # Elements to the ranks that have whole matrices, and as much back, not rounded to 16 bits.
        matrices = _bytes_of_matrices(workload, mesh, all_params)
        traffic.add("dp", "all_to_all", matrices)
        traffic.add("dp", "all_to_all", matrices // e * wide)
    if mesh.shards_fully:
        for part, own in zip(parts, params, strict=True):
            rest, units = units_of(workload, part, own)
            for unit, gathers in ((rest, 1), *((unit, 2) for unit in units)):
                elements = sum(rows_of_first_rank(param, mesh.dp) for param in unit)
                traffic.add("dp", "all_gather", e * elements, gathers * times)
                traffic.add("dp", "reduce_scatter", wide * elements * mesh.dp)
        return
    if not mesh.splits_state:
        traffic.add("dp", "all_reduce", wide * buffer_elements(all_params, mesh.dp))
        return
    shares = shares_of(workload, mesh, all_params)
    traffic.add("dp", "reduce_scatter", wide * shares.scattered)
    traffic.add("dp", "all_reduce", wide * shares.whole)
    for elements in (shares.scattered, shares.whole):
        traffic.add("dp", "all_gather", e * elements // mesh.dp)
