"""Gradients between backward and step: sums over ranks, the global norm, and the norm with exact bits.

For exact bits, each parameter is cut into parts, each of which lies on one rank at every layout, and each part into
rows of a fixed number of elements. The squares of a row are summed in fp64, in a fixed order. The sums of all rows of
all ranks are added and rounded once. If gradients are divided between data-parallel ranks, rows that lie on several
ranks are assembled first.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from shardwise.core.communication.collectives import all_reduce
from shardwise.core.communication.context import device_of_host_facts, is_rehearsal
from shardwise.core.communication.trees import exact_parts, exact_total
from shardwise.core.errors import ConfigError
from shardwise.core.sharding import Interval, ParamLayout, ParamShard, has_copies, holders, local_parts, segments
from shardwise.core.sharding.balanced import first_row, group_of_rows, is_sharded, local_rows
from shardwise.core.topology import Groups
from shardwise.kernels import compiled
from shardwise.kernels.planning import device_type_of
from shardwise.nn.replicated import named_param_layouts, replicas_of
from shardwise.training.gradients import Division, Share
from shardwise.training.gradients.base import all_reduced

_BUCKET_ELEMENTS = 1 << 24
# On a CPU, a norm over this many elements is one fp32 sum, with an error of at most 2e-7. A sum of two-byte numbers is
# not vectorised there, and rounds more often.
_NORM_ELEMENTS, _NORM_ELEMENTS_OF_TWO_BYTES = 1 << 16, 1 << 13


def finalize_gradients_(
    model: nn.Module,
    *,
    tp_group: ProcessGroup,
    dp_group: ProcessGroup | None,
    embd_group: ProcessGroup | None = None,
    expert_dp_group: ProcessGroup | None = None,
) -> None:
    """Sum gradients over the ranks in place: each becomes the gradient of the loss summed over all ranks' samples.

    ``tp_group`` sums the gradients of parameters that each rank applied to its own part of the sequence or to its own
    heads (``Replicas.summed_over``), and of copies of a key-value head; copies are then bitwise equal. ``dp_group``
    sums all gradients. For a mean, divide the loss by the number of tokens in the whole batch.

    In all functions here, the gradient of a parameter with a ``main_grad`` (``config.gradient_accumulation_fusion``) is
    ``main_grad``, after ``grad``, if any, was added to it and set to None.

    Args:
        model: the model, whose gradients are overwritten; a parameter without a gradient must have none on every rank.
        tp_group: the ranks that split each layer.
        dp_group: the ranks that see different samples; None if gradients are already summed over them
            (``training.gradients.GradientBuffers``).
        embd_group: the stages that hold a tied weight, as for ``sum_tied_embedding_gradients_``; None if this rank is
            in no such group.
        expert_dp_group: with ``dp_group``, the ranks that hold the same parts of the same experts, over which their
            gradients are summed.

    Raises:
        ConfigError: the model has experts, and ``expert_dp_group`` is missing.
    """
    params = list(model.parameters())
    if tp_group.size() > 1 and params:
        partial = _summed_over(model, "tp")
        copies = _Copies(model, tp_group)
        if (sharing := group_of_rows(params[0])) is not None:
            # Two tensor-parallel ranks may have their copies of a row on different ranks of the group that shards rows.
            _sum_over_ranks_(copies.buffers, group=sharing)
        _sum_over_ranks_([*_gradients(partial), *copies.buffers], group=tp_group)
        copies.write_back_()
    if dp_group is not None:
        of_experts = [param for param, each in replicas_of(model).items() if each.is_of_expert]
        dense = set(params).difference(of_experts)
        _sum_over_ranks_(_gradients(param for param in params if param in dense), group=dp_group)
        if of_experts:
            if expert_dp_group is None:
                raise ConfigError("the model has experts; pass expert_dp_group, the ranks that hold the same parts")
            _sum_over_ranks_(_gradients(of_experts), group=expert_dp_group)
    if embd_group is not None:
        sum_tied_embedding_gradients_(model, embd_group=embd_group)


def sum_tied_embedding_gradients_(model: nn.Module, *, embd_group: ProcessGroup) -> None:
    """Sum the gradients of a tied weight's copies on the first and the last stage, in place.

    The gradients are then bitwise equal, so that equal copies stay equal. Does nothing if weights are not tied, or on a
    single stage.

    Args:
        model: this rank's stage; its copy is the parameter whose ``Replicas.summed_over`` includes ``"embd"``.
        embd_group: the ranks that hold a copy.

    Raises:
        ConfigError: only some of the copies have a gradient; raised on every stage that holds a copy.
    """
    tied = _summed_over(model, "embd")
    if not tied or embd_group.size() == 1:
        return
    gradients = _gradients(tied)
    # A stage without a gradient would leave the others waiting, and its copy would diverge.
    has_one = torch.tensor(float(bool(gradients)), device=device_of_host_facts(embd_group, tied[0].device))
    holders = int(all_reduce(has_one, group=embd_group))
    if holders not in (0, embd_group.size()) and not is_rehearsal(embd_group):
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
    """Return the parameters whose gradients ``finalize_gradients_`` sums over ranks other than the data-parallel ones.

    Every rank needs whole gradients for that sum (``GradientBuffers(whole=...)``), because data-parallel groups may cut
    the owners' intervals at different places.
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
    groups: Groups | None = None,
) -> Tensor:
    """Return the 2-norm of the whole model's gradient, as on one rank.

    Split gradients count on every rank. Replicated gradients and copies of key-value heads count once, and so does each
    expert. The gradient of a tied weight counts on the first stage (``is_copy`` is set on the last).

    Args:
        model: the model, with complete gradients.
        tp_group: the ranks that split each layer.
        pp_group: the stages between which the layers are divided; None if there is one.
        shares: for each parameter, the elements of the gradient that are complete on each data-parallel rank; None if
            every rank has all.
        groups: process groups of the model, if it has experts.

    Returns:
        An fp64 scalar, the same on every rank.

    Raises:
        ConfigError: the model has experts, and ``groups`` is missing.
    """
    total = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    for squares, over in own_squares(model, tp_group=tp_group, pp_group=pp_group, shares=shares, model_groups=groups):
        for group in over:
            squares = all_reduce(squares, group=group)
        total = total + squares
    return total.sqrt()


def own_squares(
    model: nn.Module,
    *,
    tp_group: ProcessGroup,
    pp_group: ProcessGroup | None = None,
    shares: Mapping[Parameter, Share] | None = None,
    model_groups: Groups | None = None,
) -> list[tuple[Tensor, list[ProcessGroup]]]:
    """Return this rank's parts of the square of ``global_grad_norm``, each with the groups over which it is summed."""
    replicas = replicas_of(model)
    first = next(model.parameters())
    counted: list[Tensor] = []
    of_experts: list[tuple[Tensor, Share | None]] = []
    for param, gradient, layout, share in _counted_once(model, tp_group, shares):
        if replicas[param].is_of_expert:
            of_experts.append((gradient, share))
        else:
            counted += _counted_here(gradient, layout, tp_group.rank(), first_row(param), share)
    dense = [param for param, each in replicas.items() if not each.is_of_expert]
    sharing = group_of_rows(dense[0]) if dense else None
    if shares:
        sharing = next((shares[param].group for param in dense if param in shares), None)
    groups = [group for group in (tp_group, sharing, pp_group) if group is not None]
    sums = [(_sum_of_squares(counted, first.device), groups)]
    # A stage without experts takes part in the sum of the other stages.
    if _num_experts(model) or any(each.is_of_expert for each in replicas.values()):
        if model_groups is None or model_groups.expert_dp is None or model_groups.dp is None:
            raise ConfigError("the model has experts; the norm needs its groups, with dp and expert_dp")
        # The ranks of a stage hold all experts, each as often as ``expert_dp`` has ranks unless these split it.
        is_first = model_groups.expert_dp.rank() == 0 or any(is_sharded(param) for param in replicas)
        own = [each if share is None else share.gradient for each, share in of_experts if is_first or share is not None]
        groups = [group for group in (tp_group, model_groups.dp, pp_group) if group is not None]
        sums.append((_sum_of_squares(own, first.device), groups))
    return sums


def _num_experts(model: nn.Module) -> int:
    return getattr(getattr(getattr(model, "config", None), "experts", None), "num", 0)


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
    counted = list(_counted_once(model, tp_group, shares))
    dense = [each[1:] for each in counted if not replicas[each[0]].is_of_expert]
    of_experts = [each[1:] for each in counted if replicas[each[0]].is_of_expert]
    squares = _exact_squares(dense, group=tp_group, pp_group=pp_group, number=number)
    if num := _num_experts(model):
        # Each rank of ``experts`` holds some experts, which are whole.
        over = tp_group if groups is None or groups.experts is None else groups.experts
        squares += _exact_squares(of_experts, group=over, pp_group=pp_group, number=num)
    return torch.tensor(squares, dtype=torch.float64, device=next(model.parameters()).device).sqrt()


def _counted_once(
    model: nn.Module, tp_group: ProcessGroup, shares: Mapping[Parameter, Share] | None
) -> Iterator[tuple[Parameter, Tensor, ParamLayout, Share | None]]:
    """Yield the parameters whose gradient this stage counts."""
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
    groups: Groups | None = None,
) -> Tensor:
    """Scale all gradients in place so that their global norm is at most ``max_norm``.

    Args:
        model: the model, with complete gradients.
        max_norm: maximum norm; 0 or infinity turns clipping off.
        tp_group: the ranks that split each layer.
        pp_group: the stages between which the layers are divided; None if there is one.
        loss_scale: factor of the loss; the gradients are always divided by it.
        shares: as for ``global_grad_norm``; this rank's elements are scaled.
        groups: as for ``global_grad_norm``.

    Returns:
        The norm before clipping, divided by ``loss_scale``; an fp64 scalar, the same on every rank. The host does not
        wait for a GPU.
    """
    norm = global_grad_norm(model, tp_group=tp_group, pp_group=pp_group, shares=shares, groups=groups) / loss_scale
    scale_gradients_(model, norm, max_norm, loss_scale=loss_scale, shares=shares)
    return norm


def scale_gradients_(
    model: nn.Module,
    norm: Tensor,
    max_norm: float,
    *,
    loss_scale: float = 1.0,
    shares: Mapping[Parameter, Share] | None = None,
    scale_later: Callable[[Tensor], None] | None = None,
) -> None:
    """Scale all gradients in place, as ``clip_grad_norm_``, by a known norm.

    Args:
        norm: the global norm, divided by ``loss_scale``; an fp64 scalar.
        scale_later: on a device other than the CPU, gets the fp32 scalar that must divide fp32 gradients, and divides
            them later; None to divide them here.
        model, max_norm, loss_scale, shares: as for ``clip_grad_norm_``.
    """
    clips = max_norm > 0 and not math.isinf(max_norm)
    own = _gradients(model.parameters()) if shares is None else [share.gradient for share in shares.values()]
    if clips and not norm.is_cpu:
        # A NaN norm leaves the gradients unchanged; the caller checks the norm.
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).nan_to_num(nan=1.0) / loss_scale
        if scale_later is not None and all(gradient.dtype == torch.float32 for gradient in own):
            scale_later(factor.reciprocal().float())
        else:
            _multiply_on_device_(own, factor)
        return
    on_host = min(1.0, float(max_norm / (norm + 1e-6))) if clips else 1.0
    if on_host / loss_scale != 1.0:
        torch._foreach_mul_(own, on_host / loss_scale)


def _multiply_on_device_(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply by a scalar without waiting for the device."""
    for dtype in {gradient.dtype for gradient in gradients}:
        same = [gradient for gradient in gradients if gradient.dtype == dtype]
        if dtype.itemsize >= 4:
            torch._foreach_mul_(same, factor.to(dtype))
            continue
        # In 16 bits, the factor itself would be rounded, in bf16 to two digits.
        for gradient in same:
            gradient.copy_(gradient.float().mul_(factor.float()))


def _sum_of_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return an fp64 scalar; squares are summed in fp32 (fp64 for fp64) within a block, and blocks in fp64."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        elements = _NORM_ELEMENTS if tensor.dtype.itemsize >= 4 else _NORM_ELEMENTS_OF_TWO_BYTES
        # A GPU's kernel sums a tensor in blocks anyway.
        blocks = tensor.reshape(-1).split(elements) if device_type_of(tensor) == "cpu" else (tensor,)
        by_dtype.setdefault(tensor.dtype, []).extend(blocks)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for dtype, same in by_dtype.items():
        # In the gradient's dtype, a block's norm could overflow (fp16) or have only two digits (bf16).
        norms = torch._foreach_norm(same, 2.0, torch.float32 if dtype.itemsize < 4 else None)
        total += torch.stack(norms).double().square().sum()
    return total


def _counted_here(
    gradient: Tensor, layout: ParamLayout, rank: int, first: int, share: Share | None = None
) -> list[Tensor]:
    """Return the parts of ``gradient`` (which starts at row ``first``), or of its share, that no earlier rank holds."""
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
    """Return the part of an interval in ``rows``, which start at row ``first``, and its offset in the interval."""
    if dim > 0:
        return rows.narrow(dim, start, length), 0
    low, high = max(start, first), min(start + length, first + rows.size(0))
    return rows.narrow(0, low - first, high - low) if low < high else rows[:0], max(low - start, 0)


class _Copies:
    """Gradients of the parts of split parameters that several ranks hold, in buffers to be summed over the ranks.

    Attributes:
        buffers: for each such parameter, the gradients of all intervals that several ranks hold; zeros in intervals
            that this rank does not hold.
    """

    def __init__(self, model: nn.Module, group: ProcessGroup) -> None:
        self.buffers: list[Tensor] = []
        self._views: list[tuple[Tensor, Tensor]] = []
        replicas = replicas_of(model)
        for _, param, layout in named_param_layouts(model, group.size()):
            gradient = gradient_of(param)
            if gradient is None or layout.dim is None or not has_copies(layout) or replicas[param].is_of_expert:
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
    """Return the parameter's complete gradient: ``main_grad``, after ``grad`` was added to it; or ``grad``."""
    main_grad: Tensor | None = getattr(param, "main_grad", None)
    if main_grad is None:
        return None if param.grad is None else local_rows(param.grad)
    # In gradient buffers, both may be the same tensor.
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


# Number of elements of a row, which one thread sums.
_ROW = 1 << 12


def exact_norm(
    gradients: Iterable[tuple[Tensor, ParamLayout, Division | None]],
    *,
    tp_group: ProcessGroup,
    pp_group: ProcessGroup | None,
) -> float:
    """Return the 2-norm of a model's gradient.

    ``gradients`` are this rank's gradients, each with its parameter's layout and its division between data-parallel
    ranks (None if each rank has all elements). No parameter may be on two stages. ``tp_group`` sums over parts.
    """
    number = exact_parts(tp_group)
    assert number is not None
    squares = _exact_squares(gradients, group=tp_group, pp_group=pp_group, number=number)
    return float(torch.tensor(squares, dtype=torch.float64).sqrt())


def _exact_squares(
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


def _before(place: int, layout: ParamLayout, rank: int, start: int, stop: int) -> int:
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
