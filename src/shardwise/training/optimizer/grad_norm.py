"""The global norm of a model's gradient."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from shardwise.core.communication.collectives import all_reduce
from shardwise.core.errors import ConfigError
from shardwise.core.sharding import ParamLayout, ParamShard, has_copies, holders, segments
from shardwise.core.sharding.balanced import first_row, group_of_rows, is_sharded
from shardwise.core.topology import Groups
from shardwise.kernels.fake_device import device_type_of
from shardwise.nn.replicated import named_param_layouts, replicas_of
from shardwise.training.gradients import Share
from shardwise.training.gradients.finalize import gradient_of, part_of

# On a CPU, a norm over this many elements is one fp32 sum, with an error of at most 2e-7. A sum of two-byte numbers is
# not vectorised there, and rounds more often.
_NORM_ELEMENTS, _NORM_ELEMENTS_OF_TWO_BYTES = 1 << 16, 1 << 13
# Blocks of two-byte numbers that one operator gets, because it copies them to fp32.
_BLOCKS_AT_ONCE = 128


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
    parts = own_squares(model, tp_group=tp_group, pp_group=pp_group, shares=shares, model_groups=groups)
    return _summed(parts).sqrt()


def num_zeros(
    model: nn.Module,
    *,
    tp_group: ProcessGroup,
    pp_group: ProcessGroup | None = None,
    shares: Mapping[Parameter, Share] | None = None,
    groups: Groups | None = None,
) -> Tensor:
    """Return the number of zeros in the whole model's gradient, as on one rank; arguments of ``global_grad_norm``."""
    parts = own_squares(
        model, tp_group=tp_group, pp_group=pp_group, shares=shares, model_groups=groups, total_of=_count_of_zeros
    )
    return _summed(parts)


def _summed(parts: Sequence[tuple[Tensor, list[ProcessGroup]]]) -> Tensor:
    total = torch.zeros_like(parts[0][0])
    for part, over in parts:
        for group in over:
            part = all_reduce(part, group=group)
        total = total + part
    return total


def own_squares(
    model: nn.Module,
    *,
    tp_group: ProcessGroup,
    pp_group: ProcessGroup | None = None,
    shares: Mapping[Parameter, Share] | None = None,
    model_groups: Groups | None = None,
    total_of: Callable[[Sequence[Tensor], torch.device], Tensor] | None = None,
) -> list[tuple[Tensor, list[ProcessGroup]]]:
    """Return this rank's parts of the square of ``global_grad_norm``, each with the groups over which it is summed.

    ``total_of`` computes another number than the sum of squares from gradients.
    """
    total_of = total_of or _sum_of_squares
    replicas = replicas_of(model)
    first = next(model.parameters())
    counted: list[Tensor] = []
    of_experts: list[tuple[Tensor, Share | None]] = []
    for param, gradient, layout, share in counted_once(model, tp_group, shares):
        if replicas[param].is_of_expert:
            of_experts.append((gradient, share))
        else:
            counted += _counted_here(gradient, layout, tp_group.rank(), first_row(param), share)
    dense = [param for param, each in replicas.items() if not each.is_of_expert]
    sharing = group_of_rows(dense[0]) if dense else None
    if shares:
        sharing = next((shares[param].group for param in dense if param in shares), None)
    groups = [group for group in (tp_group, sharing, pp_group) if group is not None]
    sums = [(total_of(counted, first.device), groups)]
    # A stage without experts takes part in the sum of the other stages.
    if num_experts(model) or any(each.is_of_expert for each in replicas.values()):
        if model_groups is None or model_groups.expert_dp is None or model_groups.dp is None:
            raise ConfigError("the model has experts; the norm needs its groups, with dp and expert_dp")
        # The ranks of a stage hold all experts, each as often as ``expert_dp`` has ranks unless these split it.
        is_first = model_groups.expert_dp.rank() == 0 or any(is_sharded(param) for param in replicas)
        own = [each if share is None else share.gradient for each, share in of_experts if is_first or share is not None]
        groups = [group for group in (tp_group, model_groups.dp, pp_group) if group is not None]
        sums.append((total_of(own, first.device), groups))
    return sums


def num_experts(model: nn.Module) -> int:
    return getattr(getattr(getattr(model, "config", None), "experts", None), "num", 0)


def counted_once(
    model: nn.Module, tp_group: ProcessGroup, shares: Mapping[Parameter, Share] | None
) -> Iterator[tuple[Parameter, Tensor, ParamLayout, Share | None]]:
    """Yield the parameters whose gradient this stage counts."""
    replicas = replicas_of(model)
    for _, param, layout in named_param_layouts(model, tp_group.size()):
        if (gradient := gradient_of(param)) is not None and not replicas[param].is_copy:
            yield param, gradient, layout, None if shares is None else shares[param]


def _sum_of_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return an fp64 scalar; squares are summed in fp32 (fp64 for fp64) within a block, and blocks in fp64."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if device_type_of(tensor) != "cpu":
            # A GPU's kernel sums a tensor in blocks anyway.
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
            continue
        flat, elements = tensor.reshape(-1), _NORM_ELEMENTS
        parts: Sequence[Tensor] = (flat,)
        if tensor.dtype.itemsize < 4:
            elements = _NORM_ELEMENTS_OF_TWO_BYTES
            parts = flat.split(_BLOCKS_AT_ONCE * elements)
        for part in parts:
            num_blocks = part.numel() // elements
            if num_blocks:
                blocks = part[: num_blocks * elements].view(num_blocks, elements)
                norms = torch.linalg.vector_norm(blocks, dim=1, dtype=_norm_dtype(tensor.dtype))
                total += norms.double().square().sum()
            if num_blocks * elements < part.numel():
                by_dtype.setdefault(tensor.dtype, []).append(part[num_blocks * elements :])
    for dtype, same in by_dtype.items():
        norms = torch.stack(torch._foreach_norm(same, 2.0, _norm_dtype(dtype)))
        total += norms.double().square().sum()
    return total


def _norm_dtype(dtype: torch.dtype) -> torch.dtype | None:
    # In the gradient's dtype, a block's norm could overflow (fp16) or have only two digits (bf16).
    return torch.float32 if dtype.itemsize < 4 else None


def _count_of_zeros(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    counts = [(tensor == 0).sum(dtype=torch.float64) for tensor in tensors]
    return torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.float64, device=device)


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
        part_of(gradient, layout.dim, local_start, length, first)[0]
        for start, length, local_start in segments(layout, rank)
        if holders(layout)[start, start + length][0] == rank
    ]
