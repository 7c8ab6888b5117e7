"""Megatron's activations and ``jit``: functions of tensors, which PyTorch computes on any device."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.nn.functional as F
from torch import Tensor

from shardwise.core.errors import ConfigError
from shardwise.kernels import elementwise
from shardwise.megatron.surface import offer

_F = TypeVar("_F", bound=Callable[..., Any])


def noop_decorator(func: _F) -> _F:
    """Return ``func``."""
    return func


# A function that the engine's kernels do not fuse runs as it is written; a program may compile its step.
jit_fuser = noop_decorator


def enable_jit_fuser() -> None:
    """Do nothing: ``jit_fuser`` returns functions as they are."""


def disable_jit_fuser() -> None:
    """Do nothing: ``jit_fuser`` returns functions as they are."""


def squared_relu(x: Tensor) -> Tensor:
    """Return ``relu(x)**2``."""
    return F.relu(x).square()


def quick_gelu(x: Tensor) -> Tensor:
    """Return ``x * sigmoid(1.702 x)``."""
    return x * (1.702 * x).sigmoid()


def fast_gelu(x: Tensor) -> Tensor:
    """Return GELU with the tanh approximation."""
    return F.gelu(x, approximate="tanh")


def bias_gelu(bias: Tensor, y: Tensor) -> Tensor:
    """Return GELU of ``y + bias`` with the tanh approximation."""
    return fast_gelu(y + bias)


def bias_gelu_impl(input: Tensor, bias: Tensor) -> Tensor:
    """Return GELU of ``input + bias`` with the tanh approximation."""
    return fast_gelu(input + bias)


def swiglu(y: Tensor) -> Tensor:
    """Return ``silu(a) * b`` of the halves ``a`` and ``b`` of the last dimension."""
    return elementwise.swiglu(y)


def bias_swiglu(y: Tensor, bias: Tensor) -> Tensor:
    """Return ``swiglu(y + bias)``."""
    return elementwise.swiglu(y + bias)


def bias_swiglu_impl(
    input: Tensor, bias: Tensor | None, fp8_input_store: bool = False, cpu_offload_input: bool = False
) -> Tensor:
    """Return ``swiglu(input + bias)``; nothing is stored in fp8 or moved to the CPU.

    Raises:
        ConfigError: ``fp8_input_store`` or ``cpu_offload_input`` is set.
    """
    if fp8_input_store or cpu_offload_input:
        raise ConfigError(
            f"fp8_input_store is {fp8_input_store} and cpu_offload_input {cpu_offload_input}; inputs are kept in their "
            "dtype on their device here, so leave both out"
        )
    return elementwise.swiglu(input if bias is None else input + bias)


def weighted_bias_swiglu_impl(input: Tensor, bias: None, weights: Tensor, fp8_input_store: bool = False) -> Tensor:
    """Return ``swiglu(input) * weights`` in the dtype of ``input``; ``weights`` are ``[n, 1]``, one for each token.

    Raises:
        ConfigError: there is a ``bias``, or ``fp8_input_store`` is set.
    """
    if bias is not None:
        raise ConfigError("weighted_bias_swiglu_impl got a bias, which experts do not have; give None")
    output = bias_swiglu_impl(input.flatten(0, -2), None, fp8_input_store)
    return (output * weights).to(input.dtype).view(*input.shape[:-1], -1)


def geglu(y: Tensor) -> Tensor:
    """Return ``gelu(a) * b`` of the halves ``a`` and ``b`` of the last dimension, GELU with the tanh approximation."""
    gate, up = y.chunk(2, -1)
    return fast_gelu(gate) * up


def bias_geglu(bias: Tensor, y: Tensor) -> Tensor:
    """Return ``geglu(y + bias)``."""
    return geglu(y + bias)


def bias_geglu_impl(input: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``geglu(input + bias)``."""
    return geglu(input if bias is None else input + bias)


def quick_geglu(y: Tensor, linear_offset: float = 0.0) -> Tensor:
    """Return ``quick_gelu(a) * (b + linear_offset)`` of the halves ``a`` and ``b`` of the last dimension."""
    gate, up = y.chunk(2, -1)
    return quick_gelu(gate) * (up + linear_offset)


offer(globals(), "jit_fuser")
