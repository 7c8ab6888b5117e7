"""PyTorch's kernels of attention, by the name of a backend."""

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.core.errors import ConfigError
from shardwise.kernels.dispatch import why_repeat_keys
from shardwise.models.config import ModelConfig

_KERNELS = {
    "flash": [SDPBackend.FLASH_ATTENTION],
    "fused": [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION],
    "unfused": [SDPBackend.MATH],
}
"""Kernels that PyTorch may use, by ``config.attention_backend``; all for "auto", none for "local"."""

# cuDNN's kernel builds a plan for each number of keys, which takes longer than the attention of one token.
_KERNELS_ON_A_CACHE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def kernels_of(backend: str, query: Tensor, key: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which PyTorch uses the kernels of a backend, for tensors ``[b, heads, s, d]``."""
    kernels = _KERNELS.get(backend)
    if query.is_cuda and query.size(2) != key.size(2):
        kernels = [each for each in kernels or _KERNELS_ON_A_CACHE if each is not SDPBackend.CUDNN_ATTENTION]
    return nullcontext() if kernels is None else sdpa_kernel(kernels)


def check_attention_backend(config: ModelConfig, device: torch.device, *, masked: bool = False) -> None:
    """Try ``config.attention_backend`` on a device; raise ConfigError with PyTorch's reasons if it does not work.

    No-op on the meta device. ``masked`` means that attention has a mask or bias (padding, documents, ALiBi), which some
    kernels do not support.
    """
    kernels = _KERNELS.get(config.attention_backend)
    if kernels is None or device.type == "meta":
        return
    heads, groups, _ = config.heads
    # Kernels get queries, keys and values of one width.
    head_dim = max(config.value_width, *(each.width for each in config.kinds_of_heads))
    masked = masked or config.window_size is not None
    repeated = why_repeat_keys(
        config.attention_backend, device.type, config.params_dtype, head_dim=head_dim, masked=masked
    )
    query = torch.zeros(1, min(heads, 2), 16, head_dim, dtype=config.params_dtype, device=device, requires_grad=True)
    key = query if repeated is not None or groups == heads else query[:, :1]
    mask = query.new_zeros(16, 16) if masked else None
    devices = [device] if device.type != "cpu" else []
    with (
        warnings.catch_warnings(record=True) as reasons,
        torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"),
        sdpa_kernel(kernels),
    ):
        warnings.simplefilter("always")
        try:
            F.scaled_dot_product_attention(
                query,
                key,
                key,
                attn_mask=mask,
                dropout_p=config.attention_dropout,
                is_causal=not masked,
                enable_gqa=key is not query,
            ).sum().backward()
        except RuntimeError as error:
            said = "; ".join(dict.fromkeys(str(reason.message).splitlines()[0] for reason in reasons))
            raise ConfigError(
                f"attention_backend {config.attention_backend!r} does not work on {device} in {config.params_dtype} "
                f"with heads of width {head_dim}, attention_dropout {config.attention_dropout} and "
                f"{'a' if masked else 'no'} mask: {said or error}; use 'auto'"
            ) from error
