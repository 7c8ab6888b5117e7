"""The sharded state of any module, and the assembly of whole parameters from the ranks' parts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise.core.communication.collectives import all_gather, broadcast_
from shardwise.core.sharding import ParamLayout, ParamShard, Replicas, ShardedOffset, is_copy_by
from shardwise.core.sharding.balanced import group_of_rows, local_rows, rows_of_ranks


def sharded_state_dict(
    module: nn.Module,
    prefix: str = "",
    sharded_offsets: Sequence[ShardedOffset] = (),
    metadata: dict[str, Any] | None = None,
    *,
    group: ProcessGroup,
) -> dict[str, ParamShard]:
    """Return this rank's part of every parameter and persistent buffer of ``module``, by name, for a checkpoint.

    A module with a ``sharded_state_dict`` method, such as a tensor-parallel layer, provides the entries of itself and
    its submodules. Other tensors have the layouts of their module's ``param_layouts``, or are replicated on the ranks
    of the group. A tied parameter appears once, under its first name.

    Args:
        module: any module.
        prefix: prefix of each name.
        sharded_offsets: ``(axis, index, count)`` of leading axes that stack this module with others of the same name.
        metadata: passed to the modules' own ``sharded_state_dict``. Its ``dp_cp_group`` has the ranks that hold the
            same values, and its first rank writes them. Without it the planner of a checkpoint distributes the writes.
        group: tensor-parallel group.

    Returns:
        An entry for each tensor, in the order of ``module.state_dict()``.

    Raises:
        ShardingError: ``sharded_offsets`` do not fit together.
    """
    own: Any = getattr(module, "sharded_state_dict", None)
    if own is None:
        return state_of_parts(module, prefix, sharded_offsets, metadata, group=group)
    entries: dict[str, ParamShard] = own(prefix, tuple(sharded_offsets), metadata)
    return _each_tensor_once(entries)


def state_of_parts(
    module: nn.Module,
    prefix: str = "",
    sharded_offsets: Sequence[ShardedOffset] = (),
    metadata: dict[str, Any] | None = None,
    *,
    group: ProcessGroup,
) -> dict[str, ParamShard]:
    """The default ``sharded_state_dict``: the module's own tensors and the results of its children.

    A module that overrides ``sharded_state_dict`` calls this function and changes the result.
    """
    entries: dict[str, ParamShard] = {}
    stated: dict[str, Replicas] = getattr(module, "param_replicas", {})
    layouts: dict[str, ParamLayout] = getattr(module, "param_layouts", {})
    for name, tensor in module.state_dict(keep_vars=True).items():
        # Only the names of a child's tensors contain a dot.
        if "." not in name and isinstance(tensor, Tensor):
            layout = layouts.get(name) or ParamLayout.replicated(tensor.shape, group.size())
            offsets, replicas = tuple(sharded_offsets), stated.get(name, Replicas())
            entries[prefix + name] = ParamShard(
                prefix + name, tensor, layout, group.rank(), offsets, is_copy=is_copy_by(metadata), replicas=replicas
            )
    for name, child in module.named_children():
        entries |= sharded_state_dict(child, f"{prefix}{name}.", sharded_offsets, metadata, group=group)
    return _each_tensor_once(entries)


def _each_tensor_once(entries: dict[str, ParamShard]) -> dict[str, ParamShard]:
    """Drop the entries that share a tensor with an earlier entry."""
    first = {id(shard.data): name for name, shard in reversed(entries.items())}
    return {name: shard for name, shard in entries.items() if first[id(shard.data)] == name}


@torch.no_grad()
def gather_parameter(local: Tensor, layout: ParamLayout, *, group: ProcessGroup) -> Tensor:
    """Assemble the whole parameter on every rank, in a new tensor, from ``local`` parts or their gradients.

    Collective, also over the data-parallel ranks of a fully sharded model. Every rank needs memory for the whole
    parameter and one part, so this function does not suit models that only fit into the memory of all ranks together.
    """
    if (sharing := group_of_rows(local)) is not None:
        local = all_gather(
            local_rows(local), group=sharing, sizes=[stop - start for start, stop in rows_of_ranks(local)]
        )
    if layout.dim is None or group.size() == 1:
        return local.detach().clone()
    whole = local.new_empty(layout.global_shape)
    for rank in range(group.size()):
        shard = local.detach().contiguous() if rank == group.rank() else local.new_empty(layout.local_shape(rank))
        layout.place_(whole, rank, broadcast_(shard, group=group, group_src=rank))
    return whole
