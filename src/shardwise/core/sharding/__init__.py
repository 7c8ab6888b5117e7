"""The slice that each rank holds. Pure arithmetic, for layers, gradients, pipeline stages and checkpoints."""

from shardwise.core.sharding.balanced import (
    Interval as Interval,
    balanced_range as balanced_range,
    balanced_sizes as balanced_sizes,
    checked_dim as checked_dim,
    checked_sizes as checked_sizes,
    divide as divide,
    ensure_divisibility as ensure_divisibility,
    intervals_of_sizes as intervals_of_sizes,
    stage_layers as stage_layers,
    uneven_sizes as uneven_sizes,
)
from shardwise.core.sharding.param_layout import (
    ParamLayout as ParamLayout,
    Replicas as Replicas,
    has_copies as has_copies,
    holders as holders,
    segments as segments,
)
from shardwise.core.sharding.pieces import (
    Box as Box,
    LocalParts as LocalParts,
    TensorPieces as TensorPieces,
    boxes_of_interval as boxes_of_interval,
    fitting_ranks as fitting_ranks,
    local_parts as local_parts,
)
from shardwise.core.sharding.shard import (
    ParamShard as ParamShard,
    ShardedOffset as ShardedOffset,
    is_copy_by as is_copy_by,
)
