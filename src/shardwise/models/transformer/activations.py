"""Elementwise functions of the MLP, by the names that configurations use."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor


def gelu_tanh(input_: Tensor) -> Tensor:
    """GELU with the normal distribution function replaced by a tanh (GPT-2, BLOOM).

    Source: Hendrycks & Gimpel 2016 (arXiv:1606.08415), section 2.
    """
    return F.gelu(input_, approximate="tanh")


def quick_gelu(input_: Tensor) -> Tensor:
    """GELU with the normal distribution function replaced by ``sigmoid(1.702 x)``; the same source."""
    return input_ * (1.702 * input_).sigmoid()


def squared_relu(input_: Tensor) -> Tensor:
    """``relu(x) ** 2`` (So et al. 2021, arXiv:2109.08668)."""
    return F.relu(input_).square()


def softcap(input_: Tensor, cap: float) -> Tensor:
    """``cap * tanh(x / cap)``, which keeps scores and logits under ``cap`` (Gemma 2, arXiv:2408.00118, section 2)."""
    return (input_ / cap).tanh() * cap


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "squared_relu": squared_relu,
    "relu": F.relu,
    "silu": F.silu,
}
"""For ``ModelConfig.activation_func``; ``silu`` with ``gated_linear_unit`` is SwiGLU, ``gelu`` GeGLU."""
