"""ALiBi: attention scores fall linearly with the distance, in place of position embeddings."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.models.config import ModelConfig
from shardwise.models.transformer.heads import split_heads


def alibi_slopes(num_heads: int) -> Tensor:
    """How much each head's scores fall per position, ``[num_heads]`` in fp64, on the CPU.

    For a power of two, ``2 ** (-8 i / num_heads)`` for ``i`` from 1. For another number, those of the next smaller
    power of two, then every other one of the next greater, as in the authors' code and BLOOM.

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]

    Source: Press et al. 2021 (arXiv:2108.12409).
    """
    smaller = 1 << (num_heads.bit_length() - 1)
    exponents = [-8 * i / smaller for i in range(1, smaller + 1)]
    exponents += [-8 * i / (2 * smaller) for i in range(1, 2 * (num_heads - smaller), 2)]
    return torch.tensor([2.0**exponent for exponent in exponents], dtype=torch.float64, device="cpu")


def local_alibi_slopes(config: ModelConfig, tp_group: ProcessGroup) -> Tensor:
    """The slopes of this rank's query heads, for ``AttentionMask``: ``[heads/t]`` in fp64, on the CPU."""
    num_heads, num_groups, _ = config.heads
    start, stop = split_heads(num_heads, num_groups, tp_group.size()).queries[tp_group.rank()]
    return alibi_slopes(num_heads)[start:stop]
