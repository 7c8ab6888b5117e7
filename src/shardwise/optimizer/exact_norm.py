"""The sum of squares of all gradients, with the same bits at every layout.

Each parameter is cut into the parts of its layout, each of which lies on one rank at every layout. A part's squares are
summed in fp64, in one order; the sums of all parts, of all ranks, are added up and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.communication.exact_totals import exact_total
from shardwise.communication.trees import exact_parts
from shardwise.sharding import ParamLayout, local_parts

# A row of so many elements is summed by one thread.
_ROW = 1 << 12


def exact_norm(
    gradients: Iterable[tuple[Tensor, ParamLayout]], *, tp_group: ProcessGroup, pp_group: ProcessGroup | None
) -> float:
    """The 2-norm of a model's gradient.

    Args:
        gradients: this rank's, complete, each with its parameter's layout; none twice over the stages.
        tp_group: the ranks that split each layer, which sum over parts.
        pp_group: the stages; None if there is one.
    """
    number, rank = exact_parts(tp_group), tp_group.rank()
    assert number is not None
    sums = [
        total
        for gradient, layout in gradients
        for part in _parts(gradient, layout, rank, number)
        for total in _sums_of_squares(part)
    ]
    groups = [tp_group] if pp_group is None else [tp_group, pp_group]
    total = exact_total(sums, groups=groups, what="the squares of the gradients")
    return float(torch.tensor(total, dtype=torch.float64).sqrt())


def _parts(gradient: Tensor, layout: ParamLayout, rank: int, number: int) -> Iterator[Tensor]:
    if layout.dim is None:
        if rank == 0:
            yield gradient
        return
    for part in local_parts(layout, rank, number, what="a parameter"):
        yield from (gradient.narrow(layout.dim, start, stop - start) for start, stop in part)


def _sums_of_squares(part: Tensor) -> list[float]:
    flat = part.contiguous().view(-1).double()
    rows = F.pad(flat, (0, -flat.numel() % _ROW)).view(-1, _ROW)
    sums: list[float] = rows.square_().sum(dim=1).tolist()
    return sums
