"""Tensor parallelism under Megatron's names: layers, moves between layouts, the loss and random streams."""

from shardwise.megatron.core.tensor_parallel import (
    cross_entropy,
    data,
    inference_layers,
    layers,
    mappings,
    random,
    utils,
)
from shardwise.megatron.core.tensor_parallel.cross_entropy import *  # noqa: F403
from shardwise.megatron.core.tensor_parallel.data import *  # noqa: F403
from shardwise.megatron.core.tensor_parallel.inference_layers import *  # noqa: F403
from shardwise.megatron.core.tensor_parallel.layers import *  # noqa: F403
from shardwise.megatron.core.tensor_parallel.mappings import *  # noqa: F403
from shardwise.megatron.core.tensor_parallel.random import *  # noqa: F403
from shardwise.megatron.core.tensor_parallel.utils import *  # noqa: F403
from shardwise.megatron.surface import offer

offer(globals(), cross_entropy, data, inference_layers, layers, mappings, random, utils)
