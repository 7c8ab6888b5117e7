"""Two Triton kernels for ``decode_attention.attend_to_cache``.

One token has few queries, but its cache has many keys. Several programs therefore share the keys of each group, and a
second kernel combines their results. The number of programs depends only on the shapes. The number of keys of each
program depends on the position, which the device reads.

This module requires Triton; ``dispatch`` imports it only if Triton is available.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Triton's convention: compile-time constants have names in capitals.
# ruff: noqa: N803

# By the element size in bytes; keys of 4 bytes take twice the registers.
_BLOCK_KEYS = {2: 32, 4: 16}
# Two programs for each multiprocessor of the largest GPUs, and the maximum for one group.
_PROGRAMS, _MAX_SPLITS = 264, 64


@triton.jit
def decode_kernel(
    query,
    keys,
    values,
    position,
    slopes,
    sums,
    maxima,
    totals,
    key_b,
    key_g,
    key_s,
    value_b,
    value_g,
    value_s,
    num_groups,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    BEFORE: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    PER_GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Attend from the queries of one group to some of its keys. A cap of 0 means no cap."""
    group, split, num_splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    own = tl.load(position).to(tl.int32)
    first = 0
    if BEFORE >= 0:
        first = tl.maximum(own - BEFORE, 0)
    share = tl.cdiv(tl.cdiv(own + 1 - first, num_splits), BLOCK_KEYS) * BLOCK_KEYS
    start = first + split * share
    stop = tl.minimum(start + share, own + 1)
    number = tl.arange(0, BLOCK_QUERIES)
    column = tl.arange(0, BLOCK_WIDTH)[None, :]
    row = group * PER_GROUP + number
    there = (number < PER_GROUP)[:, None] & (column < WIDTH)
    q = tl.load(query + row[:, None] * WIDTH + column, mask=there, other=0.0)
    keys += (group // num_groups).to(tl.int64) * key_b + (group % num_groups).to(tl.int64) * key_g
    values += (group // num_groups).to(tl.int64) * value_b + (group % num_groups).to(tl.int64) * value_g
    slope = tl.zeros((BLOCK_QUERIES,), tl.float32)
    if HAS_SLOPES:
        head = (group % num_groups) * PER_GROUP + number
        slope = tl.load(slopes + head, mask=number < PER_GROUP, other=0.0).to(tl.float32)
    maximum = tl.full((BLOCK_QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_QUERIES,), tl.float32)
    result = tl.zeros((BLOCK_QUERIES, BLOCK_WIDTH), tl.float32)
    for at in range(start, stop, BLOCK_KEYS):
        place = at + tl.arange(0, BLOCK_KEYS)
        inside = (place < stop)[:, None] & (column < WIDTH)
        k = tl.load(keys + place.to(tl.int64)[:, None] * key_s + column, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * SCALE
        if CAP > 0.0:
            scores = CAP * (2.0 / (1.0 + tl.exp(-2.0 * (scores / CAP))) - 1.0)
        if HAS_SLOPES:
            scores += slope[:, None] * (place - own)[None, :]
        scores = tl.where((place < stop)[None, :], scores, float("-inf"))
        # Each block has a key, so this is finite.
        larger = tl.maximum(maximum, tl.max(scores, 1))
        lower = tl.exp(maximum - larger)
        weights = tl.exp(scores - larger[:, None])
        v = tl.load(values + place.to(tl.int64)[:, None] * value_s + column, mask=inside, other=0.0)
        total = total * lower + tl.sum(weights, 1)
        result = result * lower[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        maximum = larger
    row = (tl.num_programs(0) * PER_GROUP) * split + row
    tl.store(maxima + row, maximum, mask=number < PER_GROUP)
    tl.store(totals + row, total, mask=number < PER_GROUP)
    tl.store(sums + row.to(tl.int64)[:, None] * WIDTH + column, result, mask=there)


@triton.jit
def combine_kernel(
    sums,
    maxima,
    totals,
    sinks,
    output,
    num_rows,
    num_heads,
    HAS_SINKS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Combine the results of all programs that had some of the keys of one query."""
    row = tl.program_id(0)
    rows = tl.arange(0, SPLITS) * num_rows + row
    column = tl.arange(0, BLOCK_WIDTH)[None, :]
    maximum = tl.load(maxima + rows)
    # The factor of a program without keys is 0, since the maximum of the others is finite.
    largest = tl.max(maximum, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + row % num_heads).to(tl.float32)
        largest = tl.maximum(largest, sink)
    factor = tl.exp(maximum - largest)
    part = tl.load(sums + rows[:, None].to(tl.int64) * WIDTH + column, mask=column < WIDTH, other=0.0)
    total = tl.sum(tl.load(totals + rows) * factor, 0)
    if HAS_SINKS:
        total += tl.exp(sink - largest)
    result = tl.sum(part * factor[:, None], 0) / total
    column = tl.arange(0, BLOCK_WIDTH)
    tl.store(output + row.to(tl.int64) * WIDTH + column, result.to(output.dtype.element_ty), mask=column < WIDTH)


def attend_to_cache(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    scale: float,
    before: int,
    softcap: float | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute ``decode_attention.attend_to_cache``."""
    b, num_groups, _, width = keys.shape
    num_rows = b * query.size(1)
    splits = num_splits(b * num_groups)
    sums = torch.empty(splits, num_rows, width, dtype=torch.float32, device=query.device)
    maxima, totals = (sums.new_empty(splits, num_rows) for _ in range(2))
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    block_width = max(16, triton.next_power_of_2(width))
    per_group = query.size(1) // num_groups
    with torch.cuda.device_of(query):
        decode_kernel[(b * num_groups, splits)](
            query.contiguous(),
            keys,
            values,
            position,
            # The kernel ignores this if there are no slopes.
            position if slopes is None else slopes.contiguous(),
            sums,
            maxima,
            totals,
            *keys.stride()[:3],
            *values.stride()[:3],
            num_groups,
            SCALE=float(scale),
            CAP=float(softcap or 0.0),
            BEFORE=before,
            HAS_SLOPES=slopes is not None,
            PER_GROUP=per_group,
            WIDTH=width,
            BLOCK_QUERIES=max(16, triton.next_power_of_2(per_group)),
            BLOCK_WIDTH=block_width,
            BLOCK_KEYS=_BLOCK_KEYS[query.element_size()],
            num_warps=4,
        )
        combine_kernel[(num_rows,)](
            sums,
            maxima,
            totals,
            # The kernel ignores this if there are no sinks.
            maxima if sinks is None else sinks.contiguous(),
            output,
            num_rows,
            query.size(1),
            HAS_SINKS=sinks is not None,
            WIDTH=width,
            BLOCK_WIDTH=block_width,
            SPLITS=splits,
            num_warps=4,
        )
    return output


def num_splits(num_groups: int) -> int:
    """Return the number of programs that share the keys of each group, a power of two."""
    splits = 1
    while splits < _MAX_SPLITS and 2 * splits * num_groups <= _PROGRAMS:
        splits *= 2
    return splits
