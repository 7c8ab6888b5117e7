"""``config.attention_backend``, in terms of PyTorch's kernels."""

import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.core.errors import ConfigError
from shardwise.kernels.dispatch import why_repeat_keys
from shardwise.models.config import ModelConfig

_KERNELS = {
    "flash": [SDPBackend.FLASH_ATTENTION],
    "fused": [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION],
    "unfused": [SDPBackend.MATH],
}


def attention_kernels(config: ModelConfig) -> list[SDPBackend] | None:
    """The kernels that ``config.attention_backend`` leaves PyTorch to choose from; None if all, or if none is used."""
    return _KERNELS.get(config.attention_backend)


def kernels_on_a_cache(kernels: list[SDPBackend] | None) -> list[SDPBackend]:
    """The kernels for a growing number of keys: not cuDNN's, which makes a plan for each number."""
    every = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return every if kernels is None else [kernel for kernel in kernels if kernel is not SDPBackend.CUDNN_ATTENTION]


def check_attention_backend(config: ModelConfig, device: torch.device, *, masked: bool = False) -> None:
    """Raise unless ``config.attention_backend`` works for such attention on such a device, by trying it.

    Args:
        config: dtype, heads, dropout, window and backend.
        device: where the model is; nothing is known, and nothing raised, of the meta device.
        masked: attention has a mask or bias (padding, documents, ALiBi), which some kernels do not take.

    Raises:
        ConfigError: it does not; with PyTorch's reasons.
    """
    kernels = attention_kernels(config)
    if kernels is None or device.type == "meta":
        return
    heads, groups, head_dim = config.heads
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
