"""Layers whose parameters are split over a group. As in ``torch.nn``, a layer maps a tensor to a tensor.

Each layer's ``param_layouts`` give the position of this rank's part in each whole parameter. At every number of ranks,
the initial weights are those of the dense layer (``shardwise.core.initialization``).
"""

from shardwise.nn.arithmetic import Arithmetic as Arithmetic, arithmetic_of as arithmetic_of
from shardwise.nn.column import ColumnLinear as ColumnLinear
from shardwise.nn.embedding import VocabEmbedding as VocabEmbedding
from shardwise.nn.linear import LinearParallelism as LinearParallelism, tensor_parallel_linear as tensor_parallel_linear
from shardwise.nn.module import (
    GroupModule as GroupModule,
    ShardedModule as ShardedModule,
    parameter_device as parameter_device,
    viewless as viewless,
)
from shardwise.nn.norm import HeadsRMSNorm as HeadsRMSNorm, add_and_norm as add_and_norm
from shardwise.nn.replicated import (
    ReplicatedEmbedding as ReplicatedEmbedding,
    ReplicatedLinear as ReplicatedLinear,
    named_param_layouts as named_param_layouts,
)
from shardwise.nn.row import RowLinear as RowLinear
