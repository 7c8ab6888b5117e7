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
from shardwise.sharding.layout import ParamLayout, Segment, segments
from shardwise.sharding.shard import ParamShard, ShardedOffset

__all__ = [
    "Interval",
    "ParamLayout",
    "ParamShard",
    "Segment",
    "ShardedOffset",
    "balanced_range",
    "balanced_sizes",
    "checked_dim",
    "checked_sizes",
    "divide",
    "ensure_divisibility",
    "intervals_of_sizes",
    "segments",
    "uneven_sizes",
]
