"""What happens to gradients between backward and step: sums over ranks, and the global norm."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from shardwise.core.communication.collectives import all_reduce
from shardwise.core.communication.context import device_of_host_facts
from shardwise.core.errors import ConfigError
from shardwise.core.sharding import ParamLayout, ParamShard, has_copies, holders, segments
from shardwise.core.sharding.balanced import first_row, group_of_rows, local_rows
from shardwise.nn.replicated import named_param_layouts, replicas_of
from shardwise.training.gradients import Share
from shardwise.training.optimizer.exact_norm import exact_norm

# Gradients travel in runs of about this many elements: few enough collectives, and a bounded copy.
_BUCKET_ELEMENTS = 1 << 24
# The norm of that many elements is one fp32 sum, off by 2e-7 at most on a CPU. A sum of numbers of two bytes is not
# vectorised there, which rounds more often.
_NORM_ELEMENTS, _NORM_ELEMENTS_OF_TWO_BYTES = 1 << 16, 1 << 13


def finalize_gradients_(
    model: nn.Module, *, tp_group: ProcessGroup, dp_group: ProcessGroup | None, embd_group: ProcessGroup | None = None
) -> None:
    """Complete every gradient, in place: it becomes that of the loss summed over all ranks' samples.

    Summed over ``tp_group`` are the gradients of parameters that each rank applied to its own part of the sequence or
    to its own heads (``Replicas.summed_over``), and what several ranks hold of a split parameter, by its layout: the
    copies of a key-value head. Copies are then the same on their ranks, bit for bit. All gradients are summed over
    ``dp_group``. Divide the loss by the whole batch's number of tokens for a mean.

    The gradient of a parameter with a ``main_grad`` (``config.gradient_accumulation_fusion``) is that: what else
    autograd left in its ``grad`` is added to it first, and ``grad`` is None afterwards. So it is with all functions
    here.

    Args:
        model: its parameters' gradients are overwritten; a parameter without one is left out, on every rank alike.
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

    Afterwards the gradients are the same bit for bit, so copies that started equal stay equal. Nothing happens where
    the weights are not tied, or on one stage.

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

    Every rank needs the gradient of these whole, before that sum (``GradientBuffers(whole=...)``): what ranks of a
    data-parallel group own may be cut at other places on the ranks that they are then summed over.
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

    Every split gradient counts on its rank, every replicated one and what several ranks hold of a split one once, and a
    tied weight's on the first stage (the last stage's ``is_copy``).

    Args:
        model: with complete gradients.
        tp_group: the ranks that split each layer.
        pp_group: the stages that share out the layers; None if there is one.
        shares: by parameter, which elements of its gradient are complete on which data-parallel rank; None if all are
            on every rank.

    Returns:
        An fp64 scalar, the same on every rank.
    """
    replicas = replicas_of(model)
    counted = [
        part
        for _, param, layout in named_param_layouts(model, tp_group.size())
        if (gradient := gradient_of(param)) is not None and not replicas[param].is_copy
        for part in _counted_here(
            gradient, layout, tp_group.rank(), first_row(param), None if shares is None else shares[param]
        )
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
    replicas = replicas_of(model)
    counted_once = (
        (gradient, layout, None if shares is None else shares[param])
        for _, param, layout in named_param_layouts(model, tp_group.size())
        if (gradient := gradient_of(param)) is not None and not replicas[param].is_copy
    )
    norm = exact_norm(counted_once, tp_group=tp_group, pp_group=pp_group)
    return torch.tensor(norm, dtype=torch.float64, device=next(model.parameters()).device)


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
        loss_scale: by which the loss was multiplied, and so the gradients are; they are divided by it in any case.
        shares: as in ``global_grad_norm``; then what this rank has of the gradients is scaled.
        norm_of: ``global_grad_norm``, or ``exact_grad_norm``.

    Returns:
        The norm before, but divided by ``loss_scale``; an fp64 scalar, the same on every rank. The host has not waited
        for it on a GPU.
    """
    norm = norm_of(model, tp_group=tp_group, pp_group=pp_group, shares=shares) / loss_scale
    clips = max_norm > 0 and not math.isinf(max_norm)
    own = _gradients(model.parameters()) if shares is None else [share.gradient for share in shares.values()]
    if clips and not norm.is_cpu:
        # A norm that is NaN leaves the gradients as they are; that it is, is for who reads it.
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).nan_to_num(nan=1.0) / loss_scale
        _multiply_on_device_(own, factor)
        return norm
    on_host = min(1.0, float(max_norm / (norm + 1e-6))) if clips else 1.0
    if on_host / loss_scale != 1.0:
        torch._foreach_mul_(own, on_host / loss_scale)
    return norm


def _multiply_on_device_(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply by a scalar that the host does not know, and does not wait for."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for dtype, same in by_dtype.items():
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
        # A GPU's kernel takes a tensor in blocks by itself.
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
    """What of ``gradient``, which begins at row ``first``, or of its share, no rank before this one holds."""
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
    """A run of indices of a tensor of which there are only ``rows``, from row ``first`` on.

    Returns:
        What of the run there is, and where in the run that begins.
    """
    if dim > 0:
        return rows.narrow(dim, start, length), 0
    low, high = max(start, first), min(start + length, first + rows.size(0))
    return rows.narrow(0, low - first, high - low) if low < high else rows[:0], max(low - start, 0)


class _Copies:
    """The gradients of what several ranks hold of split parameters, side by side, to be summed over the ranks.

    Args:
        model: with gradients.
        group: the ranks that split each layer.

    Attributes:
        buffers: for each such parameter, all runs of indices that several ranks hold: this rank's gradient, and zeros
            where a run is others' only.
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
        """Give the gradients what the buffers hold."""
        for view, gradient in self._views:
            gradient.copy_(view)


def gradient_of(param: Parameter) -> Tensor | None:
    """A parameter's complete gradient: ``main_grad``, to which what else is in ``grad`` is added first, or ``grad``."""
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
    if group.size() == 1:
        return
    for bucket in _buckets(gradients):
        flat = all_reduce(torch.cat([gradient.flatten() for gradient in bucket]), group=group, may_overwrite=True)
        for gradient, total in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(total.view_as(gradient))


def _buckets(gradients: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    """Runs of gradients of one dtype, each of about ``_BUCKET_ELEMENTS``."""
    bucket: list[Tensor] = []
    elements = 0
    for gradient in gradients:
        if bucket and (elements + gradient.numel() > _BUCKET_ELEMENTS or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, elements = [], 0
        bucket.append(gradient)
        elements += gradient.numel()
    if bucket:
        yield bucket
