"""Which slice is whose: pure arithmetic, shared by layers, gradients, pipeline stages and checkpoints."""

from shardwise.core.sharding.balanced import Interval as Interval
from shardwise.core.sharding.balanced import balanced_range as balanced_range
from shardwise.core.sharding.balanced import balanced_sizes as balanced_sizes
from shardwise.core.sharding.balanced import checked_dim as checked_dim
from shardwise.core.sharding.balanced import checked_sizes as checked_sizes
from shardwise.core.sharding.balanced import divide as divide
from shardwise.core.sharding.balanced import ensure_divisibility as ensure_divisibility
from shardwise.core.sharding.balanced import intervals_of_sizes as intervals_of_sizes
from shardwise.core.sharding.balanced import uneven_sizes as uneven_sizes
from shardwise.core.sharding.param_layout import ParamLayout as ParamLayout
from shardwise.core.sharding.param_layout import Segment as Segment
from shardwise.core.sharding.param_layout import has_copies as has_copies
from shardwise.core.sharding.param_layout import holders as holders
from shardwise.core.sharding.param_layout import segments as segments
from shardwise.core.sharding.parts import LocalParts as LocalParts
from shardwise.core.sharding.parts import fitting_ranks as fitting_ranks
from shardwise.core.sharding.parts import local_parts as local_parts
from shardwise.core.sharding.parts import parts_of_rank as parts_of_rank
from shardwise.core.sharding.pieces import Box as Box
from shardwise.core.sharding.pieces import Piece as Piece
from shardwise.core.sharding.pieces import TensorPieces as TensorPieces
from shardwise.core.sharding.pieces import boxes_of_interval as boxes_of_interval
from shardwise.core.sharding.shard import ParamShard as ParamShard
from shardwise.core.sharding.shard import ShardedOffset as ShardedOffset
from shardwise.core.sharding.shard import is_copy_by as is_copy_by
from shardwise.core.sharding.stages import stage_layers as stage_layers
