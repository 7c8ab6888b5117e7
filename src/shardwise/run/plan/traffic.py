"""What one rank sends in a step: the collectives of ``docs/accounting.md``, of all layers and micro-batches.

A collective's bytes are what a rank contributes to it. What it sends is more or less, by the ring that moves it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwise.run.plan.kept import Share
from shardwise.run.plan.parameters import Parameter, Part
from shardwise.run.plan.state import buffer_elements, rows_of_first_rank, units_of
from shardwise.run.plan.workload import Mesh, Workload, is_tied, shares_of


@dataclass
class Traffic:
    """Of one rank and step.

    Attributes:
        calls: number of calls by axis (``"tp"``, ``"pp"``, ``"dp"``), collective, and bytes contributed to each.
    """

    calls: Counter[tuple[str, str, int]] = field(default_factory=Counter)

    def add(self, axis: str, name: str, num_bytes: int, times: int = 1) -> None:
        """Count ``times`` calls."""
        if num_bytes and times:
            self.calls[axis, name, num_bytes] += times

    def contributed(self, axis: str | None = None) -> int:
        """Bytes that the rank contributes, on one axis or on all."""
        return sum(bytes_ * times for (of, _, bytes_), times in self.calls.items() if axis in (None, of))

    def sent(self, mesh: Mesh, axis: str | None = None) -> int:
        """Bytes that the rank sends if collectives go round in a ring."""
        sizes = {"tp": mesh.tp, "dp": mesh.dp, "pp": mesh.pp}
        total = 0
        for (of, name, num_bytes), times in self.calls.items():
            if axis in (None, of):
                total += times * _sent_in_ring(name, num_bytes, 2 if name == "all_reduce" and of == "pp" else sizes[of])
        return total


def _sent_in_ring(name: str, num_bytes: int, ranks: int) -> int:
    """Of ``num_bytes`` that a rank contributes."""
    if name == "send":
        return num_bytes
    if name == "all_gather":
        return (ranks - 1) * num_bytes
    once = (ranks - 1) * num_bytes // ranks
    return 2 * once if name == "all_reduce" else once


def traffic_of(
    workload: Workload, mesh: Mesh, parts: Sequence[Part], x: Share, params: Sequence[Sequence[Parameter]]
) -> Traffic:
    """What a rank sends in a step that holds ``parts`` with the parameters ``params``."""
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
    """Of Muon's matrices, about, that a rank has once data-parallel ranks have dealt them out, if they do."""
    deals = mesh.dp if mesh.splits_state or mesh.shards_fully else 1
    return workload.element_bytes * sum(param.numel for param in params if param.is_matrix) // deals


def _tensor_parallel(traffic: Traffic, workload: Workload, mesh: Mesh, part: Part, x: Share, times: int) -> None:
    """Of one stage, or one of its chunks."""
    model, hidden, own = workload.model, x.e * x.s * x.b * x.h, x.e * x.own * x.h
    gathers = reductions = 0
    # Of each layer two in the forward, two in the backward, and what recomputing it repeats.
    number = len(part.layers)
    reductions += 4 * number + repeated_reductions(workload, mesh, number)
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


def repeated_reductions(workload: Workload, mesh: Mesh, number: int) -> int:
    """Reductions that the recomputation of ``number`` layers repeats in a backward: all of a span but its last one."""
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
    parts: Sequence[Part],
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
