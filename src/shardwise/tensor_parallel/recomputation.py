"""Recomputation under the names that programs know; see ``shardwise.recompute``.

``checkpoint`` recomputes what a function saved for backward; ``CheckpointWithoutOutput`` its outputs as well, for
functions whose outputs the next operation would save.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.errors import ConfigError
from shardwise.parallel_state import resolve_tensor_model_parallel_group
from shardwise.recompute import OutputRecomputation, is_checkpointing, recomputed
from shardwise.tensor_parallel.utils import gather_split_1d_tensor, split_tensor_into_1d_equal_chunks

__all__ = ["CheckpointFunction", "CheckpointWithoutOutput", "CheckpointWithoutOutputFunction", "checkpoint"]


class _Distribution:
    """How a tensor is swapped between the whole and this rank's chunk of it. It does not hold the tensor."""

    def __init__(self, tensor: Tensor, group: ProcessGroup) -> None:
        if tensor._is_view():
            raise ConfigError(
                f"checkpoint(distribute_saved_activations=True): the first tensor, of shape {list(tensor.shape)}, is a "
                "view, so that splitting it frees nothing; pass a tensor of its own, say x.clone()"
            )
        self.group = group
        self.shape, self.stride, self.numel = tensor.shape, tensor.stride(), tensor.numel()
        # Where splitting makes nothing smaller (one rank, one element) each rank keeps all of it, only flat.
        self.is_split = -(-self.numel // group.size()) < self.numel

    def split_(self, tensor: Tensor) -> None:
        data = tensor.data
        if self.is_split:
            data = split_tensor_into_1d_equal_chunks(data, new_buffer=True, tp_group=self.group)
        tensor.data = data.reshape(-1)

    def restore_(self, tensor: Tensor) -> None:
        """Make the tensor, or what was saved of it, whole again if it is not."""
        if tensor.shape == self.shape:
            return
        flat = tensor.data
        if tensor.numel() < self.numel:
            flat = gather_split_1d_tensor(flat, self.group, numel=self.numel)
        whole = flat.view(self.shape)
        if whole.stride() != self.stride:
            # Bit-equal results need the layout of the first forward.
            whole = torch.empty_strided(self.shape, self.stride, dtype=flat.dtype, device=flat.device).copy_(whole)
        tensor.data = whole


class _RestoreInBackward(torch.autograd.Function):
    """Identity, whose backward makes the caller's tensor whole again, for functions that save nothing."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, distribution: _Distribution) -> Tensor:
        ctx.tensor = input_
        ctx.distribution = distribution
        return input_.view_as(input_)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        # Once, and then let go of it: the node lives as long as the function's output.
        tensor, ctx.tensor = ctx.tensor, None
        if tensor is not None:
            ctx.distribution.restore_(tensor)
        return grad_output, None


def checkpoint(
    function: Callable[..., Any],
    distribute_saved_activations: bool | None,
    *args: Any,
    tp_group: ProcessGroup | None = None,
    **kwargs: Any,
) -> Any:
    """Call ``function``, keep its arguments only, and call it again in backward.

    Arguments and outputs may be of any kind, ``torch.autograd.grad`` works, and the recomputation draws the random
    numbers of the first call, whether it then ends or raises.

    Args:
        function: must compute the same both times.
        distribute_saved_activations: keep of the first tensor among ``args`` this rank's part only. **The caller's
            tensor is changed**: afterwards it is the flat chunk, and its full storage is free; backward gathers it
            again (one all-gather of its size) and leaves it whole. It must be the same on every rank.
        args: its positional arguments.
        tp_group: tensor-parallel group, for ``distribute_saved_activations``; the ambient one if None.
        kwargs: its keyword arguments.

    Returns:
        What ``function`` returns.

    Raises:
        ConfigError: ``distribute_saved_activations`` with no tensor among ``args``, with a first one that is a view, or
            under ``torch.compile``.
        TopologyError: ``distribute_saved_activations``, no group given and none initialised.
    """
    if not distribute_saved_activations:
        return recomputed(function, *args, **kwargs)
    if torch.compiler.is_compiling():
        raise ConfigError("distribute_saved_activations=True cannot be compiled; pass False under torch.compile")
    index = next((i for i, arg in enumerate(args) if isinstance(arg, Tensor)), None)
    if index is None:
        raise ConfigError("distribute_saved_activations=True needs a tensor among the positional arguments")
    tensor = args[index]
    distribution = _Distribution(tensor, resolve_tensor_model_parallel_group(tp_group))
    # Inside an outer checkpointed function this tensor is dropped, and its recomputation makes a new one.
    is_kept = not is_checkpointing()

    def run(*given: Any, **keywords: Any) -> Any:
        first = given[index]
        distribution.restore_(first)
        # An alias, so that the function may return its argument: what it returns is not split.
        if first.requires_grad and is_kept:
            first = _RestoreInBackward.apply(first, distribution)
        else:
            first = first.view_as(first)
        return function(*given[:index], first, *given[index + 1 :], **keywords)

    outputs = recomputed(run, *args, **kwargs)
    distribution.split_(tensor)
    return outputs


class CheckpointFunction:
    """``checkpoint`` under the name of Megatron's autograd function."""

    @staticmethod
    def apply(function: Callable[..., Any], distribute_saved_activations: bool | None, *args: Any) -> Any:
        """``checkpoint(function, distribute_saved_activations, *args)``."""
        return checkpoint(function, distribute_saved_activations, *args)


class CheckpointWithoutOutput(OutputRecomputation):
    """``OutputRecomputation`` under Megatron's name.

    ::

        checkpoint = CheckpointWithoutOutput()
        hidden = checkpoint.checkpoint(norm, x)
        y = linear(hidden)
        checkpoint.discard_output_and_register_recompute(y)   # hidden's storage is free from here to y's gradient

    Args:
        fp8: not offered.

    Raises:
        ConfigError: ``fp8``.
    """

    def __init__(self, fp8: bool = False) -> None:
        if fp8:
            raise ConfigError(f"CheckpointWithoutOutput(fp8={fp8!r}): fp8 recomputation is not offered; pass False")
        super().__init__()

    def checkpoint(self, run_function: Callable[..., Any], *args: Any) -> Any:
        """``OutputRecomputation.run``."""
        return self.run(run_function, *args)

    def discard_output_and_register_recompute(self, hook_tensor: Tensor) -> None:
        """``OutputRecomputation.discard_``."""
        self.discard_(hook_tensor)


class CheckpointWithoutOutputFunction:
    """``CheckpointWithoutOutput.checkpoint`` under the name of Megatron's autograd function."""

    @staticmethod
    def apply(
        run_function: Callable[..., Any], checkpoint_without_output_obj: CheckpointWithoutOutput, *args: Any
    ) -> Any:
        """``checkpoint_without_output_obj.checkpoint(run_function, *args)``."""
        return checkpoint_without_output_obj.checkpoint(run_function, *args)
