"""Products of rows that ranks gather, or whose results they sum: one part is multiplied while the next one travels.

A row of a product needs no other row. So gathered rows are multiplied as they arrive, this rank's own part first, then
that of the rank before it, and so on round the ring. Rows to sum are multiplied in the order in which they leave, the
part of the next rank first and this rank's own last. Sums are taken in rank order, those of bf16 and fp16 in fp32 and
rounded once, by every transport; so they equal those of the whole product, except NCCL's, whose reduce-scatter adds
along a ring of its choice.

Where CUDA devices reach each other's memory, PyTorch's fused operators do the same by copies that take no part of a GPU
from the product (``torch.ops.symm_mem``). ``choose_way`` chooses.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication import accounting
from shardwise.core.communication.collectives import checked_shards
from shardwise.core.communication.context import GlobalMemoryBuffer, context_of, gather_buffer
from shardwise.core.communication.symmetric_memory import why_not_symmetric
from shardwise.core.communication.transports import choose_transport
from shardwise.core.communication.transports.transport import Pending
from shardwise.core.sharding import checked_sizes

Product = Callable[[Tensor, Tensor | None], Tensor]
"""Multiplies rows ``[n, ..., i]`` to ``[n, ..., o]``; into the second tensor, which is contiguous, if there is one."""

Pass = Literal["column forward", "column backward", "row forward", "row backward"]
"""Passes that layers overlap: gathers in the first and the last, sums in the two between."""

PASSES: tuple[Pass, ...] = get_args(Pass)


class Way(NamedTuple):
    """How a product and its collective go together, and why not by a faster way.

    Attributes:
        name: ``"whole"``, one after the other; ``"parts"``, by the group's own transport; ``"symmetric memory"``.
        why: why not the next one.
    """

    name: Literal["whole", "parts", "symmetric memory"]
    why: str


def choose_way(
    pass_: Pass,
    *,
    group: ProcessGroup,
    device: torch.device,
    even: bool = True,
    has_bias: bool = False,
) -> Way:
    """The way of a product that is to be overlapped. The first call for a device is collective.

    Args:
        pass_: the layer's pass.
        group: the ranks that share the layer.
        device: device of the rows.
        even: every rank has as many rows.
        has_bias: a bias is to be added to the product.
    """
    if group.size() == 1:
        return Way("whole", "there is one rank")
    if context_of(group).exact_parts is not None:
        return Way("whole", "sums go over fixed parts by a tree, and so do the products that are summed")
    if torch.compiler.is_compiling():
        return Way("parts", "torch.compile traces what it can plan itself")
    if pass_ == "column backward":
        return Way(
            "parts", "sums also travel next to the weight's gradient, for which the fused operator does not wait"
        )
    if device.type == "cuda":
        if not even:
            return Way("parts", "the ranks do not divide the sequence")
        if has_bias:
            return Way("parts", "the fused operator adds no bias")
        if context_of(group).validates:
            return Way("parts", "the group compares calls between its ranks")
    refusal = why_not_symmetric(group, device)
    return Way("symmetric memory", "always") if refusal is None else Way("parts", refusal)


def ways_of_layers(
    *, group: ProcessGroup, device: torch.device, even: bool, column_has_bias: bool
) -> list[tuple[Pass, Way]]:
    """The way of each pass; every rank of the group calls."""

    def way(pass_: Pass) -> Way:
        has_bias = column_has_bias and pass_ == "column forward"
        return choose_way(pass_, group=group, device=device, even=even, has_bias=has_bias)

    return [(pass_, way(pass_)) for pass_ in PASSES]


def gather_and_multiply(
    shard: Tensor,
    multiply: Product,
    width: int,
    *,
    group: ProcessGroup,
    sizes: Sequence[int] | None = None,
    buffer: GlobalMemoryBuffer | None = None,
    needs_whole: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The product of all ranks' rows, each rank's multiplied as it arrives.

    Args:
        shard: this rank's rows ``[s/t, ..., i]``.
        multiply: the product.
        width: ``o``.
        group: the ranks that take part.
        sizes: every rank's number of rows; all the same as this rank's if None.
        buffer: memory for the rows of all ranks, until the next gather into it; new memory if None.
        needs_whole: return the rows of all ranks too.

    Returns:
        ``[s, ..., o]``, and ``[s, ..., i]`` or None.

    Raises:
        ShardingError: ``sizes`` does not have one entry per rank, or not this rank's size.
    """
    t, rank = group.size(), group.rank()
    sizes = (shard.size(0),) * t if sizes is None else checked_shards(shard, group, 0, sizes)
    shard = shard.detach().contiguous()
    parts: list[Any] = [None] * t
    products: list[Any] = [None] * t
    whole = output = None
    # The compiler plans memory.
    if not torch.compiler.is_compiling():
        whole = gather_buffer(buffer, shard, 0, sizes)
        if whole is None:
            whole = shard.new_empty((sum(sizes), *shard.shape[1:]))
        output = shard.new_empty((sum(sizes), *shard.shape[1:-1], width))
        parts, products = list(whole.split(list(sizes))), list(output.split(list(sizes)))
    if output is not None:
        accounting.record("all_gather", shard)

    def start(step: int) -> Pending:
        with contextlib.nullcontext() if output is None else accounting.uncounted():
            transport = choose_transport("shift", shard, group)
            return transport.shift(shard, group, step, sizes, parts[(rank - step) % t])

    # Each part is launched before the product of the one before it: a GPU with one queue starts them in that order, and
    # computes while one part travels.
    place, arriving = parts[rank], None
    for step in range(t):
        following = start(step + 1) if step + 1 < t else None
        source = (rank - step) % t
        parts[source] = shard if arriving is None else arriving.wait()
        products[source] = multiply(parts[source], products[source])
        arriving = following
    if output is None:
        return torch.cat(products), torch.cat(parts) if needs_whole else None
    if not needs_whole:
        return output, None
    place.copy_(shard)
    return output, whole


def multiply_and_scatter(
    rows: Tensor, multiply: Product, *, group: ProcessGroup, sizes: Sequence[int] | None = None
) -> Pending:
    """Start the sum of the ranks' products; each rank gets its rows of it.

    When this returns all products are made, and the last are on their way; ``wait()`` adds the parts that arrived.

    Args:
        rows: ``[s, ..., i]``, this rank's terms of every row.
        multiply: the product.
        group: the ranks that take part.
        sizes: every rank's number of rows; balanced if None.

    Returns:
        ``[s/t, ..., o]``.

    Raises:
        ShardingError: ``sizes`` does not sum to the rows.
    """
    t, rank = group.size(), group.rank()
    sizes = checked_sizes(sizes, rows.size(0), t, f"dimension 0 of shape {list(rows.shape)}")
    parts = rows.split(list(sizes))
    own_rows = sizes[rank]
    received: Tensor | None = None
    arriving: list[tuple[int, Pending]] = []
    for step in range(1, t):
        product = multiply(parts[(rank + step) % t], None)
        if received is None and not torch.compiler.is_compiling():
            received = product.new_empty((t, own_rows, *product.shape[1:]))
        source = (rank - step) % t
        place = None if received is None else received[source]
        counts = [sizes[(sender + step) % t] for sender in range(t)]
        with contextlib.nullcontext() if received is None else accounting.uncounted():
            transport = choose_transport("shift", product, group)
            arriving.append((source, transport.shift(product, group, step, counts, place)))
    own = multiply(parts[rank], None if received is None else received[rank])
    if received is not None:
        others = math.prod(own.shape[1:]) * own.element_size()
        accounting.record("reduce_scatter", sum(sizes) * others)

    def finish() -> Tensor:
        found = {rank: own} | {source: part.wait() for source, part in arriving}
        stacked = torch.stack([found[source] for source in range(t)]) if received is None else received
        return stacked.sum(0, dtype=own.dtype)

    return Pending(None, finish)


def gather_and_multiply_fused(
    shard: Tensor, matrix: Tensor, *, group: ProcessGroup, needs_whole: bool = True
) -> tuple[Tensor, Tensor | None]:
    """``gather_and_multiply`` by ``matrix [i, o]``, in symmetric memory; every rank has as many rows."""
    shard = shard.detach().contiguous()
    with accounting.as_one("all_gather", shard):
        whole, (output,) = torch.ops.symm_mem.fused_all_gather_matmul(
            shard, [matrix.detach()], 0, group.group_name, return_A=needs_whole
        )
    return output, whole


def multiply_and_scatter_fused(rows: Tensor, matrix: Tensor, *, group: ProcessGroup) -> Tensor:
    """``multiply_and_scatter`` by ``matrix [i, o]``, in symmetric memory; every rank gets as many rows."""
    accounting.record("reduce_scatter", rows.shape[:-1].numel() * matrix.size(1) * rows.element_size())
    with accounting.uncounted():
        output: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(
            rows.detach().contiguous(), matrix.detach(), "sum", 0, group.group_name
        )
    return output
