"""From the loss of each token to one number."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.communication.collectives import all_reduce
from shardwise.validation import validation_applies


def reduce_loss(
    loss: Tensor,
    target: Tensor,
    reduction: str,
    *,
    ignore_index: int,
    data_parallel_group: ProcessGroup | None = None,
    validate: bool = True,
    stacklevel: int = 3,
) -> Tensor:
    """The sum of the tokens' losses, or their mean over the tokens that are not ignored.

    Args:
        loss: of each token, 0 where it is ignored.
        target: of each token.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.
        ignore_index: the target that is not counted.
        data_parallel_group: count the tokens of all its ranks, which costs one all-reduce of 8 bytes for a mean. The
            results of its ranks then add up to the mean over the whole batch, and so do their gradients.
        validate: warn where there is no token to average over; the mean is 0 then.
        stacklevel: of the warning, as in ``warnings.warn``.
    """
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    count = (target != ignore_index).sum().to(torch.float64)
    if data_parallel_group is not None:
        count = all_reduce(count, group=data_parallel_group)
    if validate and validation_applies() and count.item() == 0:
        warnings.warn(
            f"all {target.numel()} targets are {ignore_index}, which is ignored: the mean loss is 0 and so is its "
            "gradient",
            stacklevel=stacklevel,
        )
    return loss.sum() / count.clamp(min=1.0).to(loss.dtype)
