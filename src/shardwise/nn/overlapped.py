"""Products of sequence-parallel linear layers during their gathers and sums (``core.communication.overlap``)."""

from collections.abc import Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication import overlap
from shardwise.core.communication.context import GlobalMemoryBuffer
from shardwise.core.communication.overlap import Pass, choose_way
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
    """``gathered @ weight.T + bias`` of the ranks' rows ``[s/t, ..., i]``, and ``gathered``; not recorded by autograd.

    Args:
        pass_: the layer's kind, and its forward or backward.
        shard: this rank's rows.
        weight, bias: ``[o, i]``, and ``[o]`` or None.
        group: the ranks that share the sequence.
        sizes: every rank's number of rows; all the same as this rank's if None.
        buffer: memory of the rows of all ranks, until the next gather into it; new memory if None.
        needs_whole: return these rows too.
    """
    way = choose_way(pass_, group=group, device=shard.device, even=sizes is None, has_bias=bias is not None)
    if way.name == "symmetric memory":

        def fused() -> tuple[Tensor, Tensor | None]:
            return overlap.gather_and_multiply_fused(shard, weight.t(), group=group, needs_whole=needs_whole)

        made = first_tried("fused_all_gather_matmul", fused, shard, group=group)
        if made is not None:
            return made
    return overlap.gather_and_multiply(
        shard,
        _product(weight, bias),
        weight.size(0),
        group=group,
        sizes=sizes,
        buffer=buffer,
        needs_whole=needs_whole,
    )


def matmul_scatter(pass_: Pass, rows: Tensor, weight: Tensor, *, group: ProcessGroup) -> Pending:
    """Start ``rows @ weight.T`` of ``[s, ..., i]`` and ``[o, i]``, summed over the ranks and scattered by rows.

    Rows are scattered by the balanced rule. Not recorded by autograd.
    """
    even = uneven_sizes(rows.size(0), group.size()) is None
    if choose_way(pass_, group=group, device=rows.device, even=even).name == "symmetric memory":

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
