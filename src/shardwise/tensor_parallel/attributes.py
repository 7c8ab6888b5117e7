"""The attributes by which programs written for Megatron know how a parameter is split."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise import parallel_state
from shardwise.core.errors import AssertedConfigError
from shardwise.core.sharding import ParamLayout, Replicas
from shardwise.nn.module import set_replicas_

# Imported by programs in spite of the underscore.
_MODEL_PARALLEL_ATTRIBUTE_DEFAULTS: dict[str, Any] = {
    "expert_tp": False,
    "is_qkv": False,
    "qkv_split_shapes": None,
    "tensor_model_parallel": False,
    "partition_dim": -1,
    "partition_stride": 1,
}


def set_tensor_model_parallel_attributes(tensor: Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Mark how a parameter is split.

    Args:
        tensor: the parameter; gets ``tensor_model_parallel``, ``partition_dim`` and ``partition_stride``.
        is_parallel: whether it is split; False for a parameter that every rank holds whole.
        dim: dimension that is split.
        stride: number of sections split by themselves.

    Raises:
        AssertedConfigError: the tensor is marked already; nothing is changed.
    """
    for name in _MODEL_PARALLEL_ATTRIBUTE_DEFAULTS:
        if hasattr(tensor, name):
            raise AssertedConfigError(
                f"the tensor of shape {list(tensor.shape)} is already marked {name}={getattr(tensor, name)}; mark it "
                "once, and delete the attribute first if it is wrong"
            )
    _mark(tensor, is_parallel, dim, stride)


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: Tensor) -> None:
    """Mark a tensor as one that every rank holds whole, where it is not marked yet."""
    for name, value in _MODEL_PARALLEL_ATTRIBUTE_DEFAULTS.items():
        if not hasattr(tensor, name):
            setattr(tensor, name, value)


def copy_tensor_model_parallel_attributes(destination_tensor: Tensor, source_tensor: Tensor) -> None:
    """Give ``destination_tensor`` the marks of ``source_tensor``, those that it has."""
    for name in _MODEL_PARALLEL_ATTRIBUTE_DEFAULTS:
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))


def param_is_not_tensor_parallel_duplicate(param: Tensor, tp_group: ProcessGroup | None = None) -> bool:
    """Whether this rank is the one that counts ``param`` in a sum over the tensor-parallel group, such as a norm.

    Args:
        param: a parameter; one without marks is held whole by every rank.
        tp_group: tensor-parallel group; the ambient one if None.

    Returns:
        True for a part of a split parameter, and on the first rank for a whole one.

    Raises:
        TopologyError: it matters which rank this is, no group was given and none initialised.
    """
    if getattr(param, "tensor_model_parallel", False):
        return True
    rank = parallel_state.get_tensor_model_parallel_rank() if tp_group is None else tp_group.rank()
    return rank == 0


def mark_parameter(param: Tensor, layout: ParamLayout) -> None:
    """Mark a parameter by its layout, whatever its marks were: as when a layer is given initial values again."""
    _mark(param, layout.dim is not None, -1 if layout.dim is None else layout.dim, layout.stride)


def mark_replicas(module: nn.Module) -> None:
    """Mark the parameters of a module, and of those in it, by the replicas that are stated of them."""
    for owner in module.modules():
        for name, replicas in getattr(owner, "param_replicas", {}).items():
            param: Any = getattr(owner, name)
            if param is not None:
                param.sequence_parallel = "tp" in replicas.summed_over
                if "embd" in replicas.summed_over:
                    param.shared_embedding = True
                if replicas.is_copy:
                    param.shared = True


def adopt_marks_(module: nn.Module) -> None:
    """State replicas by the marks that a program has set on parameters of a module, and of those in it.

    What is not marked stays as it was stated.
    """
    for owner in module.modules():
        layouts: dict[str, ParamLayout] = getattr(owner, "param_layouts", {})
        for name, param in owner.named_parameters(recurse=False):
            old: Replicas = getattr(owner, "param_replicas", {}).get(name, Replicas())
            is_split = name in layouts and layouts[name].dim is not None
            differs_over_tp = getattr(param, "tensor_model_parallel", "tp" not in old.same_over) and not is_split
            is_tied = getattr(param, "shared_embedding", "embd" in old.summed_over)
            same = {"tp": not differs_over_tp, "dp": True, "embd": is_tied}
            summed = {"tp": getattr(param, "sequence_parallel", "tp" in old.summed_over), "embd": is_tied}
            if not getattr(param, "allreduce", bool(old.same_over)):
                same = {}
            is_copy = bool(getattr(param, "shared", old.is_copy))
            new = Replicas(tuple(filter(same.get, same)), tuple(filter(summed.get, summed)), is_copy)
            if new != old:
                set_replicas_(owner, new, name)


def _mark(tensor: Any, is_parallel: bool, dim: int, stride: int) -> None:
    tensor.tensor_model_parallel, tensor.partition_dim, tensor.partition_stride = is_parallel, dim, stride
