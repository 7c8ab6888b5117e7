"""Functions of ``mpu`` that split tensors."""

from shardwise.megatron.core.tensor_parallel import utils
from shardwise.megatron.core.tensor_parallel.attributes import divide, ensure_divisibility
from shardwise.megatron.core.tensor_parallel.utils import *  # noqa: F403 (its functions are those of mpu)

__all__ = [*utils.__all__, "divide", "ensure_divisibility"]
