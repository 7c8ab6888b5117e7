"""``parallel_state`` in ``mpu``'s form: sizes have other names, and a stage's part is the one that was set last."""

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
        tensor_model_parallel_size_: number of ranks that split each layer. This and the next size are reduced to the
            world size, with a warning, if they exceed it.
        pipeline_model_parallel_size_: number of stages.
        virtual_pipeline_model_parallel_size_: number of interleaved parts of the model on each stage.

    Raises:
        NotInitializedError: ``torch.distributed`` is not initialised.
        TopologyError, ConfigError: as in ``parallel_state.initialize_model_parallel``.
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
    """Number of ranks that split each layer; an old name, from before pipelines.

    Raises:
        AssertedTopologyError: there are several pipeline stages.
    """
    _check_no_pipeline("get_model_parallel_world_size", "get_tensor_model_parallel_world_size")
    return parallel_state.get_tensor_model_parallel_world_size()


def get_model_parallel_rank() -> int:
    """This rank's index among the ranks that split each layer; an old name, from before pipelines.

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
    """True if the model begins on this rank, in the part set by ``set_virtual_pipeline_model_parallel_rank``.

    Args:
        ignore_virtual: whether to consider the rank instead of one of its parts.
    """
    part = parallel_state.get_virtual_pipeline_model_parallel_rank()
    return parallel_state.is_pipeline_first_stage(ignore_virtual, part)


def is_pipeline_last_stage(ignore_virtual: bool = False) -> bool:
    """True if the model ends on this rank, in the part that was set; see ``is_pipeline_first_stage``."""
    part = parallel_state.get_virtual_pipeline_model_parallel_rank()
    return parallel_state.is_pipeline_last_stage(ignore_virtual, part)


def __getattr__(name: str) -> object:
    # Getters, setters and Megatron's globals come from parallel_state.
    return getattr(parallel_state, name)


offer(globals(), parallel_state, "destroy_tensor_model_parallel")
