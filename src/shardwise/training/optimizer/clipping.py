"""Clip gradients to a maximum global norm."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from shardwise.core.topology import Groups
from shardwise.training.gradients import Share
from shardwise.training.gradients.finalize import gradients_of
from shardwise.training.optimizer.grad_norm import global_grad_norm


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
    own = gradients_of(model.parameters()) if shares is None else [share.gradient for share in shares.values()]
    if clips and not norm.is_cpu:
        # A NaN norm leaves the gradients unchanged; the caller checks the norm.
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).nan_to_num(nan=1.0) / loss_scale
        if scale_later is not None and all(gradient.dtype == torch.float32 for gradient in own):
            scale_later(factor.reciprocal().float())
        else:
            _multiply_on_device_(own, factor)
        return
    on_host = min(1.0, float(max_norm / (norm + 1e-6))) if clips else 1.0
    # A stage may be frozen as a whole.
    if own and on_host / loss_scale != 1.0:
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
