"""The arithmetic of a group's layers, which is selected once, when a layer is constructed.

Layers get their products, norms and activations from ``arithmetic_of(group)``, whatever its class. A group uses plain
arithmetic unless ``shardwise.exact`` enabled exact arithmetic for it.
"""

from collections.abc import Callable, Sequence
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise.core.communication import moves
from shardwise.core.communication.context import context_of
from shardwise.core.sharding import Interval, ParamLayout
from shardwise.kernels.products import Products
from shardwise.nn.norm import HeadsRMSNorm, add_and_norm


class Norm:
    """Applies the norms and biases of one layer, whose parameters are replicated on every rank.

    Args:
        group: the ranks that share the sequence or the heads.
        sequence_parallel: each rank holds its shard of the sequence, ``[s/t, b, h]`` instead of ``[s, b, h]``.

    Attributes:
        partial_gradients: gradients of parameters that ranks apply to different tokens or heads are partial sums.
    """

    partial_gradients = True

    def __init__(self, group: ProcessGroup, *, sequence_parallel: bool = False) -> None:
        self.group, self.sequence_parallel = group, sequence_parallel

    def __call__(self, norm: nn.Module, input_: Tensor) -> Tensor:
        """``norm(input_)``."""
        output: Tensor = norm(input_)
        return output

    def add_and_norm(self, norm: nn.Module, residual: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """``residual + added``, and its norm."""
        return add_and_norm(norm, residual, added)

    def heads(self, query_norm: nn.Module, key_norm: nn.Module, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """The norms of queries ``[s, b, heads/t, d]`` and keys ``[s, b, groups/t, d]``."""
        if not isinstance(query_norm, HeadsRMSNorm) or not isinstance(key_norm, HeadsRMSNorm):
            return query_norm(query), key_norm(key)
        squares = torch.stack((query_norm.squares(query), key_norm.squares(key)))
        # The sum is identical on all ranks, and each uses it for its own heads: the gradient is a partial sum there.
        squares = moves.copy(moves.reduce(squares, group=self.group), group=self.group)
        return query_norm(query, squares[0]), key_norm(key, squares[1])

    def add_bias(self, output: Tensor, bias: Tensor) -> Tensor:
        """``output + bias``."""
        # Under autocast the output has another dtype than the bias; a whole linear would add in the output's.
        return output + bias.to(output.dtype)


class Activation:
    """Applies elementwise functions.

    Attributes:
        at_any_size: kernels give an element the same bits at every size of the tensor.
        rotates_while_splitting: heads may be split and rotated in one pass.
        reads_a_cache: one query may be answered by the kernel for decoding.
    """

    at_any_size = False
    rotates_while_splitting = True
    reads_a_cache = True

    def __call__(self, function: Callable[[Tensor], Tensor], input_: Tensor) -> Tensor:
        """``function(input_)``."""
        return function(input_)

    def counted_heads(self, local: int, whole: int) -> int:
        """The number of heads, of this rank's and of all, that decides the size of attention's blocks."""
        return local


class Arithmetic:
    """The strategies of one group's layers; this class is the plain arithmetic.

    Attributes:
        norm: class of a layer's norms and biases.
        activation: see its class.
        sequence_first: embeddings look ids up in the order of the sequence, ``[s, b]``.
        fuses_loss: output layer and loss may be computed in one.
        leaves_out_tokens: the output layer may leave tokens out that the loss does not count.
    """

    norm: type[Norm] = Norm
    activation = Activation()
    sequence_first = False
    fuses_loss = True
    leaves_out_tokens = True

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
        self, ranges: Sequence[Interval], *, group: ProcessGroup
    ) -> tuple[list[Interval], Sequence[Interval], int]:
        """The parts of a vocabulary whose statistics the loss sums.

        Args:
            ranges: every rank's ids.
            group: the ranks that split the vocabulary.

        Returns:
            This rank's parts, as columns of its logits; the ids of every part of all ranks; and the number of columns
            that decides the choice of kernels.

        Raises:
            ConfigError: the bounds of the ranks' ids are not among the cuts into parts.
        """
        first, last = ranges[group.rank()]
        return [(0, last - first)], ranges, last - first

    def sums_in_order(self, ids: Tensor) -> bool:
        """True if the gradient of an embedding of these ids must be summed in a fixed order."""
        return False

    def refuse(self, message: str) -> None:
        """Raise a ConfigError of this message if there is only a plain way to compute something."""


_PLAIN = Arithmetic()


def arithmetic_of(group: ProcessGroup) -> Arithmetic:
    """Return the arithmetic of the group's layers."""
    return cast(Arithmetic, context_of(group).arithmetic or _PLAIN)
