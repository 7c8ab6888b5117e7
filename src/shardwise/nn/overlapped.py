"""Products of sequence-parallel linear layers, overlapped with their communication (``core.communication.overlap``)."""

from collections.abc import Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication import overlap
from shardwise.core.communication.context import GlobalMemoryBuffer
from shardwise.core.communication.overlap import Pass, choose_overlap
from shardwise.core.communication.symmetric_memory import first_tried
from shardwise.core.communication.transports.transport import Pending
from shardwise.core.sharding import uneven_sizes
from shardwise.kernels import products


def gather_matmul(
    pass_: Pass,
    shard: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: ProcessGroup,
    sizes: Sequence[int] | None,
    buffer: GlobalMemoryBuffer | None = None,
    needs_whole: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Gather the rows ``[s/t, ..., i]`` of all ranks and compute ``gathered @ weight.T + bias``, without autograd.

    Args:
        pass_: kind of the layer, and whether this is its forward or backward.
        shard: this rank's rows.
        weight, bias: ``[o, i]``, and ``[o]`` or None.
        group: the ranks that share the sequence.
        sizes: every rank's number of rows. None means that all ranks have this rank's number.
        buffer: memory for the gathered rows, until the next gather into it; new memory if None.
        needs_whole: whether to return the gathered rows, too.
    """
    way = choose_overlap(pass_, group=group, device=shard.device, even=sizes is None, has_bias=bias is not None)
    if way.name == "symmetric memory":

        def fused() -> tuple[Tensor, Tensor | None]:
            return overlap.gather_and_multiply_fused(shard, weight.t(), group=group, needs_whole=needs_whole)

        made = first_tried("fused_all_gather_matmul", fused, shard, group=group)
        if made is not None:
            return made
    return overlap.gather_and_multiply(
        shard, _product(weight, bias), weight.size(0), group=group, sizes=sizes, buffer=buffer, needs_whole=needs_whole
    )


def matmul_scatter(pass_: Pass, rows: Tensor, weight: Tensor, *, group: ProcessGroup) -> Pending:
    """Start ``rows @ weight.T`` for ``[s, ..., i]`` and ``[o, i]``, and reduce-scatter it by rows, without autograd.

    Rows are scattered by the balanced rule.
    """
    even = uneven_sizes(rows.size(0), group.size()) is None
    if choose_overlap(pass_, group=group, device=rows.device, even=even).name == "symmetric memory":

        def fused() -> Tensor:
            return overlap.multiply_and_scatter_fused(rows, weight.t(), group=group)

        output = first_tried("fused_matmul_reduce_scatter", fused, rows, group=group)
        if output is not None:
            return Pending(None, lambda: output)
    return overlap.multiply_and_scatter(rows, _product(weight, None), group=group)


def _product(weight: Tensor, bias: Tensor | None) -> overlap.Product:
    def multiply(rows: Tensor, out: Tensor | None) -> Tensor:
        if out is None:
            return products.linear(rows, weight, bias)
        return products.linear_into_(out, rows, weight, bias)

    return multiply
