"""The gradients of a step: the one protocol by which the trainer knows them, and the plain way.

``GradientBuffers`` sums them over ranks in buckets, ``GradientTrees`` with the same bits at every number of ranks, and
``FullyShardedModel`` as PyTorch's FSDP2 does. ``build_optimizer`` chooses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from shardwise.core.communication.collectives import all_reduce


class Total:
    """Sums over a rank's micro-batches, in fp64.

    Args:
        zeros: ``[n]``, one for each sum; overwritten.
    """

    def __init__(self, zeros: Tensor) -> None:
        self.tensor = zeros

    def add(self, values: Tensor) -> None:
        """Add ``[n]`` values of one micro-batch."""
        self.tensor += values

    def over(self, groups: Sequence[ProcessGroup]) -> Tensor:
        """The sums over the ranks of all groups, ``[n]``."""
        total = self.tensor
        for group in groups:
            total = all_reduce(total, group=group)
        return total


def _sum(losses: Tensor, dtype: torch.dtype | None) -> Tensor:
    return losses.sum(dtype=dtype)


class Gradients:
    """Gradients that stay where autograd puts them: those of one data-parallel rank.

    Attributes:
        total: the class of a step's sums.
        sum_of_losses: sums the losses of one micro-batch, in the dtype given.
        seeds_micro_batches: dropout's numbers depend on a micro-batch's place in the global batch, not on its rank.
    """

    total: type[Total] = Total
    sum_of_losses: Callable[[Tensor, torch.dtype | None], Tensor] = staticmethod(_sum)
    seeds_micro_batches = False
    _trained: Sequence[Parameter] = ()

    @staticmethod
    def of(params: Sequence[Parameter]) -> Gradients:
        """The gradients of these parameters."""
        gradients = Gradients()
        gradients._trained = params
        return gradients

    def begin(self, num_micro_batches: int) -> None:
        """Forget the gradients of the step before; this rank has so many micro-batches, and each other rank too."""
        self.zero_()

    def zero_(self) -> None:
        """Forget all gradients."""
        for param in self._trained:
            param.grad = None

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside it backward passes accumulate, and nothing is communicated."""
        return contextlib.nullcontext()

    def finish(self) -> None:
        """Complete the sums over the ranks, once a step."""
