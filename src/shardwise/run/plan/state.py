"""Bytes of weights, gradients and optimizer state on one rank."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from shardwise.run.plan.parameters import Parameter, Part
from shardwise.run.plan.workload import Mesh, Workload, shares_of
from shardwise.training.gradients.bucket import DEFAULT_BUCKET_SIZE, place

# A number of steps for each parameter, in fp32.
_STEP_BYTES = 4


@dataclass(frozen=True)
class StateBytes:
    """What one rank holds from step to step.

    Attributes:
        weights: parameters; with zero in buffers.
        gradients: whole, in their buffers if there are any.
        masters: fp32 copies of parameters in 16 bits.
        optimizer: what the optimizer keeps of each parameter.
    """

    weights: int
    gradients: int
    masters: int
    optimizer: int


def state_bytes(workload: Workload, mesh: Mesh, params: Sequence[Parameter]) -> StateBytes:
    """Of a rank with the parameters ``params``, all of which are trained."""
    e, wide = workload.element_bytes, workload.gradient_bytes
    # Of AdamW two moments and a number of steps for each parameter, of Muon's matrices one moment.
    matrices = [param for param in params if param.is_matrix and workload.optimizer == "muon"]
    steps = len(params) - len(matrices)
    if mesh.shards_fully:
        # Those of the first data-parallel rank, which has the most; weights of 16 bits are kept in fp32.
        elements = sum(rows_of_first_rank(param, mesh.dp) for param in params)
        kinds = 2 * elements - sum(rows_of_first_rank(param, mesh.dp) for param in matrices)
        return StateBytes(wide * elements, wide * elements, 0, wide * kinds + _STEP_BYTES * steps)
    if mesh.splits_state:
        return _shared_out(workload, mesh, params)
    elements = sum(param.numel for param in params)
    gradients = buffer_elements(params, mesh.dp) if has_buffers(workload, mesh) else elements
    kinds = 2 * elements - sum(param.numel for param in matrices)
    return StateBytes(
        weights=e * elements,
        gradients=wide * gradients,
        masters=4 * elements if workload.has_masters else 0,
        optimizer=wide * kinds + _STEP_BYTES * steps,
    )


def _shared_out(workload: Workload, mesh: Mesh, params: Sequence[Parameter]) -> StateBytes:
    """With zero, of the data-parallel rank that has the most."""
    wide, shares = workload.gradient_bytes, shares_of(workload, mesh, params)
    is_muon = workload.optimizer == "muon"
    masters = [4 * owned if workload.has_masters else 0 for owned in shares.owned]
    kinds = [
        wide * (2 * owned - (matrices if is_muon else 0))
        for owned, matrices in zip(shares.owned, shares.matrices, strict=True)
    ]
    most = max(range(mesh.dp), key=lambda rank: masters[rank] + kinds[rank])
    steps = sum(not (is_muon and param.is_matrix) for param in params)
    return StateBytes(
        weights=workload.element_bytes * (shares.scattered + shares.whole),
        gradients=wide * (shares.scattered + shares.whole),
        masters=masters[most],
        optimizer=kinds[most] + _STEP_BYTES * steps,
    )


def has_buffers(workload: Workload, mesh: Mesh) -> bool:
    """Whether gradients lie in buffers: where they are reduced, or summed in another dtype than the parameters'."""
    return (mesh.dp > 1 or workload.has_masters) and not mesh.shards_fully


def buffer_elements(params: Sequence[Parameter], dp: int) -> int:
    """Of the buffers of gradients, with what aligns parameters and lets the ranks divide each bucket."""
    return _buffer_elements(tuple(param.numel for param in reversed(params)), dp)


@lru_cache(maxsize=1024)
def _buffer_elements(sizes: tuple[int, ...], dp: int) -> int:
    return place(sizes, bucket_size=DEFAULT_BUCKET_SIZE, world_size=dp).bounds[-1] if sizes else 0


def rows_of_first_rank(param: Parameter, dp: int) -> int:
    """Elements that the first rank, which has the most, holds of a parameter whose rows are dealt out."""
    rows, *rest = param.shape
    return -(-rows // dp) * math.prod(rest)


def units_of(
    workload: Workload, part: Part, params: Sequence[Parameter]
) -> tuple[list[Parameter], list[list[Parameter]]]:
    """What fsdp gathers together: the rest of a part, which stays whole, and its layers and an embedding of its own."""
    tied = workload.model.share_embeddings_and_output_weights
    rest: list[Parameter] = []
    units: dict[str, list[Parameter]] = {}
    for param in params:
        words = param.name.split(".")
        if words[1] == "layers":
            units.setdefault(words[2], []).append(param)
        elif words[0] == "embedding" and not tied:
            units.setdefault("embedding", []).append(param)
        else:
            rest.append(param)
    return rest, list(units.values())


def gathered_bytes(workload: Workload, mesh: Mesh, parts: Sequence[Part], params: Sequence[Sequence[Parameter]]) -> int:
    """With fsdp, what is whole at one time: the rest of each part, the largest unit, and gradients that accumulate."""
    whole = largest = 0
    for part, own in zip(parts, params, strict=True):
        rest, units = units_of(workload, part, own)
        whole += sum(param.numel for param in rest)
        largest = max([largest, *(sum(param.numel for param in unit) for unit in units)])
    accumulated = 0
    if mesh.num_micro_batches(workload) > 1:
        accumulated = workload.gradient_bytes * sum(param.numel for own in params for param in own)
    return workload.element_bytes * (whole + largest) + accumulated
