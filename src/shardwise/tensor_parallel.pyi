# For type checkers: at run time this is another name of the package.
from shardwise.megatron.core.tensor_parallel.cross_entropy import *  # noqa: F403
from shardwise.megatron.core.tensor_parallel.data import *  # noqa: F403
from shardwise.megatron.core.tensor_parallel.inference_layers import *  # noqa: F403
from shardwise.megatron.core.tensor_parallel.layers import *  # noqa: F403
from shardwise.megatron.core.tensor_parallel.mappings import *  # noqa: F403
from shardwise.megatron.core.tensor_parallel.random import *  # noqa: F403
from shardwise.megatron.core.tensor_parallel.utils import *  # noqa: F403
