"""Overlap a matrix product with the all-gather of its input rows or the reduce-scatter of its output rows.

Each row of a product depends on one input row. Gathered rows are therefore multiplied as they arrive: first this rank's
own part, then the part of the rank before it, and so on round the ring. Rows to reduce are multiplied in the order in
which they are sent: the part of the next rank first and this rank's own part last. Every transport sums in rank order,
and sums bf16 and fp16 in fp32 with one rounding. The results therefore equal those of the whole product. The exception
is NCCL, whose reduce-scatter sums in the order of its ring.

If CUDA devices can access each other's memory, PyTorch's fused operators (``torch.ops.symm_mem``) do the same with
copies that occupy no multiprocessor of the GPU. ``choose_overlap`` selects the implementation.
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
"""Multiplies rows ``[n, ..., i]`` to ``[n, ..., o]``. The optional second tensor is a contiguous output buffer."""

Pass = Literal["column forward", "column backward", "row forward", "row backward"]
"""Passes that layers overlap: the first and the last gather, the two between reduce."""

PASSES: tuple[Pass, ...] = get_args(Pass)


class OverlapMethod(NamedTuple):
    """The implementation of a product with a collective, and the reason why no faster one is available.

    Attributes:
        name: ``"whole"`` runs one after the other; ``"parts"`` overlaps them over the group's own transport;
            ``"symmetric memory"`` uses the fused operators.
        why: why the next faster implementation is unavailable.
    """

    name: Literal["whole", "parts", "symmetric memory"]
    why: str


def choose_overlap(
    pass_: Pass, *, group: ProcessGroup, device: torch.device, even: bool = True, has_bias: bool = False
) -> OverlapMethod:
    """Choose the implementation of an overlapped product. The first call for a device is collective.

    Args:
        pass_: the layer's pass.
        group: the ranks that share the layer.
        device: device of the rows.
        even: all ranks have the same number of rows.
        has_bias: True if the layer adds a bias to the product.
    """
    if group.size() == 1:
        return OverlapMethod("whole", "there is one rank")
    if (refusal := context_of(group).why_not_overlapped) is not None:
        return OverlapMethod("whole", refusal)
    if torch.compiler.is_compiling():
        return OverlapMethod("parts", "torch.compile traces what it can plan itself")
    if pass_ == "column backward":
        return OverlapMethod(
            "parts", "sums also travel next to the weight's gradient, for which the fused operator does not wait"
        )
    if device.type == "cuda":
        if not even:
            return OverlapMethod("parts", "the ranks do not divide the sequence")
        if has_bias:
            return OverlapMethod("parts", "the fused operator adds no bias")
        if context_of(group).validates:
            return OverlapMethod("parts", "the group compares calls between its ranks")
    refusal = why_not_symmetric(group, device)
    return OverlapMethod("symmetric memory", "always") if refusal is None else OverlapMethod("parts", refusal)


def overlap_methods(
    *, group: ProcessGroup, device: torch.device, even: bool, column_has_bias: bool
) -> list[tuple[Pass, OverlapMethod]]:
    """Return the implementation of each pass. Collective."""

    def way(pass_: Pass) -> OverlapMethod:
        has_bias = column_has_bias and pass_ == "column forward"
        return choose_overlap(pass_, group=group, device=device, even=even, has_bias=has_bias)

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
    """Gather all ranks' rows and multiply them; each rank's rows are multiplied as they arrive.

    Args:
        shard: this rank's rows ``[s/t, ..., i]``.
        multiply: the product.
        width: ``o``.
        group: the ranks that take part.
        sizes: every rank's number of rows. None means that all ranks have this rank's number.
        buffer: a reusable buffer for the rows of all ranks, which the next gather overwrites; None allocates memory.
        needs_whole: also return the rows of all ranks.

    Returns:
        ``[s, ..., o]``, and ``[s, ..., i]`` or None.

    Raises:
        ShardingError: ``sizes`` does not have one entry per rank, or contradicts this rank's size.
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
        accounting.record("all_gather", shard, group)

    def start(step: int) -> Pending:
        with contextlib.nullcontext() if output is None else accounting.uncounted():
            transport = choose_transport("shift", shard, group)
            return transport.shift(shard, group, step, sizes, parts[(rank - step) % t])

    # The transfer of each part is launched before the product of the previous part. A GPU with one queue starts them in
    # that order, so that the transfer overlaps with the product.
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
    """Multiply rows and start the reduce-scatter of the products over the ranks.

    When this function returns, all products are computed and the last ones are being sent. ``wait()`` sums the parts
    that this rank received.

    Args:
        rows: ``[s, ..., i]``, this rank's contribution to every row.
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
        accounting.record("reduce_scatter", sum(sizes) * others, group)

    def finish() -> Tensor:
        found = {rank: own} | {source: part.wait() for source, part in arriving}
        stacked = torch.stack([found[source] for source in range(t)]) if received is None else received
        return stacked.sum(0, dtype=own.dtype)

    return Pending(None, finish)


def gather_and_multiply_fused(
    shard: Tensor, matrix: Tensor, *, group: ProcessGroup, needs_whole: bool = True
) -> tuple[Tensor, Tensor | None]:
    """``gather_and_multiply`` by ``matrix [i, o]`` in symmetric memory; all ranks have the same number of rows."""
    shard = shard.detach().contiguous()
    with accounting.as_one("all_gather", shard, group):
        whole, (output,) = torch.ops.symm_mem.fused_all_gather_matmul(
            shard, [matrix.detach()], 0, group.group_name, return_A=needs_whole
        )
    return output, whole


def multiply_and_scatter_fused(rows: Tensor, matrix: Tensor, *, group: ProcessGroup) -> Tensor:
    """``multiply_and_scatter`` by ``matrix [i, o]`` in symmetric memory; all ranks get the same number of rows."""
    accounting.record("reduce_scatter", rows.shape[:-1].numel() * matrix.size(1) * rows.element_size(), group)
    with accounting.uncounted():
        output: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(
            rows.detach().contiguous(), matrix.detach(), "sum", 0, group.group_name
        )
    return output
