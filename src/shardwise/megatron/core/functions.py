"""Megatron's activations, softmax and ``jit``: functions of tensors, which PyTorch computes on any device."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.core.errors import ConfigError
from shardwise.kernels import elementwise
from shardwise.megatron.core.utils import get_default_causal_mask, get_sliding_window_causal_mask
from shardwise.megatron.errors import AssertedConfigError, AssertedShardingError
from shardwise.megatron.surface import offer
from shardwise.models.transformer.masks import AttnMaskType

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


class SoftmaxOne(nn.Module):
    """Softmax over the last dimension with one more score for each head, whose probability is dropped.

    Args:
        dim: -1, or None.
        denominator_offset: the scores ``[heads]``, or one number; 0 adds 1 to the denominator.

    Source: Miller, "Attention is off by one", 2023.
    """

    def __init__(self, dim: int | None = None, denominator_offset: Tensor | float = 1.0) -> None:
        super().__init__()
        if dim not in (None, -1):
            raise ConfigError(f"dim is {dim}; the scores of a query are in the last dimension, so give -1")
        self.dim, self.denominator_offset = dim, denominator_offset

    def forward(self, x: Tensor) -> Tensor:
        """Return the probabilities of scores ``[b, heads, queries, keys]``."""
        score = torch.as_tensor(self.denominator_offset, dtype=x.dtype, device=x.device).view(1, -1, 1, 1)
        return torch.cat([x, score.expand(*x.shape[:3], 1)], -1).softmax(-1)[..., :-1]


class FusedScaleMaskSoftmax(nn.Module):
    """Softmax of scaled and masked scores, by PyTorch's operators.

    Args:
        input_in_fp16, input_in_bf16: dtype of the scores, if not fp32; at most one is True.
        attn_mask_type: ``causal`` masks without a mask of the caller.
        scaled_masked_softmax_fusion: no effect.
        mask_func: function of scores and mask that returns masked scores, such as ``attention_mask_func``.
        softmax_in_fp32: whether 16-bit scores are converted to fp32 and the probabilities back.
        scale: factor of the scores, or None.
        window_size: numbers of positions that a query sees before and after itself, or None.

    Raises:
        AssertedConfigError: both dtypes, or a ``scale`` without ``softmax_in_fp32``.
    """

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        attn_mask_type: AttnMaskType,
        scaled_masked_softmax_fusion: bool,
        mask_func: Callable[[Tensor, Tensor], Tensor],
        softmax_in_fp32: bool,
        scale: float | None,
        window_size: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        if (input_in_fp16 and input_in_bf16) or not (scale is None or softmax_in_fp32):
            raise AssertedConfigError(
                f"input_in_fp16 is {input_in_fp16}, input_in_bf16 {input_in_bf16}, scale {scale} and softmax_in_fp32 "
                f"{softmax_in_fp32}; scores have one dtype, and are scaled in fp32"
            )
        self.is_wide = softmax_in_fp32 and (input_in_fp16 or input_in_bf16)
        self.attn_mask_type, self.mask_func = attn_mask_type, mask_func
        self.softmax_in_fp32, self.scale, self.window_size = softmax_in_fp32, scale, window_size

    def forward(self, input: Tensor, mask: Tensor | None, softmax_offset: Tensor | None = None) -> Tensor:
        """Return the probabilities of scores ``[b, heads, queries, keys]``.

        Args:
            input: scores.
            mask: bools that broadcast to them, True where a key is forbidden, or None.
            softmax_offset: scores of ``SoftmaxOne``, or None.

        Raises:
            AssertedShardingError: a causal mask of several queries over another number of keys.
        """
        scores = input.float() if self.is_wide else input
        scores = scores if self.scale is None else scores * self.scale
        queries, keys = input.shape[2:]
        if self.window_size is not None:
            mask = get_sliding_window_causal_mask(queries, keys, self.window_size).to(input.device)
        elif self.attn_mask_type == AttnMaskType.causal and mask is None and queries > 1:
            if queries != keys:
                raise AssertedShardingError(
                    f"there are {queries} queries and {keys} keys; a causal mask needs as many, so give a mask"
                )
            mask = get_default_causal_mask(queries).to(input.device)
        if mask is not None:
            # `attention_mask_func` writes into its argument.
            scores = self.mask_func(scores.clone() if scores is input else scores, mask)
        probabilities = scores.softmax(-1) if softmax_offset is None else SoftmaxOne(-1, softmax_offset)(scores)
        return probabilities.to(input.dtype)

    def is_kernel_available(self, mask: Tensor | None, b: int, np: int, sq: int, sk: int) -> bool:
        """Return False: there is no kernel of its own."""
        return False


offer(globals(), "jit_fuser")
