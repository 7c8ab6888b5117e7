"""Bytes of weights, gradients and optimizer state on one rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from shardwise.accounting.parameters import Parameter
from shardwise.accounting.workload import Layout, Workload
from shardwise.data_parallel.bucket_bounds import place
from shardwise.data_parallel.gradient_buffers import DEFAULT_BUCKET_SIZE

# A number of steps for each parameter, in fp32.
_STEP_BYTES = 4


@dataclass(frozen=True)
class StateBytes:
    """What one rank holds from step to step.

    Attributes:
        weights: parameters.
        gradients: whole, in their buffers if there are any.
        masters: fp32 copies of parameters in 16 bits.
        optimizer: what the optimizer keeps of each parameter.
    """

    weights: int
    gradients: int
    masters: int
    optimizer: int


def state_bytes(workload: Workload, layout: Layout, params: Sequence[Parameter]) -> StateBytes:
    """Of a rank with the parameters ``params``, all of which are trained."""
    e, wide = workload.element_bytes, workload.gradient_bytes
    if layout.fsdp:
        params = [_rows_of_first_rank(param, layout.dp) for param in params]
    elements = sum(param.numel for param in params)
    held = elements
    buffered = has_buffers(workload, layout)
    gradients = buffer_elements(params, layout.dp) if buffered else elements
    kinds = 2 * elements
    steps = len(params)
    if workload.optimizer == "muon":
        matrices = [param for param in params if param.is_matrix]
        kinds -= sum(param.numel for param in matrices)
        steps -= len(matrices)
    if layout.zero and layout.dp > 1:
        held = gradients // layout.dp
        kinds = kinds * held // elements
    return StateBytes(
        weights=e * elements,
        gradients=wide * gradients,
        masters=4 * held if workload.has_masters else 0,
        optimizer=wide * kinds + _STEP_BYTES * steps,
    )


def has_buffers(workload: Workload, layout: Layout) -> bool:
    """Whether gradients lie in buffers: where they are reduced, or summed in another dtype than the parameters'."""
    return (layout.dp > 1 or workload.has_masters) and not layout.fsdp


def buffer_elements(params: Sequence[Parameter], dp: int) -> int:
    """Of the buffers of gradients, with what aligns parameters and lets the ranks divide each bucket."""
    return _buffer_elements(tuple(param.numel for param in reversed(params)), dp)


@lru_cache(maxsize=1024)
def _buffer_elements(sizes: tuple[int, ...], dp: int) -> int:
    return place(sizes, bucket_size=DEFAULT_BUCKET_SIZE, world_size=dp).bounds[-1] if sizes else 0


def _rows_of_first_rank(param: Parameter, dp: int) -> Parameter:
    """What the first rank, which has the most, holds of a parameter whose rows are dealt out in equal chunks."""
    rows, *rest = param.shape
    return Parameter(param.name, (-(-rows // dp), *rest), param.is_matrix, param.is_partial, param.is_copy)


def largest_unsharded_bytes(workload: Workload, params: Sequence[Parameter]) -> int:
    """With fsdp: parameters of the largest group that is gathered at one time, a layer or the embedding."""
    groups: dict[str, int] = {}
    for param in params:
        words = param.name.split(".")
        group = ".".join(words[:3]) if words[1] == "layers" else words[0]
        groups[group] = groups.get(group, 0) + math.prod(param.shape)
    return workload.element_bytes * max(groups.values(), default=0)
