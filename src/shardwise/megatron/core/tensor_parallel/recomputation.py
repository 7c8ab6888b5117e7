"""Recomputation under the names that programs know; see ``shardwise.nn.recompute``.

``checkpoint`` recomputes what a function saved for backward; ``CheckpointWithoutOutput`` its outputs as well, for
functions whose outputs the next operation would save.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from shardwise.core.errors import ConfigError
from shardwise.megatron.core.parallel_state import resolve_tensor_model_parallel_group
from shardwise.megatron.core.tensor_parallel.utils import gather_split_1d_tensor, split_tensor_into_1d_equal_chunks
from shardwise.nn.recompute import OutputRecomputation, go_back, is_checkpointing, keep_arguments, recomputed

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


class _RestoreInBackward(Function):
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
    index, distribution = _distribution(args, tp_group)
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
    distribution.split_(args[index])
    return outputs


def _distribution(args: tuple[Any, ...], tp_group: ProcessGroup | None) -> tuple[int, _Distribution]:
    """Which of the arguments is distributed, and how."""
    index = next((i for i, arg in enumerate(args) if isinstance(arg, Tensor)), None)
    if index is None:
        raise ConfigError("distribute_saved_activations=True needs a tensor among the positional arguments")
    return index, _Distribution(args[index], resolve_tensor_model_parallel_group(tp_group))


class CheckpointFunction(Function):
    """Megatron's autograd function: ``checkpoint`` as one node, which ``torch.autograd.grad`` cannot go through.

    What ``run_function`` returns is a tensor or a tuple; gradients flow to tensors among its arguments.
    """

    @staticmethod
    def forward(
        ctx: Any, run_function: Callable[..., Any], distribute_saved_activations: bool | None, *args: Any
    ) -> Any:
        ctx.distribution = None
        if not distribute_saved_activations:
            return keep_arguments(ctx, run_function, args)
        index, ctx.distribution = _distribution(args, None)

        def run(*given: Any) -> Any:
            # An alias, so that the function may return its argument: what it returns is not split.
            return run_function(*given[:index], given[index].view_as(given[index]), *given[index + 1 :])

        outputs = keep_arguments(ctx, run, args)
        ctx.distribution.split_(args[index])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        if ctx.distribution is not None:
            ctx.distribution.restore_(ctx.saved_tensors[0])
        return None, None, *go_back(ctx, grad_outputs)


class CheckpointWithoutOutput(OutputRecomputation):
    """``OutputRecomputation`` under Megatron's name.

    ::

        checkpoint = CheckpointWithoutOutput()
        hidden = checkpoint.checkpoint(norm, x)
        y = linear(hidden)
        checkpoint.discard_output_and_register_recompute(y)   # hidden's storage is free from here to y's gradient

    Args:
        fp8: not offered.

    Attributes:
        ctx: the node of the call in autograd's graph, from the call until its outputs are there again; then None.
        outputs: what the call returned, as a tuple, for as long.
        rng_states: the random states in which the call began and is repeated, as ``_get_all_rng_states`` has them; for
            as long. Not to be written to.

    Raises:
        ConfigError: ``fp8``.
    """

    def __init__(self, fp8: bool = False) -> None:
        if fp8:
            raise ConfigError(f"CheckpointWithoutOutput(fp8={fp8!r}): fp8 recomputation is not offered; pass False")
        super().__init__()
        self.fp8 = False
        self.ctx: Any = None
        self.outputs: tuple[Any, ...] | None = None
        self.rng_states: tuple[Any, ...] | None = None
        self._latest: Any = None

    def checkpoint(self, run_function: Callable[..., Any], *args: Any) -> Any:
        """``OutputRecomputation.run``."""
        return self.run(run_function, *args)

    def discard_output_and_register_recompute(self, hook_tensor: Tensor) -> None:
        """``OutputRecomputation.discard_``."""
        self.discard_(hook_tensor)

    def _recompute(self, _: Any) -> None:
        """Call the function of the latest call again, into the storages of its outputs; a second time nothing happens.

        It is what the hook tensor's gradient sets off.
        """
        if self._latest is not None:
            self._latest.recompute(_)

    def _begin(self, held: Any, outputs: Any, args: tuple[Any, ...]) -> None:
        super()._begin(held, outputs, args)
        self._latest, self.ctx, self.rng_states = held, held.node, held.first.parts()
        self.outputs = outputs if isinstance(outputs, tuple) else (outputs,)

    def _end(self, held: Any) -> None:
        if held is self._latest:
            self._latest = self.ctx = self.outputs = self.rng_states = None


class CheckpointWithoutOutputFunction(Function):
    """Megatron's autograd function: ``CheckpointWithoutOutput.checkpoint`` as one node; see ``CheckpointFunction``."""

    @staticmethod
    def forward(
        ctx: Any, run_function: Callable[..., Any], checkpoint_without_output_obj: CheckpointWithoutOutput, *args: Any
    ) -> Any:
        return checkpoint_without_output_obj.run_in_function(ctx, run_function, *args)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return None, None, *go_back(ctx, grad_outputs)
