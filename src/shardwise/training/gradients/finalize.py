"""Complete gradients between backward and step: sums over tensor-parallel ranks, copies, and tied weights."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from shardwise.core.communication.collectives import all_reduce
from shardwise.core.communication.context import device_of_host_facts, is_rehearsal
from shardwise.core.errors import ConfigError
from shardwise.core.sharding import has_copies, holders, segments
from shardwise.core.sharding.balanced import first_row, group_of_rows, local_rows
from shardwise.nn.replicated import named_param_layouts, replicas_of
from shardwise.training.gradients.base import all_reduced

_BUCKET_ELEMENTS = 1 << 24


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
        _sum_over_ranks_([*gradients_of(partial), *copies.buffers], group=tp_group)
        copies.write_back_()
    if dp_group is not None:
        of_experts = [param for param, each in replicas_of(model).items() if each.is_of_expert]
        dense = set(params).difference(of_experts)
        _sum_over_ranks_(gradients_of(param for param in params if param in dense), group=dp_group)
        if of_experts:
            if expert_dp_group is None:
                raise ConfigError("the model has experts; pass expert_dp_group, the ranks that hold the same parts")
            _sum_over_ranks_(gradients_of(of_experts), group=expert_dp_group)
    if embd_group is not None:
        sum_tied_embedding_gradients_(model, embd_group=embd_group)


def sum_tied_embedding_gradients_(model: nn.Module, *, embd_group: ProcessGroup) -> None:
    """Sum the gradients of a tied weight's copies on the first and the last stage, in place.

    The gradients are then bitwise equal, so that equal copies stay equal. Does nothing if weights are not tied, or on a
    single stage.
    """
    tied = _summed_over(model, "embd")
    if not tied or embd_group.size() == 1:
        return
    gradients = gradients_of(tied)
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


def part_of(rows: Tensor, dim: int, start: int, length: int, first: int) -> tuple[Tensor, int]:
    """Return the part of an interval in ``rows``, which start at row ``first``, and its offset in the interval."""
    if dim > 0:
        return rows.narrow(dim, start, length), 0
    low, high = max(start, first), min(start + length, first + rows.size(0))
    return rows.narrow(0, low - first, high - low) if low < high else rows[:0], max(low - start, 0)


class _Copies:
    """Gradients of the parts of split parameters that several ranks hold, in buffers to be summed over the ranks."""

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
                    own, behind = part_of(gradient, layout.dim, here[start], stop - start, first_row(param))
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


def gradients_of(params: Iterable[Parameter]) -> list[Tensor]:
    """Return the gradients of the parameters that have one, in the order of ``params``."""
    return [gradient for param in params if (gradient := gradient_of(param)) is not None]


def _sum_over_ranks_(gradients: Sequence[Tensor], *, group: ProcessGroup) -> None:
    if group.size() > 1:
        for gradient, total in all_reduced(gradients, group=group, most_elements=_BUCKET_ELEMENTS):
            gradient.copy_(total)
