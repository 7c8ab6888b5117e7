"""Which choices of experts fit their capacity: a rule for each sequence, whichever ranks have its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication import moves
from shardwise.models.experts.router import RoutedBatch, Routing
from shardwise.models.experts.spec import Experts


@torch.no_grad()
def taken(
    routing: Routing, spec: Experts, batch: RoutedBatch, num: int, group: ProcessGroup, sizes: Sequence[int]
) -> Tensor:
    """Return whether each token is taken by each expert that it chose, ``[n, k]`` bools.

    All ranks that share sequences gather the choices and weights of all of their tokens, ``2 k`` numbers for each.

    Args:
        routing: the choices of this rank's tokens.
        spec: the experts, with ``capacity_factor``.
        batch: the positions of this rank, and where there are tokens.
        num: number of sequences.
        group: tensor-parallel group.
        sizes: number of tokens of each of its ranks; a single number if all have the same tokens.
    """
    weights = routing.weights
    choices = torch.cat([weights, routing.experts.to(weights.dtype)], dim=1)
    if len(sizes) > 1:
        choices = moves.gather_for_parts(choices, dim=0, group=group, sizes=sizes)
    choices, context = choices.view(-1, num, choices.size(1)), batch.view.context
    if context is not None:
        choices = moves.gather_for_parts(choices, dim=0, group=context.group, sizes=context.sizes)
        choices = context.in_order(choices, dim=0)
    weights, experts = choices.chunk(2, dim=-1)
    fits = _fit(weights, experts.long(), spec, None if batch.is_token is None else batch.is_token.t())
    if context is not None:
        fits = context.own(fits, dim=0)
    fits = fits.flatten(0, 1)
    return moves.scatter(fits, dim=0, group=group, sizes=sizes) if len(sizes) > 1 else fits


def _fit(weights: Tensor, experts: Tensor, spec: Experts, is_token: Tensor | None) -> Tensor:
    """Return whether choices fit, ``[s, b, k]``, from weights and experts of that shape, and tokens ``[s, b]``."""
    s, b, k = experts.shape
    # Choices of the same expert in the same sequence queue up; padding is behind all queues.
    queues = torch.arange(b, device=experts.device).view(b, 1) * spec.num + experts
    lengths = torch.full((b,), s, device=experts.device)
    if is_token is not None:
        queues, lengths = queues.masked_fill(~is_token.unsqueeze(-1), b * spec.num), is_token.sum(dim=0)
    queues = queues.flatten()
    order = torch.arange(len(queues), device=experts.device)
    if spec.drops_by == "probability":
        order = weights.flatten().argsort(descending=True, stable=True)
    order = order[queues[order].argsort(stable=True)]
    queued = queues[order]
    assert spec.capacity_factor is not None
    limits = torch.cat([(lengths.double() * (spec.capacity_factor * k / spec.num)).ceil(), lengths.new_zeros(1)])
    places = torch.arange(len(queued), device=experts.device) - torch.searchsorted(queued, queued)
    fits = torch.empty_like(queued, dtype=torch.bool).scatter_(0, order, places < limits[queued // spec.num])
    return fits.view(s, b, k)
