"""What a number is stored as: the codes of ``torchao``'s quantisers, and what they mean.

A weight is divided into blocks of consecutive columns of a row, whole rows for int8. The largest magnitude of a block
gives its scale, in fp32. Both are of the whole weight: a rank that holds some columns of a block has the block's scale,
so that codes do not depend on the number of ranks.
"""

import functools
import logging
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from shardwise.core.errors import ConfigError

Quantization = Literal["int8", "nf4"]

# So many elements are compared with the sixteen levels at once.
_COMPARED = 1 << 20


@dataclass(frozen=True)
class Format:
    """How weights of a kind are stored.

    Attributes:
        block: columns that share a scale; None for whole rows.
        per_byte: codes in a byte.
    """

    block: int | None
    per_byte: int


QUANTIZATIONS: dict[str, Format] = {"int8": Format(None, 1), "nf4": Format(64, 2)}
"""int8: a scale for each row. nf4: 16 levels, by the quantiles of a normal distribution, a scale for 64 columns.

Source: Dettmers et al. 2023 (arXiv:2305.14314), section 3, for nf4.
"""


def check_available(kind: Quantization) -> None:
    """Raise ConfigError, with the reason, if weights cannot be quantised on this machine."""
    _torchao(kind)


@functools.cache
def _torchao(kind: str) -> Any:
    # It warns of extensions for GPUs that it cannot load here, and PyTorch of how it registers things.
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        import torchao.quantization
        from torchao.quantization import quant_primitives

        # What is used of it, so that another version is told here.
        needed = (quant_primitives.choose_qparams_affine_with_min_max, quant_primitives.quantize_affine)
        assert all(needed)
        _ = torchao.quantization.NF4Tensor.quantize_tensor_nearest
    except ImportError as error:
        raise ConfigError(
            f"a base in {kind} needs torchao, which cannot be imported ({error}): pip install 'shardwise[quantization]'"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"a base in {kind} needs torchao, and the one that is installed does not work here "
            f"({type(error).__name__}: {error}): pip install 'shardwise[quantization]'"
        ) from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
    return torchao.quantization


def encode(kind: Quantization, values: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of values, and the scales.

    Args:
        kind: of the codes.
        values: ``[rows, columns]``.
        largest: ``[rows, columns]``, or ``[rows, 1]`` for whole rows: the largest magnitude of each one's block.

    Returns:
        ``[rows, columns]`` int8, or uint8 of 0 to 15; and scales of ``largest``'s shape.

    Raises:
        ConfigError: ``torchao`` is not there.
    """
    library = _torchao(kind)
    if kind == "int8":
        primitives, block = library.quant_primitives, (1, max(1, values.size(1)))
        # As its own quantiser, in the weight's dtype, but that does not know fp64.
        values = values.float() if values.dtype == torch.float64 else values
        extremes = largest[:, 0].to(values.dtype)
        scales, zeros = primitives.choose_qparams_affine_with_min_max(
            -extremes,
            extremes,
            primitives.MappingType.SYMMETRIC,
            block,
            torch.int8,
            eps=torch.finfo(torch.float32).eps,
            scale_dtype=torch.float32,
        )
        if not values.numel():
            return values.to(torch.int8), scales[:, None]
        return primitives.quantize_affine(values, block, scales, zeros, torch.int8), scales[:, None]
    # A block of zeros has no largest magnitude to divide by.
    relative = (values.float() / largest.clamp(min=torch.finfo(torch.float32).tiny)).flatten()
    nearest = library.NF4Tensor.quantize_tensor_nearest
    parts = [nearest(part, levels_on(values.device)).to(torch.uint8) for part in relative.split(_COMPARED)]
    return torch.cat(parts).view(values.shape), largest


def levels_on(device: torch.device) -> Tensor:
    """The sixteen levels of nf4, ``torchao``'s, in fp32."""
    return _levels().to(device)


@functools.cache
def _levels() -> Tensor:
    tensor_class = _torchao("nf4").NF4Tensor
    levels: Tensor = tensor_class.from_tensor(torch.ones(1, 64), 64, 1).nf4
    return levels


def pack(kind: Quantization, codes: Tensor) -> Tensor:
    """Codes ``[rows, columns]`` as they are stored: of nf4 two in a byte, the first in its upper half."""
    if kind == "int8":
        return codes
    if codes.size(1) % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[:, ::2] << 4 | codes[:, 1::2]


def decode(kind: Quantization, stored: Tensor, scales: Tensor, columns: int) -> Tensor:
    """The values ``[rows, columns]`` in fp32 of stored codes and of scales, one for each of them or for each row."""
    if kind == "int8":
        return stored.float() * scales
    codes = torch.stack((stored >> 4, stored & 15), dim=2).flatten(1)[:, :columns]
    return levels_on(stored.device)[codes.int()] * scales
