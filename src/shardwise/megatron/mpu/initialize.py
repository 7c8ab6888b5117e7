"""``parallel_state`` as ``mpu`` has it: other names of the sizes, and a stage's part by what was set last."""

import warnings

import torch.distributed as dist

from shardwise.megatron.core import parallel_state
from shardwise.megatron.errors import AssertedTopologyError
from shardwise.megatron.surface import offer

# Megatron-DeepSpeed's tests call it by this name.
destroy_tensor_model_parallel = parallel_state.destroy_model_parallel


def initialize_model_parallel(
    tensor_model_parallel_size_: int = 1,
    pipeline_model_parallel_size_: int = 1,
    virtual_pipeline_model_parallel_size_: int | None = None,
) -> None:
    """Build the ambient topology on the ranks of ``torch.distributed``. Collective.

    Args:
        tensor_model_parallel_size_: ranks that split each layer. Where there are fewer ranks in all, this is their
            number, with a warning; so it is of the next.
        pipeline_model_parallel_size_: number of stages.
        virtual_pipeline_model_parallel_size_: parts of the model on each stage, interleaved.

    Raises:
        NotInitializedError: ``torch.distributed`` is not initialised.
        TopologyError, ConfigError: as ``parallel_state.initialize_model_parallel``.
    """
    tp = _at_most_all("tensor_model_parallel_size_", tensor_model_parallel_size_)
    pp = _at_most_all("pipeline_model_parallel_size_", pipeline_model_parallel_size_)
    parallel_state.initialize_model_parallel(tp, pp, virtual_pipeline_model_parallel_size_)


def _at_most_all(name: str, size: int) -> int:
    world_size = dist.get_world_size() if dist.is_initialized() else size
    if size > world_size:
        warnings.warn(f"{name} is {size}, and there are {world_size} ranks: it becomes {world_size}", stacklevel=3)
    return min(size, world_size)


def get_model_parallel_world_size() -> int:
    """Number of ranks that split each layer, from the time before pipelines.

    Raises:
        AssertedTopologyError: there are several pipeline stages.
    """
    _check_no_pipeline("get_model_parallel_world_size", "get_tensor_model_parallel_world_size")
    return parallel_state.get_tensor_model_parallel_world_size()


def get_model_parallel_rank() -> int:
    """This rank's place among those that split each layer, from the time before pipelines.

    Raises:
        AssertedTopologyError: there are several pipeline stages.
    """
    _check_no_pipeline("get_model_parallel_rank", "get_tensor_model_parallel_rank")
    return parallel_state.get_tensor_model_parallel_rank()


def _check_no_pipeline(name: str, instead: str) -> None:
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    if stages > 1:
        raise AssertedTopologyError(f"{name} needs one stage, and there are {stages} stages; call {instead}")


def is_pipeline_first_stage(ignore_virtual: bool = False) -> bool:
    """Whether the model begins on this rank, in the part that ``set_virtual_pipeline_model_parallel_rank`` has set.

    Args:
        ignore_virtual: ask about the rank, not about one of its parts.
    """
    part = parallel_state.get_virtual_pipeline_model_parallel_rank()
    return parallel_state.is_pipeline_first_stage(ignore_virtual, part)


def is_pipeline_last_stage(ignore_virtual: bool = False) -> bool:
    """Whether the model ends on this rank, in the part that was set; see ``is_pipeline_first_stage``."""
    part = parallel_state.get_virtual_pipeline_model_parallel_rank()
    return parallel_state.is_pipeline_last_stage(ignore_virtual, part)


def __getattr__(name: str) -> object:
    # The getters, the setters and Megatron's globals are those of parallel_state.
    return getattr(parallel_state, name)


offer(globals(), parallel_state, "destroy_tensor_model_parallel")
