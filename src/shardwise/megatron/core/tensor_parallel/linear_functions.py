"""Megatron's functions of a linear layer and its communication, based on ``shardwise.nn.linear``."""

import os
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from shardwise.core.sequence_view import SequenceView
from shardwise.kernels import products
from shardwise.kernels.products import Products, ProductsIn
from shardwise.megatron.core.parallel_state import resolve_tensor_model_parallel_group
from shardwise.megatron.core.transformer.transformer_config import ModelParallelConfig
from shardwise.megatron.errors import AssertedConfigError, AssertedShardingError, asserting
from shardwise.megatron.surface import offer
from shardwise.nn.linear import LinearParallelism, LinearPlan, TensorParallelLinear, tensor_parallel_linear
from shardwise.nn.weight_gradient import WeightGradient, WeightGradientQueue, compute_weight_gradients_


def linear_with_grad_accumulation_and_async_allreduce(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    grad_output_buffer: list[Tensor] | None = None,
    wgrad_deferral_limit: int | None = 0,
    async_grad_allreduce: bool | None = None,
    tp_group: ProcessGroup | None = None,
    *,
    sequence_length: int | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute ``input @ weight.T + bias``; the backward overlaps communication with the weight gradient.

    Args:
        input: ``[s, b, i]``, or ``[s/t, b, i]`` with sequence parallelism; not modified.
        weight: ``[o/t, i]``.
        bias: ``[o/t]`` or None.
        gradient_accumulation_fusion: whether to add the weight gradient to ``weight.main_grad``, not ``weight.grad``.
        allreduce_dgrad: whether to sum the input gradient over the group.
        sequence_parallel: whether to gather the input along the sequence and reduce-scatter its gradient.
        grad_output_buffer: buffer of the output gradients whose weight gradient is deferred; the caller keeps the
            inputs, and ``drain_embedding_wgrad_compute`` computes the gradients. None defers nothing.
        wgrad_deferral_limit: maximum number of deferred gradients; 0 means no limit.
        async_grad_allreduce: deprecated, no effect.
        tp_group: tensor-parallel group; the ambient one if None. Not needed without communication.
        sequence_length: ``s``, if the ranks do not divide it; None if all hold the same number of positions.
        output_dtype: dtype of the result, without rounding to a narrower dtype before; None means the input's dtype.

    Returns:
        ``[s, b, o/t]``.

    Raises:
        ConfigError: both ``allreduce_dgrad`` and ``sequence_parallel``; in the backward, a missing ``main_grad``.
        TopologyError: a group is needed, but none is given or initialised.
    """
    _warn_deprecated(async_grad_allreduce)
    communication = _communication(allreduce_dgrad, sequence_parallel, tp_group)
    _warn_of_connections(input.device, communication[0])
    gradient = _weight_gradient(weight, gradient_accumulation_fusion, grad_output_buffer, wgrad_deferral_limit)
    options = _engine_options(communication, sequence_length, output_dtype)
    return tensor_parallel_linear(input, weight, bias, weight_gradient=gradient, **options)


# A program can set this to True to suppress the warning.
linear_with_grad_accumulation_and_async_allreduce.__dict__["warned"] = False


def linear_with_frozen_weight(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: ProcessGroup | None,
    grad_output_buffer: list[Tensor] | None = None,
    wgrad_deferral_limit: int | None = None,
    async_grad_allreduce: bool | None = None,
    *,
    sequence_length: int | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute ``input @ weight.T + bias`` without a weight gradient, and therefore without saving the input.

    A bias that requires a gradient gets one.

    Args:
        input, bias, allreduce_dgrad, sequence_parallel, tp_group, async_grad_allreduce, sequence_length, output_dtype:
            as in ``linear_with_grad_accumulation_and_async_allreduce``.
        weight: ``[o/t, i]``; gets no gradient even if it requires one.
        gradient_accumulation_fusion: no effect, because there is no weight gradient.
        grad_output_buffer, wgrad_deferral_limit: None, because no gradient is deferred.

    Returns:
        ``[s, b, o/t]``.

    Raises:
        ConfigError: both ``allreduce_dgrad`` and ``sequence_parallel``; or a buffer or a limit is given.
        TopologyError: a group is needed, but none is given or initialised.
    """
    _warn_deprecated(async_grad_allreduce)
    if grad_output_buffer is not None or wgrad_deferral_limit is not None:
        raise AssertedConfigError(
            "a frozen weight has no gradient that could be put off; leave grad_output_buffer and wgrad_deferral_limit "
            "None, or call linear_with_grad_accumulation_and_async_allreduce"
        )
    communication = _communication(allreduce_dgrad, sequence_parallel, tp_group)
    options = _engine_options(communication, sequence_length, output_dtype)
    return tensor_parallel_linear(input, weight.detach(), bias, **options)


def _engine_options(
    communication: tuple[LinearParallelism, ProcessGroup | None], length: int | None, dtype: torch.dtype | None
) -> dict[str, Any]:
    parallelism, group = communication
    products, sequence = Products() if dtype is None else ProductsIn(dtype), _sequence_view(length, group)
    return {"parallelism": parallelism, "group": group, "sequence": sequence, "products": products}


class LinearWithGradAccumulationAndAsyncCommunication(Function):
    """Megatron's autograd function of ``linear_with_grad_accumulation_and_async_allreduce``."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        grad_output_buffer: list[Tensor] | None,
        wgrad_deferral_limit: int | None,
        tp_group: ProcessGroup | None,
    ) -> Tensor:
        gradient = _weight_gradient(weight, gradient_accumulation_fusion, grad_output_buffer, wgrad_deferral_limit)
        communication = _communication(allreduce_dgrad, sequence_parallel, tp_group)
        return _forward(ctx, input, weight, bias, False, *communication, gradient)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return *TensorParallelLinear.backward(ctx, grad_output)[:3], *(None,) * 6


class LinearWithFrozenWeight(Function):
    """Megatron's autograd function of ``linear_with_frozen_weight``."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        allreduce_dgrad: bool,
        tp_group: ProcessGroup | None,
    ) -> Tensor:
        return _forward(ctx, input, weight, bias, True, *_communication(allreduce_dgrad, False, tp_group), None)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return *TensorParallelLinear.backward(ctx, grad_output)[:3], None, None


def _forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, frozen: bool, *how: Any) -> Tensor:
    """Run the engine's forward; ``how`` has the parallelism, the group and the weight gradient or None."""
    # A context that a program made lacks ``needs_input_grad``.
    needs_input, needs_weight, needs_bias = getattr(ctx, "needs_input_grad", (True, True, bias is not None))[:3]
    ctx.needs_input_grad = needs_input, needs_weight and not frozen, needs_bias
    if torch.is_autocast_enabled(input.device.type):
        input, weight, bias = products.autocast(input, weight, bias)
    parallelism, group, gradient = how
    return TensorParallelLinear.forward(ctx, input, weight, bias, LinearPlan(parallelism, group), None, gradient)


def _weight_gradient(
    weight: Tensor, fuse: bool, grad_output_buffer: list[Tensor] | None, limit: int | None
) -> WeightGradient | None:
    queues: tuple[WeightGradientQueue, ...] = ()
    if grad_output_buffer is not None:
        queues = (WeightGradientQueue(limit=limit or 0, grad_outputs=grad_output_buffer),)
    return WeightGradient(weight, fuse=fuse, queues=queues) if fuse or queues else None


def _sequence_view(length: int | None, group: ProcessGroup | None) -> SequenceView | None:
    """Convert the ``sequence_length`` of Megatron's layers to the engine's argument."""
    return None if length is None else SequenceView(length, group)


def _warn_of_connections(device: torch.device, parallelism: LinearParallelism) -> None:
    """Warn once per process if a GPU may start a collective of the backward after the product that should hide it."""
    if parallelism not in (LinearParallelism.COLUMN, LinearParallelism.COLUMN_SEQUENCE) or device.type != "cuda":
        return
    function = linear_with_grad_accumulation_and_async_allreduce.__dict__
    if not function["warned"] and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1":
        function["warned"] = True
        warnings.warn(
            "CUDA_DEVICE_MAX_CONNECTIONS is not 1, so the GPU may begin the collectives of a linear layer's backward "
            "after the products that should hide them; set it to 1 before the program starts",
            stacklevel=3,
        )


def _warn_deprecated(async_grad_allreduce: Any) -> None:
    if async_grad_allreduce is not None:
        warnings.warn("async_grad_allreduce is deprecated and unused; use allreduce_dgrad", UserWarning, 3)


def _communication(
    allreduce_dgrad: bool, sequence_parallel: bool, tp_group: ProcessGroup | None
) -> tuple[LinearParallelism, ProcessGroup | None]:
    """Return the parallelism of a column-parallel layer with these settings, and its group."""
    if allreduce_dgrad and sequence_parallel:
        raise AssertedConfigError(
            "allreduce_dgrad and sequence_parallel are both set; with sequence parallelism the input gradient is "
            "reduce-scattered, so set allreduce_dgrad=False"
        )
    if not (allreduce_dgrad or sequence_parallel):
        return LinearParallelism.LOCAL, tp_group
    group = resolve_tensor_model_parallel_group(tp_group)
    if group.size() == 1:
        return LinearParallelism.LOCAL, group
    return LinearParallelism.COLUMN_SEQUENCE if sequence_parallel else LinearParallelism.COLUMN, group


@asserting(AssertedShardingError)
def drain_embedding_wgrad_compute(
    config: ModelParallelConfig,
    embedding_activation_buffer: list[Tensor],
    grad_output_buffer: list[Tensor],
    weight: Tensor,
    tp_group: ProcessGroup | None = None,
) -> None:
    """Compute the deferred weight gradients of an output layer, and empty its buffers.

    With sequence parallelism, gathering an input overlaps with computing the previous gradient.

    Args:
        config: ``sequence_parallel`` if inputs are shards of the sequence; ``gradient_accumulation_fusion`` to add the
            gradient to ``weight.main_grad`` instead of ``weight.grad``.
        embedding_activation_buffer: inputs, ``[s, b, i]`` or ``[s/t, b, i]``; emptied.
        grad_output_buffer: output gradients, ``[s, b, o/t]``, in the same order; emptied.
        weight: weight of the output layer.
        tp_group: tensor-parallel group; the ambient one if None. Not needed without sequence parallelism.

    Raises:
        ShardingError: the buffers have different lengths.
        ConfigError: ``weight.main_grad`` is needed but missing.
        TopologyError: a group is needed, but none is given or initialised.
    """
    gathers = config.sequence_parallel and grad_output_buffer
    group = resolve_tensor_model_parallel_group(tp_group) if gathers else None
    inputs, fuse = embedding_activation_buffer, config.gradient_accumulation_fusion
    compute_weight_gradients_(weight, inputs, grad_output_buffer, fuse=fuse, gather_group=group)


offer(globals())
