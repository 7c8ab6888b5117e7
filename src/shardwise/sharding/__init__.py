"""Which slice is whose: pure arithmetic, shared by layers, gradients, pipeline stages and checkpoints."""

from shardwise.sharding.balanced import (
    Interval,
    balanced_range,
    balanced_sizes,
    checked_dim,
    checked_sizes,
    divide,
    ensure_divisibility,
    intervals_of_sizes,
    uneven_sizes,
)
from shardwise.sharding.layout import ParamLayout, Segment, has_copies, holders, segments
from shardwise.sharding.pieces import Piece, TensorPieces
from shardwise.sharding.shard import ParamShard, ShardedOffset, is_copy_by
from shardwise.sharding.stages import stage_layers

__all__ = [
    "Interval",
    "ParamLayout",
    "ParamShard",
    "Piece",
    "Segment",
    "ShardedOffset",
    "TensorPieces",
    "balanced_range",
    "balanced_sizes",
    "checked_dim",
    "checked_sizes",
    "divide",
    "ensure_divisibility",
    "has_copies",
    "holders",
    "intervals_of_sizes",
    "is_copy_by",
    "segments",
    "stage_layers",
    "uneven_sizes",
]
