# For type checkers: at run time this is another name of the package.
from shardwise.megatron.core.parallel_state import *  # noqa: F403
from shardwise.megatron.core.parallel_state.ambient import *  # noqa: F403
from shardwise.megatron.core.parallel_state.groups import *  # noqa: F403
from shardwise.megatron.core.parallel_state.stages import *  # noqa: F403
