"""The moves between layouts in ``mpu``, where the private functions also default to the ambient group."""

from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.megatron.core.parallel_state import resolve_tensor_model_parallel_group as _resolve
from shardwise.megatron.core.tensor_parallel import mappings
from shardwise.megatron.surface import offer


def _reduce(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return the sum of all ranks' tensors; the argument is not modified. None means the ambient group."""
    return mappings._reduce(input_, _resolve(group))


def _split(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return this rank's part of the last dimension. None means the ambient group."""
    return mappings._split_along_last_dim(input_, _resolve(group))


def _gather(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Concatenate all ranks' tensors along the last dimension. None means the ambient group."""
    return mappings._gather_along_last_dim(input_, _resolve(group))


class _AmbientGroup:
    """An autograd function of a tensor and a group, which defaults to the ambient group."""

    @classmethod
    def apply(cls, input_: Tensor, group: ProcessGroup | None = None, *args: Any) -> Any:
        return super().apply(input_, _resolve(group), *args)  # type: ignore[misc]  # The next class has it.

    @classmethod
    def symbolic(cls, graph: Any, input_: Tensor, group: ProcessGroup | None = None, *args: Any) -> Any:
        return super().symbolic(graph, input_, _resolve(group), *args)  # type: ignore[misc]


class _CopyToModelParallelRegion(_AmbientGroup, mappings._CopyToModelParallelRegion):
    """I -> R."""


class _ReduceFromModelParallelRegion(_AmbientGroup, mappings._ReduceFromModelParallelRegion):
    """P -> I."""


class _ScatterToModelParallelRegion(_AmbientGroup, mappings._ScatterToModelParallelRegion):
    """I -> V along the last dimension."""


class _GatherFromModelParallelRegion(_AmbientGroup, mappings._GatherFromModelParallelRegion):
    """V -> I along the last dimension."""


def __getattr__(name: str) -> Any:
    # The moves with autograd come from tensor_parallel.
    return getattr(mappings, name)


offer(globals(), mappings)
