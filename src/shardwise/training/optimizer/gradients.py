"""The gradients between backward and step: sums over ranks, the global norm, and the same norm with exact bits.

For exact bits each parameter is cut into the parts of its layout, which lie on one rank each at every layout, and a
part into rows of a fixed number of elements. A row's squares are summed in fp64, in one order; the sums of all rows, of
all ranks, are added up and rounded once. Where data-parallel ranks share out the gradients, the rows in which one
rank's elements end are put together before.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from shardwise.core.communication.collectives import all_reduce
from shardwise.core.communication.context import device_of_host_facts
from shardwise.core.communication.trees import exact_parts, exact_total
from shardwise.core.errors import ConfigError
from shardwise.core.sharding import Interval, ParamLayout, ParamShard, has_copies, holders, local_parts, segments
from shardwise.core.sharding.balanced import first_row, group_of_rows, local_rows
from shardwise.kernels import compiled
from shardwise.nn.replicated import named_param_layouts, replicas_of
from shardwise.training.gradients import Division, Share
from shardwise.training.gradients.gradients import all_reduced

_BUCKET_ELEMENTS = 1 << 24
# The norm of that many elements is one fp32 sum, off by 2e-7 at most on a CPU. A sum of numbers of two bytes is not
# vectorised there, which rounds more often.
_NORM_ELEMENTS, _NORM_ELEMENTS_OF_TWO_BYTES = 1 << 16, 1 << 13


def finalize_gradients_(
    model: nn.Module, *, tp_group: ProcessGroup, dp_group: ProcessGroup | None, embd_group: ProcessGroup | None = None
) -> None:
    """Complete every gradient, in place: it becomes that of the loss summed over all ranks' samples.

    Summed over ``tp_group`` are the gradients of parameters that each rank applied to its own part of the sequence or
    to its own heads (``Replicas.summed_over``), and of copies of a key-value head; copies are then the same, bit for
    bit. All gradients are summed over ``dp_group``. Divide the loss by the whole batch's number of tokens for a mean.

    Here and in the other functions, the gradient of a parameter with a ``main_grad``
    (``config.gradient_accumulation_fusion``) is that: its ``grad``, if any, is added to it first and set to None.

    Args:
        model: its gradients are overwritten; a parameter without one must have none on every rank.
        tp_group: the ranks that split each layer.
        dp_group: the ranks that see different samples; None if gradients are summed over them already
            (``training.gradients.GradientBuffers``).
        embd_group: the stages that hold a tied weight, as in ``sum_tied_embedding_gradients_``; None if this rank is in
            no such group.
    """
    params = list(model.parameters())
    if tp_group.size() > 1:
        partial = _summed_over(model, "tp")
        copies = _Copies(model, tp_group)
        if (sharing := group_of_rows(params[0])) is not None:
            # Of one row, ranks of the tensor-parallel group may have the gradient on different ranks of the other.
            _sum_over_ranks_(copies.buffers, group=sharing)
        _sum_over_ranks_([*_gradients(partial), *copies.buffers], group=tp_group)
        copies.write_back_()
    if dp_group is not None:
        _sum_over_ranks_(_gradients(params), group=dp_group)
    if embd_group is not None:
        sum_tied_embedding_gradients_(model, embd_group=embd_group)


def sum_tied_embedding_gradients_(model: nn.Module, *, embd_group: ProcessGroup) -> None:
    """Give the copies of a tied weight on the first and the last stage the sum of their gradients, in place.

    The gradients are then the same, bit for bit, so that copies that started equal stay equal. Nothing happens where
    weights are not tied, or on one stage.

    Args:
        model: this rank's stage; the copy is its parameter whose gradient is summed over ``"embd"``.
        embd_group: the ranks that hold a copy.

    Raises:
        ConfigError: on every stage that holds a copy, if only some of them have a gradient.
    """
    tied = _summed_over(model, "embd")
    if not tied or embd_group.size() == 1:
        return
    gradients = _gradients(tied)
    # Who has none would leave the others waiting, and its copy would go another way than theirs.
    has_one = torch.tensor(float(bool(gradients)), device=device_of_host_facts(embd_group, tied[0].device))
    holders = int(all_reduce(has_one, group=embd_group))
    if holders not in (0, embd_group.size()):
        raise ConfigError(
            f"the tied embedding and output weight has a gradient on {holders} of the {embd_group.size()} pipeline "
            f"stages that hold it ({'with' if gradients else 'without'} one here); freeze its copies on all of them, "
            "or on none"
        )
    _sum_over_ranks_(gradients, group=embd_group)


def _summed_over(model: nn.Module, axis: str) -> list[Parameter]:
    return [param for param, replicas in replicas_of(model).items() if axis in replicas.summed_over]


def summed_over_other_groups(
    model: nn.Module, *, tp_group: ProcessGroup, embd_group: ProcessGroup | None = None
) -> list[Parameter]:
    """The parameters whose gradients ``finalize_gradients_`` sums over other ranks than the data-parallel ones.

    Every rank needs their gradients whole before that sum (``GradientBuffers(whole=...)``): data-parallel groups may
    cut the owners' intervals at different places.
    """
    groups = {"tp": tp_group, "embd": embd_group}
    several = {axis for axis, group in groups.items() if group is not None and group.size() > 1}
    replicas = replicas_of(model)
    return [
        param
        for _, param, layout in named_param_layouts(model, tp_group.size())
        if several.intersection(replicas[param].summed_over) or ("tp" in several and has_copies(layout))
    ]


def global_grad_norm(
    model: nn.Module,
    *,
    tp_group: ProcessGroup,
    pp_group: ProcessGroup | None = None,
    shares: Mapping[Parameter, Share] | None = None,
) -> Tensor:
    """The 2-norm of the whole model's gradient, as if it were on one rank.

    Split gradients count on their ranks, replicated ones and copies of key-value heads once, and that of a tied weight
    on the first stage (the last stage's ``is_copy``).

    Args:
        model: with complete gradients.
        tp_group: the ranks that split each layer.
        pp_group: the stages that share out the layers; None if there is one.
        shares: by parameter, the elements of its gradient that are complete on each data-parallel rank; None if every
            rank has all.

    Returns:
        An fp64 scalar, the same on every rank.
    """
    counted = [
        part
        for param, gradient, layout, share in _counted_once(model, tp_group, shares)
        for part in _counted_here(gradient, layout, tp_group.rank(), first_row(param), share)
    ]
    first = next(model.parameters())
    total = all_reduce(_sum_of_squares(counted, first.device), group=tp_group)
    sharing = next((share.group for share in shares.values()), None) if shares else group_of_rows(first)
    if sharing is not None:
        total = all_reduce(total, group=sharing)
    return (total if pp_group is None else all_reduce(total, group=pp_group)).sqrt()


def exact_grad_norm(
    model: nn.Module,
    *,
    tp_group: ProcessGroup,
    pp_group: ProcessGroup | None = None,
    shares: Mapping[Parameter, Share] | None = None,
) -> Tensor:
    """``global_grad_norm`` with the same bits at every layout; ``tp_group`` sums over parts."""
    counted = (each[1:] for each in _counted_once(model, tp_group, shares))
    norm = exact_norm(counted, tp_group=tp_group, pp_group=pp_group)
    return torch.tensor(norm, dtype=torch.float64, device=next(model.parameters()).device)


def _counted_once(
    model: nn.Module, tp_group: ProcessGroup, shares: Mapping[Parameter, Share] | None
) -> Iterator[tuple[Parameter, Tensor, ParamLayout, Share | None]]:
    """The parameters with a gradient that no earlier stage counts."""
    replicas = replicas_of(model)
    for _, param, layout in named_param_layouts(model, tp_group.size()):
        if (gradient := gradient_of(param)) is not None and not replicas[param].is_copy:
            yield param, gradient, layout, None if shares is None else shares[param]


def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    *,
    tp_group: ProcessGroup,
    pp_group: ProcessGroup | None = None,
    loss_scale: float = 1.0,
    shares: Mapping[Parameter, Share] | None = None,
    norm_of: Callable[..., Tensor] = global_grad_norm,
) -> Tensor:
    """Scale all gradients down, in place, if their global norm is over ``max_norm``.

    Args:
        model: with complete gradients.
        max_norm: largest norm; 0 or infinity only measures.
        tp_group: the ranks that split each layer.
        pp_group: the stages that share out the layers; None if there is one.
        loss_scale: factor of the loss, and so of the gradients, which are always divided by it.
        shares: as in ``global_grad_norm``; this rank's elements are scaled.
        norm_of: ``global_grad_norm``, or ``exact_grad_norm``.

    Returns:
        The norm before clipping, divided by ``loss_scale``; an fp64 scalar, the same on every rank. The host has not
        waited for it on a GPU.
    """
    norm = norm_of(model, tp_group=tp_group, pp_group=pp_group, shares=shares) / loss_scale
    clips = max_norm > 0 and not math.isinf(max_norm)
    own = _gradients(model.parameters()) if shares is None else [share.gradient for share in shares.values()]
    if clips and not norm.is_cpu:
        # A norm that is NaN leaves the gradients unchanged; the caller reads the norm.
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).nan_to_num(nan=1.0) / loss_scale
        _multiply_on_device_(own, factor)
        return norm
    on_host = min(1.0, float(max_norm / (norm + 1e-6))) if clips else 1.0
    if on_host / loss_scale != 1.0:
        torch._foreach_mul_(own, on_host / loss_scale)
    return norm


def _multiply_on_device_(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply by a scalar without waiting for the device."""
    for dtype in {gradient.dtype for gradient in gradients}:
        same = [gradient for gradient in gradients if gradient.dtype == dtype]
        if dtype.itemsize >= 4:
            torch._foreach_mul_(same, factor.to(dtype))
            continue
        # In 16 bits the factor itself would be rounded, to two digits in bf16.
        for gradient in same:
            gradient.copy_(gradient.float().mul_(factor.float()))


def _sum_of_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """An fp64 scalar: squares are summed in fp32 (fp64 for fp64) within a block, and blocks in fp64."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        elements = _NORM_ELEMENTS if tensor.dtype.itemsize >= 4 else _NORM_ELEMENTS_OF_TWO_BYTES
        # A GPU's kernel sums a tensor in blocks anyway.
        blocks = tensor.reshape(-1).split(elements) if tensor.is_cpu else (tensor,)
        by_dtype.setdefault(tensor.dtype, []).extend(blocks)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for dtype, same in by_dtype.items():
        # In its own dtype a block's norm may overflow (fp16), or keep two digits (bf16).
        norms = torch._foreach_norm(same, 2.0, torch.float32 if dtype.itemsize < 4 else None)
        total += torch.stack(norms).double().square().sum()
    return total


def _counted_here(
    gradient: Tensor, layout: ParamLayout, rank: int, first: int, share: Share | None = None
) -> list[Tensor]:
    """The parts of ``gradient``, which begins at row ``first``, or of its share, that no earlier rank holds."""
    if layout.dim is None and rank > 0:
        return []
    if layout.dim is None or not has_copies(layout):
        return [gradient if share is None else share.gradient]
    if share is not None:
        shard = ParamShard("", share.gradient, layout, rank, interval=share.interval)
        return [view for _, view in shard.written_pieces()]
    return [
        _part(gradient, layout.dim, local_start, length, first)[0]
        for start, length, local_start in segments(layout, rank)
        if holders(layout)[start, start + length][0] == rank
    ]


def _part(rows: Tensor, dim: int, start: int, length: int, first: int) -> tuple[Tensor, int]:
    """The part of a run of indices within ``rows``, which begin at row ``first``, and where in the run it begins."""
    if dim > 0:
        return rows.narrow(dim, start, length), 0
    low, high = max(start, first), min(start + length, first + rows.size(0))
    return rows.narrow(0, low - first, high - low) if low < high else rows[:0], max(low - start, 0)


class _Copies:
    """Gradients of the parts of split parameters that several ranks hold, side by side, to be summed over the ranks.

    Attributes:
        buffers: for each such parameter, all runs of indices that several ranks hold: this rank's gradient, and zeros
            in the runs that it does not hold.
    """

    def __init__(self, model: nn.Module, group: ProcessGroup) -> None:
        self.buffers: list[Tensor] = []
        self._views: list[tuple[Tensor, Tensor]] = []
        for _, param, layout in named_param_layouts(model, group.size()):
            gradient = gradient_of(param)
            if gradient is None or layout.dim is None or not has_copies(layout):
                continue
            shared = [run for run, ranks in holders(layout).items() if len(ranks) > 1]
            shape = list(gradient.shape)
            shape[layout.dim] = sum(stop - start for start, stop in shared)
            buffer = gradient.new_zeros(shape)
            here = {start: local_start for start, _, local_start in segments(layout, group.rank())}
            offset = 0
            for start, stop in shared:
                if start in here:
                    own, behind = _part(gradient, layout.dim, here[start], stop - start, first_row(param))
                    view = buffer.narrow(layout.dim, offset + behind, own.size(layout.dim))
                    self._views.append((view.copy_(own), own))
                offset += stop - start
            self.buffers.append(buffer)

    def write_back_(self) -> None:
        for view, gradient in self._views:
            gradient.copy_(view)


def gradient_of(param: Parameter) -> Tensor | None:
    """A parameter's complete gradient: ``main_grad``, to which ``grad`` is added first, or ``grad``."""
    main_grad: Tensor | None = getattr(param, "main_grad", None)
    if main_grad is None:
        return None if param.grad is None else local_rows(param.grad)
    # With gradients in buffers both may be the same.
    if param.grad is not None and param.grad is not main_grad:
        main_grad.add_(param.grad)
        param.grad = None
    return main_grad


def _gradients(params: Iterable[Parameter]) -> list[Tensor]:
    return [gradient for param in params if (gradient := gradient_of(param)) is not None]


def _sum_over_ranks_(gradients: Sequence[Tensor], *, group: ProcessGroup) -> None:
    if group.size() > 1:
        for gradient, total in all_reduced(gradients, group=group, most_elements=_BUCKET_ELEMENTS):
            gradient.copy_(total)


# A row of so many elements is summed by one thread.
_ROW = 1 << 12


def exact_norm(
    gradients: Iterable[tuple[Tensor, ParamLayout, Division | None]],
    *,
    tp_group: ProcessGroup,
    pp_group: ProcessGroup | None,
) -> float:
    """The 2-norm of a model's gradient.

    ``gradients`` are this rank's, each with its parameter's layout and its division over the data-parallel ranks (None
    if each rank has all), no parameter twice over the stages. The ranks of ``tp_group`` sum over parts.
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
    """The intervals of a parameter that this rank counts, along the split dimension if there is one."""
    if layout.dim is None:
        if rank == 0:
            yield 0, 0
        return
    for part in local_parts(layout, rank, number, what="a parameter"):
        yield from part


def _before(place: int, layout: ParamLayout, rank: int, start: int, stop: int) -> int:
    """The number of elements of a part before this rank's element at ``place``, in row-major order."""
    if layout.dim is None:
        return place
    shape = layout.local_shape(rank)
    inner = math.prod(shape[layout.dim + 1 :])
    outer, rest = divmod(place, shape[layout.dim] * inner)
    return outer * (stop - start) * inner + min(max(rest - start * inner, 0), (stop - start) * inner)


def _rows_of_a_share(part: Tensor, dim: int, held: Sequence[Interval], rank: int) -> tuple[Tensor, dict[int, Tensor]]:
    """This rank's whole rows of a part, in one dimension, and by number each row that lies on several ranks.

    ``held`` are the elements of each rank; a row on several ranks is zero at other ranks' elements.
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
