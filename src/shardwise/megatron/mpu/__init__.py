"""Megatron's older package ``megatron.mpu``, as in Megatron-DeepSpeed: groups, moves, layers, loss, random streams.

Its layers need no config and take their options by position. Its ``checkpoint`` takes only the function and its
arguments, and names of sizes end in an underscore. The rest equals ``shardwise.parallel_state`` and
``shardwise.tensor_parallel``.
"""

from shardwise.megatron.core.tensor_parallel import cross_entropy, data
from shardwise.megatron.core.tensor_parallel.cross_entropy import *  # noqa: F403
from shardwise.megatron.core.tensor_parallel.data import *  # noqa: F403
from shardwise.megatron.mpu import initialize, layers, mappings, random, utils
from shardwise.megatron.mpu.initialize import *  # noqa: F403
from shardwise.megatron.mpu.layers import *  # noqa: F403
from shardwise.megatron.mpu.mappings import *  # noqa: F403
from shardwise.megatron.mpu.random import *  # noqa: F403
from shardwise.megatron.mpu.utils import *  # noqa: F403
from shardwise.megatron.surface import offer

offer(globals(), initialize, layers, mappings, random, utils, cross_entropy, data)
