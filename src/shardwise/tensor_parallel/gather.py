"""A whole parameter from the ranks' parts, for comparisons and small models."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.collectives.primitives import broadcast_
from shardwise.sharding import ParamLayout


@torch.no_grad()
def gather_parameter(local: Tensor, layout: ParamLayout, *, group: ProcessGroup) -> Tensor:
    """The whole parameter, on every rank.

    Collective; every rank then holds all of it, so this is not for models that need the ranks' memory together. On the
    way, it takes the memory of the whole and of one part.

    Args:
        local: this rank's part, or something of its shape such as its gradient; not modified.
        layout: where each rank's part lies.
        group: the ranks that ``layout`` is about.

    Returns:
        A new tensor of shape ``layout.global_shape``.
    """
    if layout.dim is None or group.size() == 1:
        return local.detach().clone()
    whole = local.new_empty(layout.global_shape)
    for rank in range(group.size()):
        shard = local.detach().contiguous() if rank == group.rank() else local.new_empty(layout.local_shape(rank))
        layout.place_(whole, rank, broadcast_(shard, group=group, group_src=rank))
    return whole
