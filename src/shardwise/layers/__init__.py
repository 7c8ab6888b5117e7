"""Layers whose parameters are split over a group, in the manner of ``torch.nn``: a tensor in, a tensor out.

Each layer keeps ``param_layouts``: for each of its own parameters, where this rank's part lies in the whole one.
Weights start with the values of the dense layer, whatever the number of ranks (``shardwise.initialization``).
"""

from shardwise.layers.arguments import layer_arguments
from shardwise.layers.column import ColumnLinear
from shardwise.layers.embedding import VocabEmbedding
from shardwise.layers.linear import LinearParallelism, tensor_parallel_linear
from shardwise.layers.module import GroupModule, ShardedModule, named_param_layouts, parameter_device
from shardwise.layers.norm import make_norm
from shardwise.layers.replicated import ReplicatedEmbedding, ReplicatedLinear
from shardwise.layers.row import RowLinear

__all__ = [
    "ColumnLinear",
    "GroupModule",
    "LinearParallelism",
    "ReplicatedEmbedding",
    "ReplicatedLinear",
    "RowLinear",
    "ShardedModule",
    "VocabEmbedding",
    "layer_arguments",
    "make_norm",
    "named_param_layouts",
    "parameter_device",
    "tensor_parallel_linear",
]
