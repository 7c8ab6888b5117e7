"""The linear with its communication under the names, and in the argument orders, that programs know.

One implementation stands behind them: ``shardwise.tensor_parallel.linear``.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.errors import AssertedConfigError
from shardwise.layers.linear import LinearParallelism, tensor_parallel_linear
from shardwise.layers.weight_gradient import WeightGradient, WeightGradientQueue, compute_weight_gradients_
from shardwise.megatron.config import ModelParallelConfig
from shardwise.parallel_state import resolve_tensor_model_parallel_group


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
) -> Tensor:
    """``input @ weight.T + bias``, the backward's communication overlapped with the weight gradient.

    Args:
        input: ``[s, b, i]``, or ``[s/t, b, i]`` with sequence parallelism; not modified.
        weight: ``[o/t, i]``.
        bias: ``[o/t]`` or None.
        gradient_accumulation_fusion: add the weight gradient to ``weight.main_grad`` in place of ``weight.grad``.
        allreduce_dgrad: sum the input gradient over the group.
        sequence_parallel: gather the input along the sequence, reduce-scatter its gradient.
        grad_output_buffer: where output gradients are kept whose weight gradient is put off; the caller keeps the
            inputs, and ``drain_embedding_wgrad_compute`` computes them. None puts none off.
        wgrad_deferral_limit: how many are put off; 0 is no limit.
        async_grad_allreduce: deprecated and not used.
        tp_group: tensor-parallel group; the ambient one if None. Not looked at where nothing is communicated.
        sequence_length: ``s``, where the ranks do not divide it; None if all hold as many positions.

    Returns:
        ``[s, b, o/t]``.

    Raises:
        ConfigError: both ``allreduce_dgrad`` and ``sequence_parallel``; in the backward, a missing ``main_grad``.
        TopologyError: a group is needed, and neither given nor initialised.
    """
    _warn_deprecated(async_grad_allreduce)
    parallelism = _parallelism(allreduce_dgrad, sequence_parallel)
    weight_gradient: WeightGradient | None = None
    if gradient_accumulation_fusion or grad_output_buffer is not None:
        weight_gradient = WeightGradient(
            weight,
            fuse=gradient_accumulation_fusion,
            queues=()
            if grad_output_buffer is None
            else (WeightGradientQueue(limit=wgrad_deferral_limit or 0, grad_outputs=grad_output_buffer),),
        )
    return tensor_parallel_linear(
        input,
        weight,
        bias,
        parallelism=parallelism,
        group=_group(parallelism, tp_group),
        sequence_length=sequence_length,
        weight_gradient=weight_gradient,
    )


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
) -> Tensor:
    """``input @ weight.T + bias`` with a weight that gets no gradient: no input is saved, no weight gradient computed.

    A bias that requires a gradient gets one.

    Args:
        input: ``[s, b, i]``, or ``[s/t, b, i]`` with sequence parallelism; not modified.
        weight: ``[o/t, i]``; gets no gradient even if it requires one.
        bias: ``[o/t]`` or None.
        gradient_accumulation_fusion: not used; there is no weight gradient.
        allreduce_dgrad: sum the input gradient over the group.
        sequence_parallel: gather the input along the sequence, reduce-scatter its gradient.
        tp_group: tensor-parallel group; the ambient one if None. Not looked at where nothing is communicated.
        grad_output_buffer: not used.
        wgrad_deferral_limit: not used.
        async_grad_allreduce: deprecated and not used.
        sequence_length: ``s``, where the ranks do not divide it; None if all hold as many positions.

    Returns:
        ``[s, b, o/t]``.

    Raises:
        ConfigError: both ``allreduce_dgrad`` and ``sequence_parallel``.
        TopologyError: a group is needed, and neither given nor initialised.
    """
    _warn_deprecated(async_grad_allreduce)
    parallelism = _parallelism(allreduce_dgrad, sequence_parallel)
    return tensor_parallel_linear(
        input,
        weight.detach(),
        bias,
        parallelism=parallelism,
        group=_group(parallelism, tp_group),
        sequence_length=sequence_length,
    )


class LinearWithGradAccumulationAndAsyncCommunication:
    """The autograd function of that name, for programs that call its ``apply``."""

    @staticmethod
    def apply(
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
        """As ``linear_with_grad_accumulation_and_async_allreduce``."""
        return linear_with_grad_accumulation_and_async_allreduce(
            input,
            weight,
            bias,
            gradient_accumulation_fusion,
            allreduce_dgrad,
            sequence_parallel,
            grad_output_buffer,
            wgrad_deferral_limit,
            tp_group=tp_group,
        )


class LinearWithFrozenWeight:
    """The autograd function of that name, for programs that call its ``apply``."""

    @staticmethod
    def apply(
        input: Tensor, weight: Tensor, bias: Tensor | None, allreduce_dgrad: bool, tp_group: ProcessGroup | None
    ) -> Tensor:
        """As ``linear_with_frozen_weight``, of a whole input."""
        return linear_with_frozen_weight(input, weight, bias, False, allreduce_dgrad, False, tp_group)


def _warn_deprecated(async_grad_allreduce: Any) -> None:
    if async_grad_allreduce is not None:
        warnings.warn(
            "async_grad_allreduce is deprecated and changes nothing; use allreduce_dgrad",
            DeprecationWarning,
            stacklevel=3,
        )


def _parallelism(allreduce_dgrad: bool, sequence_parallel: bool) -> LinearParallelism:
    if allreduce_dgrad and sequence_parallel:
        raise AssertedConfigError(
            "allreduce_dgrad and sequence_parallel are both set; with sequence parallelism the input gradient is "
            "reduce-scattered, so set allreduce_dgrad=False"
        )
    if sequence_parallel:
        return LinearParallelism.COLUMN_SEQUENCE
    return LinearParallelism.COLUMN if allreduce_dgrad else LinearParallelism.LOCAL


def _group(parallelism: LinearParallelism, tp_group: ProcessGroup | None) -> ProcessGroup | None:
    if parallelism is LinearParallelism.LOCAL:
        return tp_group
    return resolve_tensor_model_parallel_group(tp_group)


def drain_embedding_wgrad_compute(
    config: ModelParallelConfig,
    embedding_activation_buffer: list[Tensor],
    grad_output_buffer: list[Tensor],
    weight: Tensor,
    tp_group: ProcessGroup | None = None,
) -> None:
    """Compute the weight gradients that an output layer put off, and empty its buffers.

    With sequence parallelism each input is gathered while the gradient before it is computed.

    Args:
        config: says whether inputs are shards of the sequence (``sequence_parallel``) and where the gradient goes: into
            ``weight.main_grad`` with ``gradient_accumulation_fusion``, else into ``weight.grad``.
        embedding_activation_buffer: the inputs, ``[s, b, i]`` or ``[s/t, b, i]``; emptied.
        grad_output_buffer: the output gradients, ``[s, b, o/t]``, in the same order; emptied.
        weight: the output layer's weight.
        tp_group: tensor-parallel group; the ambient one if None. Not looked at without sequence parallelism.

    Raises:
        ShardingError: the buffers are not of the same length.
        ConfigError: ``weight.main_grad`` is needed and missing.
        TopologyError: a group is needed, and neither given nor initialised.
    """
    gathers = config.sequence_parallel and grad_output_buffer
    compute_weight_gradients_(
        weight,
        embedding_activation_buffer,
        grad_output_buffer,
        fuse=config.gradient_accumulation_fusion,
        gather_group=resolve_tensor_model_parallel_group(tp_group) if gathers else None,
    )
