"""Megatron's functions of a linear layer with its communication, on ``shardwise.nn.linear``."""

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
from shardwise.nn.linear import LinearParallelism, TensorParallelLinear, tensor_parallel_linear
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
    """``input @ weight.T + bias``, the backward's communication overlapped with the weight gradient.

    Args:
        input: ``[s, b, i]``, or ``[s/t, b, i]`` with sequence parallelism; not modified.
        weight: ``[o/t, i]``.
        bias: ``[o/t]`` or None.
        gradient_accumulation_fusion: add the weight gradient to ``weight.main_grad`` instead of ``weight.grad``.
        allreduce_dgrad: sum the input gradient over the group.
        sequence_parallel: gather the input along the sequence, reduce-scatter its gradient.
        grad_output_buffer: keeps the output gradients whose weight gradient is deferred; the caller keeps the inputs,
            and ``drain_embedding_wgrad_compute`` computes the gradients. None defers none.
        wgrad_deferral_limit: how many are deferred; 0 is no limit.
        async_grad_allreduce: deprecated and not used.
        tp_group: tensor-parallel group; the ambient one if None. Not read where nothing is communicated.
        sequence_length: ``s``, where the ranks do not divide it; None if all hold as many positions.
        output_dtype: of the result, whose sums are not rounded to a narrower one; that of the input if None.

    Returns:
        ``[s, b, o/t]``.

    Raises:
        ConfigError: both ``allreduce_dgrad`` and ``sequence_parallel``; in the backward, a missing ``main_grad``.
        TopologyError: a group is needed, and neither given nor initialised.
    """
    _warn_deprecated(async_grad_allreduce)
    communication = _communication(allreduce_dgrad, sequence_parallel, tp_group)
    _warn_of_connections(input.device, communication[0])
    gradient = _weight_gradient(weight, gradient_accumulation_fusion, grad_output_buffer, wgrad_deferral_limit)
    options = _engine_options(communication, sequence_length, output_dtype)
    return tensor_parallel_linear(input, weight, bias, weight_gradient=gradient, **options)


# A program that sets it to True is not warned.
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
    """``input @ weight.T + bias`` with a weight that gets no gradient: no input is saved, no weight gradient computed.

    A bias that requires a gradient gets one.

    Args:
        input, bias, allreduce_dgrad, sequence_parallel, tp_group, async_grad_allreduce, sequence_length, output_dtype:
            as ``linear_with_grad_accumulation_and_async_allreduce``.
        weight: ``[o/t, i]``; gets no gradient even if it requires one.
        gradient_accumulation_fusion: not used; there is no weight gradient.
        grad_output_buffer, wgrad_deferral_limit: None, as no gradient is deferred.

    Returns:
        ``[s, b, o/t]``.

    Raises:
        ConfigError: both ``allreduce_dgrad`` and ``sequence_parallel``; a buffer or a limit, for a gradient that is not
            computed.
        TopologyError: a group is needed, and neither given nor initialised.
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
    """The engine's forward; ``how`` is the communication and, if there is one, the weight gradient."""
    # A context that a program made itself does not say which gradients are wanted.
    needs_input, needs_weight, needs_bias = getattr(ctx, "needs_input_grad", (True, True, bias is not None))[:3]
    ctx.needs_input_grad = needs_input, needs_weight and not frozen, needs_bias
    if torch.is_autocast_enabled(input.device.type):
        input, weight, bias = products.autocast(input, weight, bias)
    parallelism, group, gradient = how
    return TensorParallelLinear.forward(ctx, input, weight, bias, parallelism, group, None, gradient, Products(), False)


def _weight_gradient(
    weight: Tensor, fuse: bool, grad_output_buffer: list[Tensor] | None, limit: int | None
) -> WeightGradient | None:
    queues: tuple[WeightGradientQueue, ...] = ()
    if grad_output_buffer is not None:
        queues = (WeightGradientQueue(limit=limit or 0, grad_outputs=grad_output_buffer),)
    return WeightGradient(weight, fuse=fuse, queues=queues) if fuse or queues else None


def _sequence_view(length: int | None, group: ProcessGroup | None) -> SequenceView | None:
    """The engine's argument for Megatron's layers' ``sequence_length``."""
    return None if length is None else SequenceView(length, group)


def _warn_of_connections(device: torch.device, parallelism: LinearParallelism) -> None:
    """Say once per process that a GPU may begin a collective of the backward after the product that should hide it."""
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
        warnings.warn("async_grad_allreduce is deprecated and unused; use allreduce_dgrad", DeprecationWarning, 3)


def _communication(
    allreduce_dgrad: bool, sequence_parallel: bool, tp_group: ProcessGroup | None
) -> tuple[LinearParallelism, ProcessGroup | None]:
    """The communication of a column-parallel layer with these settings, and its group."""
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

    With sequence parallelism each input is gathered while the gradient before it is computed.

    Args:
        config: ``sequence_parallel`` if inputs are shards of the sequence; ``gradient_accumulation_fusion`` to add the
            gradient to ``weight.main_grad`` instead of ``weight.grad``.
        embedding_activation_buffer: the inputs, ``[s, b, i]`` or ``[s/t, b, i]``; emptied.
        grad_output_buffer: the output gradients, ``[s, b, o/t]``, in the same order; emptied.
        weight: the output layer's weight.
        tp_group: tensor-parallel group; the ambient one if None. Not read without sequence parallelism.

    Raises:
        ShardingError: the buffers are not of the same length.
        ConfigError: ``weight.main_grad`` is needed and missing.
        TopologyError: a group is needed, and neither given nor initialised.
    """
    gathers = config.sequence_parallel and grad_output_buffer
    group = resolve_tensor_model_parallel_group(tp_group) if gathers else None
    inputs, fuse = embedding_activation_buffer, config.gradient_accumulation_fusion
    compute_weight_gradients_(weight, inputs, grad_output_buffer, fuse=fuse, gather_group=group)


offer(globals())
