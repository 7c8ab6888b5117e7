"""From what every rank knows of its logits to the loss, and to the numbers that the gradient needs.

``cross_entropy`` has the formula.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication.backend import host_numbers
from shardwise.core.communication.collectives import all_gather
from shardwise.core.sharding import Interval
from shardwise.nn.loss.options import LossOptions


@dataclass(frozen=True)
class Combined:
    """The loss of each token, and what its gradient needs beside the logits; all ``[n]``.

    Attributes:
        loss: 0 for ignored tokens.
        maximum: largest ``y`` of all ranks.
        weight: of ``exp(y - maximum)`` in the gradient, 0 for ignored tokens.
        at_target: the gradient in the target's column, 0 for ignored tokens.
        rest: the part of the gradient that is the same in all other columns, with its sign turned; None if there is
            none.
    """

    loss: Tensor
    maximum: Tensor
    weight: Tensor
    at_target: Tensor
    rest: Tensor | None


def gather_statistics(own: Tensor, group: ProcessGroup) -> Tensor:
    """Every rank's ``[n, k]``, or ``[p, n, k]`` of its parts, as ``[t p, n, k]``; the one collective of the loss."""
    return all_gather(own if own.dim() == 3 else own.unsqueeze(0), group=group, dim=0)


def combine(every: Tensor, ranges: Sequence[Interval], ignored: Tensor, options: LossOptions) -> Combined:
    """The loss from all ranks' statistics.

    Args:
        every: ``[t, n, 3]``, or ``[t, n, 4]`` with label smoothing: each rank's ``row_statistics``.
        ranges: every rank's ids.
        ignored: ``[n]``, the tokens that cost nothing.
        options: of the loss.
    """
    vocab_size, smoothing, z_loss = ranges[-1][1], options.label_smoothing, options.z_loss
    maximum = every[..., 0].amax(dim=0)
    below = every[..., 0] - maximum
    sum_exp = (every[..., 1] * below.exp()).sum(dim=0)
    log_sum_exp = sum_exp.log()
    nll = log_sum_exp - (every[..., 2] + below).amax(dim=0)

    loss, weight = nll, sum_exp.reciprocal()
    # Where the target is nearly certain, its probability minus 1 has digits that the probability has lost.
    at_target = torch.expm1(-nll) + smoothing
    rest = None
    if smoothing > 0:
        counts = host_numbers([float(stop - start) for start, stop in ranges], every)
        # Empty shards have no maximum: nothing of theirs enters the sum.
        differences = (every[..., 3] + counts[:, None] * below.nan_to_num(neginf=0.0)).sum(dim=0)
        of_others = smoothing / (vocab_size - 1)
        loss = (1.0 - smoothing - of_others) * nll + of_others * (vocab_size * log_sum_exp - differences)
        rest = torch.full_like(nll, of_others).masked_fill_(ignored, 0.0)
    if z_loss > 0:
        log_normalizer = maximum + log_sum_exp
        loss = loss + z_loss * log_normalizer.square()
        slope = 2.0 * z_loss * log_normalizer
        weight = weight * (1.0 + slope)
        at_target = at_target + slope * torch.exp(-nll)
    loss, weight, at_target = (x.masked_fill(ignored, 0.0) for x in (loss, weight, at_target))
    return Combined(loss, maximum, weight, at_target, rest)
