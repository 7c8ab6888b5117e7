"""The global norm of a model's gradient with the same bits at every layout.

Each parameter is cut into parts that each lie on one rank at every layout, and each part into rows of a fixed
number of elements. The squares of a row are summed in fp64, in a fixed order. The sums of all rows of all ranks are
added and rounded once. If gradients are divided between data-parallel ranks, rows that lie on several ranks are
assembled first.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from shardwise.core.communication.collectives import all_reduce
from shardwise.core.communication.trees import exact_parts, exact_total
from shardwise.core.sharding import Interval, ParamLayout, local_parts
from shardwise.core.topology import Groups
from shardwise.kernels import compiled
from shardwise.nn.replicated import replicas_of
from shardwise.training.gradients import Division, Share
from shardwise.training.optimizer.grad_norm import counted_once, num_experts

# Number of elements of a row, which one thread sums.
_ROW = 1 << 12


def exact_grad_norm(
    model: nn.Module,
    *,
    tp_group: ProcessGroup,
    pp_group: ProcessGroup | None = None,
    shares: Mapping[Parameter, Share] | None = None,
    groups: Groups | None = None,
) -> Tensor:
    """Return ``global_grad_norm`` with the same bits at every layout; ``tp_group`` sums over parts."""
    replicas, number = replicas_of(model), exact_parts(tp_group)
    assert number is not None
    counted = list(counted_once(model, tp_group, shares))
    dense = [each[1:] for each in counted if not replicas[each[0]].is_of_expert]
    of_experts = [each[1:] for each in counted if replicas[each[0]].is_of_expert]
    squares = exact_squares(dense, group=tp_group, pp_group=pp_group, number=number)
    if num := num_experts(model):
        # Each rank of ``experts`` holds some experts, which are whole.
        over = tp_group if groups is None or groups.experts is None else groups.experts
        squares += exact_squares(of_experts, group=over, pp_group=pp_group, number=num)
    return torch.tensor(squares, dtype=torch.float64, device=next(model.parameters()).device).sqrt()


def exact_squares(
    gradients: Iterable[tuple[Tensor, ParamLayout, Division | None]],
    *,
    group: ProcessGroup,
    pp_group: ProcessGroup | None,
    number: int,
) -> float:
    """Return the sum of squares of gradients whose layouts are over ``group``, each cut into ``number`` parts."""
    rank, groups = group.rank(), [group] if pp_group is None else [group, pp_group]
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
                (_offset_before(low, layout, rank, start, stop), _offset_before(high, layout, rank, start, stop))
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
            # Each element is nonzero on one rank at most.
            rows = all_reduce(torch.stack(cut_rows), group=sharing, may_overwrite=True)
            # A part's last row may be shorter; padding it with zeros could change the bits of its sum.
            counted = zip(rows, lengths, strict=True) if sharing.rank() == 0 else ()
            sums += [total for row, length in counted for total in sums_of_squares(row[:length])]
    return exact_total(sums, groups=groups, what="the squares of the gradients")


def _parts(layout: ParamLayout, rank: int, number: int) -> Iterator[Interval]:
    """Yield the intervals of a parameter that this rank counts, along the split dimension, if any."""
    if layout.dim is None:
        if rank == 0:
            yield 0, 0
        return
    for part in local_parts(layout, rank, number, what="a parameter"):
        yield from part


def _offset_before(place: int, layout: ParamLayout, rank: int, start: int, stop: int) -> int:
    """Return the number of elements of a part that come before this rank's element ``place`` in row-major order."""
    if layout.dim is None:
        return place
    shape = layout.local_shape(rank)
    inner = math.prod(shape[layout.dim + 1 :])
    outer, rest = divmod(place, shape[layout.dim] * inner)
    return outer * (stop - start) * inner + min(max(rest - start * inner, 0), (stop - start) * inner)


def _rows_of_a_share(part: Tensor, dim: int, held: Sequence[Interval], rank: int) -> tuple[Tensor, dict[int, Tensor]]:
    """Return this rank's whole rows of a part, flattened, and each row that lies on several ranks, by number.

    ``held`` is each rank's interval of elements. A row on several ranks is zero at other ranks' elements.
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
    """Return the sum of squares of each row of a part, in fp64; the last row may be shorter."""
    flat = part.contiguous().view(-1)
    sums = compiled.sums_of_squares(flat, _ROW)
    if sums is None:
        # Sum by halves: on a GPU, the order of a sum over a dimension depends on the number of rows.
        rows = F.pad(flat.double(), (0, -flat.numel() % _ROW)).view(-1, _ROW).square_()
        while rows.size(1) > 1:
            left, right = rows.chunk(2, dim=1)
            rows = left + right
        sums = rows[:, 0]
    numbers: list[float] = sums.tolist()
    return numbers
