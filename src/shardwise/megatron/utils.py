"""Small functions that programs written for Megatron import from its ``utils``.

Most live where they belong in this library and are only named here; what is defined here serves such programs alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from shardwise import parallel_state
from shardwise.communication.buffers import GlobalMemoryBuffer
from shardwise.communication.symmetric_memory import GlobalSymmetricMemoryBuffer
from shardwise.errors import AssertedShardingError, ShardingError
from shardwise.initialization import init_method_normal, scaled_init_method_normal
from shardwise.sharding import ParamLayout, ParamShard, ShardedOffset, divide, ensure_divisibility, is_copy_by
from shardwise.tensor_parallel.layers import drain_embedding_wgrad_compute

__all__ = [
    "GlobalMemoryBuffer",
    "GlobalSymmetricMemoryBuffer",
    "MakeViewlessTensor",
    "assert_viewless_tensor",
    "divide",
    "drain_embedding_wgrad_compute",
    "ensure_divisibility",
    "get_pg_rank",
    "get_pg_size",
    "get_pg_src_rank",
    "get_tensor_model_parallel_group_if_none",
    "init_method_normal",
    "is_te_min_version",
    "is_torch_min_version",
    "make_sharded_tensor_for_checkpoint",
    "make_tp_sharded_tensor_for_checkpoint",
    "make_viewless_tensor",
    "safely_set_viewless_tensor_data",
    "scaled_init_method_normal",
]

_T = TypeVar("_T")


def get_pg_size(group: ProcessGroup | None = None) -> int:
    """Number of ranks of ``group``; 1 for None or where ``torch.distributed`` is not initialised."""
    return 1 if group is None or not dist.is_initialized() else group.size()


def get_pg_rank(group: ProcessGroup | None = None) -> int:
    """This rank in ``group``; 0 for None or where ``torch.distributed`` is not initialised."""
    return 0 if group is None or not dist.is_initialized() else group.rank()


def get_pg_src_rank(group: ProcessGroup | None = None) -> int:
    """Global rank of the first rank of ``group``; 0 for None or where ``torch.distributed`` is not initialised."""
    return 0 if group is None or not dist.is_initialized() else dist.get_process_group_ranks(group)[0]


def is_torch_min_version(version: str, check_equality: bool = True) -> bool:
    """Whether this PyTorch is of ``version`` or a later one; a later one only, without ``check_equality``."""
    return torch.__version__ >= version if check_equality else torch.__version__ > version


def is_te_min_version(version: str, check_equality: bool = True) -> bool:
    """False: Transformer Engine is not used here, whatever is installed."""
    return False


def get_tensor_model_parallel_group_if_none(
    tp_group: ProcessGroup | None, is_expert: bool = False, check_initialized: bool = True
) -> ProcessGroup | None:
    """``tp_group``, or the ambient tensor-parallel group if None.

    Args:
        tp_group: a group, or None.
        is_expert: take the expert-tensor-parallel group.
        check_initialized: an error where there is none; otherwise None is returned.

    Raises:
        TopologyError: no group given and none initialised.
    """
    if tp_group is not None:
        return tp_group
    if is_expert:
        return parallel_state.get_expert_tensor_parallel_group(check_initialized)
    return parallel_state.get_tensor_model_parallel_group(check_initialized)


def make_tp_sharded_tensor_for_checkpoint(
    tensor: Tensor,
    key: str,
    tp_axis: int = 0,
    replica_id: Any = None,
    prepend_offsets: Sequence[ShardedOffset] = (),
    *,
    allow_shape_mismatch: bool = False,
    tp_group: ProcessGroup | None = None,
    dp_cp_group: ProcessGroup | None = None,
    sizes: Sequence[int] | None = None,
) -> ParamShard:
    """The checkpoint entry of a tensor that is split over the tensor-parallel group.

    Args:
        tensor: this rank's part; not copied.
        key: name in the checkpoint.
        tp_axis: dimension of ``tensor`` that is split.
        replica_id: accepted for programs that pass it; which copy is written follows from layout and rank.
        prepend_offsets: ``(axis, index, count)`` of leading axes that stack several tensors under one name.
        allow_shape_mismatch: on load the stored tensor may have another size along ``tp_axis``.
        tp_group: tensor-parallel group; the ambient one if None.
        dp_cp_group: the ranks that hold the same part, of which the first writes it; the planner chooses if None.
        sizes: every rank's size along ``tp_axis``; all as this rank's if None.

    Raises:
        TopologyError: no group given and none initialised.
        ShardingError: ``sizes`` do not have one entry per rank, or not this rank's.
    """
    group = parallel_state.resolve_tensor_model_parallel_group(tp_group)
    t, rank = group.size(), group.rank()
    axis = tp_axis % tensor.dim()
    sizes = (tensor.size(axis),) * t if sizes is None else tuple(sizes)
    if len(sizes) != t or sizes[rank] != tensor.size(axis):
        raise ShardingError(
            f"{key}: sizes {list(sizes)} do not fit {tensor.size(axis)} along dimension {axis} on rank {rank} of {t}"
        )
    shape = [*tensor.shape[:axis], sum(sizes), *tensor.shape[axis + 1 :]]
    layout = ParamLayout.split(shape, axis, t, sizes=sizes)
    is_copy = is_copy_by({"dp_cp_group": dp_cp_group})
    return ParamShard(key, tensor, layout, rank, tuple(prepend_offsets), allow_shape_mismatch, is_copy)


def make_sharded_tensor_for_checkpoint(
    tensor: Tensor,
    key: str,
    prepend_offsets: Sequence[ShardedOffset] = (),
    replica_id: Any = None,
    *,
    allow_shape_mismatch: bool = False,
    tp_group: ProcessGroup | None = None,
    dp_cp_group: ProcessGroup | None = None,
) -> ParamShard:
    """The checkpoint entry of a tensor that every rank of the tensor-parallel group holds whole; see above.

    Raises:
        TopologyError: no group given and none initialised.
    """
    group = parallel_state.resolve_tensor_model_parallel_group(tp_group)
    layout = ParamLayout.replicated(tensor.shape, group.size())
    is_copy = is_copy_by({"dp_cp_group": dp_cp_group})
    return ParamShard(key, tensor, layout, group.rank(), tuple(prepend_offsets), allow_shape_mismatch, is_copy)


class MakeViewlessTensor(Function):
    """The function behind ``make_viewless_tensor``: the same memory and gradient, but no view."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, requires_grad: bool) -> Tensor:
        return _same_memory(tensor, requires_grad)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return grad_output, None


def _same_memory(tensor: Tensor, requires_grad: bool) -> Tensor:
    result = torch.empty((1,), dtype=tensor.dtype, device=tensor.device, requires_grad=requires_grad)
    result.data = tensor.data
    return result


def make_viewless_tensor(inp: Tensor, requires_grad: bool, keep_graph: bool) -> Tensor:
    """A tensor that shares ``inp``'s memory and is no view, so that setting its ``data`` frees that memory.

    Args:
        inp: any tensor; returned as it is unless it is a view.
        requires_grad: of the result.
        keep_graph: gradients flow on to ``inp``.
    """
    if inp._base is None:
        return inp
    if keep_graph:
        viewless: Tensor = MakeViewlessTensor.apply(inp, requires_grad)
        return viewless
    return _same_memory(inp, requires_grad)


def assert_viewless_tensor(tensor: _T, extra_msg: str | None = None) -> _T:
    """Return ``tensor`` after checking that it is no view; the items of a list are checked, what is no tensor passes.

    Raises:
        AssertedShardingError: it is a view, whose memory would be kept by its base.
    """
    if isinstance(tensor, list):
        for item in tensor:
            assert_viewless_tensor(item, extra_msg)
    elif isinstance(tensor, Tensor) and tensor._base is not None:
        raise AssertedShardingError(
            f"a tensor of shape {list(tensor.shape)} is a view of one of shape {list(tensor._base.shape)}, which keeps "
            f"its memory; use make_viewless_tensor{'' if extra_msg is None else f'. {extra_msg}'}"
        )
    return tensor


def safely_set_viewless_tensor_data(tensor: Tensor, new_data_tensor: Tensor) -> None:
    """Set ``tensor.data``, in place, after checking that this frees the memory it has now.

    Raises:
        AssertedShardingError: ``tensor`` is a view.
    """
    assert_viewless_tensor(tensor, f"its data was to be replaced by shape {list(new_data_tensor.shape)}")
    tensor.data = new_data_tensor
