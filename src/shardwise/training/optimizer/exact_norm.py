"""The sum of squares of all gradients, with the same bits at every layout.

Each parameter is cut into the parts of its layout, each of which lies on one rank at every layout, and a part into rows
of a fixed number of elements. A row's squares are summed in fp64, in one order; the sums of all rows, of all ranks, are
added up and rounded once. Where data-parallel ranks share out the gradients, the rows in which one rank's elements end
are put together before.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication.collectives import all_reduce
from shardwise.core.communication.trees import exact_parts, exact_total
from shardwise.core.sharding import Interval, ParamLayout, local_parts
from shardwise.kernels import compiled
from shardwise.training.gradients import Division

# A row of so many elements is summed by one thread.
_ROW = 1 << 12


def exact_norm(
    gradients: Iterable[tuple[Tensor, ParamLayout, Division | None]],
    *,
    tp_group: ProcessGroup,
    pp_group: ProcessGroup | None,
) -> float:
    """The 2-norm of a model's gradient.

    Args:
        gradients: this rank's, each with its parameter's layout, and which data-parallel rank has which elements of it;
            None of all if each has them all. None twice over the stages.
        tp_group: the ranks that split each layer, which sum over parts.
        pp_group: the stages; None if there is one.
    """
    number, rank = exact_parts(tp_group), tp_group.rank()
    assert number is not None
    groups = [tp_group] if pp_group is None else [tp_group, pp_group]
    sums: list[float] = []
    cut_rows: list[Tensor] = []
    lengths: list[int] = []
    sharing: ProcessGroup | None = None
    for gradient, layout, division in gradients:
        for start, stop in _parts(layout, rank, number):
            part = gradient if layout.dim is None else gradient.narrow(layout.dim, start, stop - start)
            if division is None:
                sums += sums_of_squares(part)
                continue
            sharing = division.group
            held = [
                (_before(low, layout, rank, start, stop), _before(high, layout, rank, start, stop))
                for low, high in division.intervals
            ]
            whole, cut = _rows_of_a_share(part, layout.dim or 0, held, sharing.rank())
            sums += sums_of_squares(whole)
            for row, values in cut.items():
                cut_rows.append(values)
                lengths.append(min(_ROW, part.numel() - row * _ROW))
    if sharing is not None:
        groups = [sharing, *groups]
        if cut_rows:
            # Each element is some rank's, and 0 on the others.
            rows = all_reduce(torch.stack(cut_rows), group=sharing, may_overwrite=True)
            # A part's last row may be shorter, whose sum with zeros behind it may have other bits.
            counted = zip(rows, lengths, strict=True) if sharing.rank() == 0 else ()
            sums += [total for row, length in counted for total in sums_of_squares(row[:length])]
    total = exact_total(sums, groups=groups, what="the squares of the gradients")
    return float(torch.tensor(total, dtype=torch.float64).sqrt())


def _parts(layout: ParamLayout, rank: int, number: int) -> Iterator[Interval]:
    """What of a parameter this rank counts: along the dimension that is split, where there is one."""
    if layout.dim is None:
        if rank == 0:
            yield 0, 0
        return
    for part in local_parts(layout, rank, number, what="a parameter"):
        yield from part


def _before(place: int, layout: ParamLayout, rank: int, start: int, stop: int) -> int:
    """How many elements of the part lie before the one at ``place`` of this rank's, in row-major order."""
    if layout.dim is None:
        return place
    shape = layout.local_shape(rank)
    inner = math.prod(shape[layout.dim + 1 :])
    outer, rest = divmod(place, shape[layout.dim] * inner)
    return outer * (stop - start) * inner + min(max(rest - start * inner, 0), (stop - start) * inner)


def _rows_of_a_share(part: Tensor, dim: int, held: Sequence[Interval], rank: int) -> tuple[Tensor, dict[int, Tensor]]:
    """Of a part, of which the ranks have the elements ``held``, those of this rank.

    Returns:
        Its whole rows, in one dimension; and by its number each row that lies on several ranks, zero where it is
        others'.
    """
    low, high = held[rank]
    each = math.prod(part.shape[dim:])
    first = low // each if each else 0
    own = (
        part.reshape(-1, *part.shape[dim:])[first : first + -(-(high - first * each) // each)]
        if low < high
        else part[:0]
    )
    flat = own.reshape(-1)[low - first * each : high - first * each]
    cut = sorted({stop // _ROW for _, stop in held if stop % _ROW and stop < part.numel()})
    rows = {}
    for row in cut:
        rows[row] = part.new_zeros(_ROW)
        begin, end = max(low, row * _ROW), min(high, (row + 1) * _ROW)
        if begin < end:
            rows[row][begin - row * _ROW : end - row * _ROW] = flat[begin - low : end - low]
    whole_from = -(-low // _ROW) * _ROW
    whole_to = high if high == part.numel() else high // _ROW * _ROW
    return flat[whole_from - low : whole_to - low] if whole_from < whole_to else flat[:0], rows


def sums_of_squares(part: Tensor) -> list[float]:
    """The sum of squares of each row of a part, in fp64; the last row may be shorter."""
    flat = part.contiguous().view(-1)
    sums = compiled.sums_of_squares(flat, _ROW)
    if sums is None:
        # By halves, since in which order a sum over a dimension is taken depends on the number of rows on a GPU.
        rows = F.pad(flat.double(), (0, -flat.numel() % _ROW)).view(-1, _ROW).square_()
        while rows.size(1) > 1:
            left, right = rows.chunk(2, dim=1)
            rows = left + right
        sums = rows[:, 0]
    numbers: list[float] = sums.tolist()
    return numbers
