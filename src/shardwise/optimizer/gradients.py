"""What happens to gradients between backward and step: sums over ranks, and the global norm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from shardwise.collectives.primitives import all_reduce
from shardwise.tensor_parallel.layers import named_param_layouts

# Gradients travel in runs of about this many elements: few enough collectives, and a bounded copy.
_BUCKET_ELEMENTS = 1 << 24


def finalize_gradients_(model: nn.Module, *, tp_group: ProcessGroup, dp_group: ProcessGroup) -> None:
    """Complete every gradient, in place: it becomes that of the loss summed over all ranks' samples.

    Parameters that each tensor-parallel rank applied to its own part of the sequence (``param.sequence_parallel``) are
    summed over ``tp_group``; all are summed over ``dp_group``. Divide the loss by the whole batch's number of tokens
    for a mean.

    Args:
        model: its parameters' ``grad`` are overwritten; a parameter without one is left out, on every rank alike.
        tp_group: the ranks that split each layer.
        dp_group: the ranks that see different samples.
    """
    params = [param for param in model.parameters() if param.grad is not None]
    if tp_group.size() > 1:
        partial = [param for param in params if getattr(param, "sequence_parallel", False)]
        _sum_over_ranks_(_gradients(partial), group=tp_group)
    _sum_over_ranks_(_gradients(params), group=dp_group)


def global_grad_norm(model: nn.Module, *, tp_group: ProcessGroup) -> Tensor:
    """The 2-norm of the whole model's gradient, as if it were on one rank.

    Every split gradient counts on its rank, every replicated one once.

    Args:
        model: with complete gradients.
        tp_group: the ranks that split each layer.

    Returns:
        An fp64 scalar, the same on every rank.
    """
    counted = [
        param.grad
        for _, param, layout in named_param_layouts(model, tp_group.size())
        if param.grad is not None and (layout.dim is not None or tp_group.rank() == 0)
    ]
    device = next(model.parameters()).device
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in counted:
        # Norms of rows, then their squares summed in fp64: one fp32 sum over a whole weight is off by as much as 2e-4.
        # In its own dtype a row's norm may overflow (fp16), or keep two digits (bf16).
        dtype = torch.float32 if gradient.dtype.itemsize < 4 else None
        squares += torch.linalg.vector_norm(gradient, dim=-1, dtype=dtype).double().square().sum()
    return all_reduce(squares, group=tp_group).sqrt()


def clip_grad_norm_(model: nn.Module, max_norm: float, *, tp_group: ProcessGroup) -> Tensor:
    """Scale all gradients down, in place, if their global norm is over ``max_norm``.

    Args:
        model: with complete gradients.
        max_norm: largest norm; 0 or infinity only measures.
        tp_group: the ranks that split each layer.

    Returns:
        The norm before, an fp64 scalar, the same on every rank.
    """
    norm = global_grad_norm(model, tp_group=tp_group)
    if max_norm > 0 and not math.isinf(max_norm):
        factor = float(max_norm / (norm + 1e-6))
        if factor < 1.0:
            torch._foreach_mul_(_gradients(model.parameters()), factor)
    return norm


def _gradients(params: Iterable[Parameter]) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


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
