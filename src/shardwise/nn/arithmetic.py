"""The arithmetic of a group's layers, which is selected once, when a layer is constructed.

Layers get their products, norms and activations from ``arithmetic_of(group)``. A group uses plain arithmetic unless
``shardwise.exact`` enabled exact arithmetic for it.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise.core.communication import moves
from shardwise.core.communication.context import context_of
from shardwise.core.sharding import Interval, ParamLayout, Replicas
from shardwise.kernels import elementwise
from shardwise.kernels.products import Products
from shardwise.nn.norm import HeadsRMSNorm, add_and_norm


class Norm:
    """Applies the norms and biases of one layer, whose parameters are replicated on every rank.

    Args:
        group: the ranks that share the sequence or the heads.
        sequence_parallel: whether each rank holds its shard of the sequence, ``[s/t, b, h]`` instead of ``[s, b, h]``.
    """

    def __init__(self, group: ProcessGroup, *, sequence_parallel: bool = False) -> None:
        self.group, self.sequence_parallel = group, sequence_parallel

    @staticmethod
    def replicas(*, applied_apart: bool) -> Replicas:
        """Return the replicas of a parameter that every rank has, and applies to its own tokens or heads if apart."""
        return Replicas(summed_over=("tp",) if applied_apart else ())

    def __call__(self, norm: nn.Module, input_: Tensor) -> Tensor:
        """Normalize ``[..., h]``."""
        output: Tensor = norm(input_)
        return output

    def add_and_norm(self, norm: nn.Module, residual: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``residual + added`` and its norm."""
        return add_and_norm(norm, residual, added)

    def heads(self, query_norm: nn.Module, key_norm: nn.Module, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Normalize queries ``[s, b, heads/t, d]`` and keys ``[s, b, groups/t, d]``."""
        if not isinstance(query_norm, HeadsRMSNorm) or not isinstance(key_norm, HeadsRMSNorm):
            return query_norm(query), key_norm(key)
        squares = torch.stack((query_norm.squares(query), key_norm.squares(key)))
        # The sum is identical on all ranks, but each rank uses it for its own heads, so its gradient is a partial sum.
        squares = moves.copy(moves.reduce(squares, group=self.group), group=self.group)
        return query_norm(query, squares[0]), key_norm(key, squares[1])

    def add_bias(self, output: Tensor, bias: Tensor) -> Tensor:
        """Return ``output + bias``."""
        # Under autocast the dtypes differ. A dense linear layer would add the bias in the output's dtype.
        return output + bias.to(output.dtype)

    def row_output(self, multiply: Callable[[Tensor | None], Tensor], bias: Tensor | None) -> Tensor:
        """Return a row layer's output; ``multiply`` returns the sum of all ranks' products, plus a bias if given."""
        # The product of one rank adds the bias. With several it must be added once, after the sum.
        if bias is None or self.group.size() == 1:
            return multiply(bias)
        return self.add_bias(multiply(None), bias)


class SumsOverKeys(Protocol):
    """A kernel of attention; for the attributes see ``models.transformer.attention_kernels.Kernel``."""

    adds_parts: bool
    counts_from_start: bool


K = TypeVar("K", bound=SumsOverKeys)


class Activation:
    """Applies elementwise functions and softmax, rotates heads, and multiplies the matrices of attention heads."""

    swiglu = staticmethod(elementwise.swiglu)
    rotate = staticmethod(elementwise.rotate)
    split_and_rotate = staticmethod(elementwise.split_and_rotate)

    def __call__(self, function: Callable[[Tensor], Tensor], input_: Tensor) -> Tensor:
        """Return ``function(input_)``."""
        return function(input_)

    def softmax(self, input_: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the softmax over the last dimension, in ``dtype`` if given."""
        return input_.softmax(dim=-1, dtype=dtype)

    def matmul(self, left: Tensor, right: Tensor) -> Tensor:
        """Return ``left @ right``, ``[b, heads, n, k]`` and ``[b, heads, k, m]``."""
        return left @ right

    def kernels(self, table: Sequence[K]) -> tuple[K, ...]:
        """Return the kernels of attention that this arithmetic allows, in order."""
        return tuple(kernel for kernel in table if not kernel.counts_from_start)

    def counted_heads(self, local: int, whole: int) -> int:
        """Return the number of heads that determines attention's block size, ``local`` (this rank's) or ``whole``."""
        return local


class Arithmetic:
    """The strategies of one group's layers; this class is the plain arithmetic.

    Attributes:
        norm: class of a layer's norms and biases.
        activation: see ``Activation``.
        context: context-parallel ranks, if gradients must not depend on their number; otherwise None.
    """

    norm: type[Norm] = Norm
    activation = Activation()
    context: ProcessGroup | None = None

    def look_up(self, function: Callable[[Tensor, Tensor], Tensor], ids: Tensor, weight: Tensor, *, dim: int) -> Tensor:
        """Return ``function(ids, weight)``; the ids have positions of the sequence along ``dim``."""
        return function(ids, weight)

    def embed(
        self,
        function: Callable[[Tensor, Tensor], Tensor],
        ids: Tensor,
        weight: Tensor,
        *,
        reduce: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Return ``reduce(function(ids, weight))`` ``[b, s, h]`` of ids ``[b, s]``; elements are reduced one by one."""
        return reduce(function(ids, weight))

    def products(self, layout: ParamLayout, split: Literal["output", "input"], *, group: ProcessGroup) -> Products:
        """Return the products of a linear layer.

        Args:
            layout: layout of the layer's weight.
            split: the features that are split over the ranks, output or input.
            group: the ranks that share the layer.

        Raises:
            ConfigError: this arithmetic has no products for such a layout.
        """
        return Products()

    def parts_of_vocabulary(
        self, ranges: Sequence[Interval], num_tokens: int, *, group: ProcessGroup
    ) -> tuple[list[Interval], Sequence[Interval], int]:
        """Return the parts of a vocabulary whose statistics the loss sums.

        Args:
            ranges: every rank's ids.
            num_tokens: number of this rank's tokens.
            group: the ranks that split the vocabulary.

        Returns:
            This rank's parts, as columns of its logits; the ids of all parts of all ranks; and the number of logits
            that determines the choice of kernels.

        Raises:
            ConfigError: a boundary between two ranks' ids is not a boundary between parts.
        """
        first, last = ranges[group.rank()]
        return [(0, last - first)], ranges, num_tokens * (last - first)

    def may_fuse_loss(self) -> bool:
        """Return whether a model that is made may fuse its output layer and loss."""
        return True

    def scales_before_loss(self) -> bool:
        """Return whether the output layer and not the loss caps and scales logits, and rounds them to their dtype."""
        return False

    def row_statistics(self, kernels: Any, logits: Tensor, target_local: Tensor, **options: Any) -> Tensor:
        """Return ``kernels.row_statistics`` of some columns; see ``kernels.loss_reference``."""
        statistics: Tensor = kernels.row_statistics(logits, target_local, **options)
        return statistics

    def tokens_of_loss(self, choose: Callable[[], Tensor | None]) -> Tensor | None:
        """Return the places that ``choose`` finds, which the loss is computed for; None for all tokens."""
        return choose()

    def sums_in_order(self, ids: Tensor) -> bool:
        """Return whether the gradient of an embedding of these ids must be summed in a fixed order."""
        return False

    def refuse(self, message: str) -> None:
        """Raise ConfigError with this message if the arithmetic is exact; for operations that have no exact version."""


_PLAIN = Arithmetic()


def arithmetic_of(group: ProcessGroup) -> Arithmetic:
    """Return the arithmetic of the group's layers."""
    return cast(Arithmetic, context_of(group).arithmetic or _PLAIN)
