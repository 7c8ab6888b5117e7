"""Layers whose parameters are split over a group, in the manner of ``torch.nn``: a tensor in, a tensor out.

Each layer keeps ``param_layouts``: for each of its own parameters, where this rank's part lies in the whole one.
Weights start with the values of the dense layer, whatever the number of ranks (``shardwise.initialization``).
"""

from shardwise.layers.arguments import layer_arguments as layer_arguments
from shardwise.layers.column import ColumnLinear as ColumnLinear
from shardwise.layers.embedding import VocabEmbedding as VocabEmbedding
from shardwise.layers.exact import apply_norm as apply_norm
from shardwise.layers.exact import norm_heads as norm_heads
from shardwise.layers.linear import LinearParallelism as LinearParallelism
from shardwise.layers.linear import tensor_parallel_linear as tensor_parallel_linear
from shardwise.layers.module import GroupModule as GroupModule
from shardwise.layers.module import ShardedModule as ShardedModule
from shardwise.layers.module import named_param_layouts as named_param_layouts
from shardwise.layers.module import parameter_device as parameter_device
from shardwise.layers.module import viewless as viewless
from shardwise.layers.norm import HeadsRMSNorm as HeadsRMSNorm
from shardwise.layers.norm import add_and_norm as add_and_norm
from shardwise.layers.norm import make_norm as make_norm
from shardwise.layers.replicated import ReplicatedEmbedding as ReplicatedEmbedding
from shardwise.layers.replicated import ReplicatedLinear as ReplicatedLinear
from shardwise.layers.row import RowLinear as RowLinear
