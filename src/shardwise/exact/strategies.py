"""The strategies of exact mode, by which layers compute whose group sums over parts."""

from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise.core.communication import trees
from shardwise.core.communication.context import context_of
from shardwise.core.errors import ConfigError
from shardwise.core.sharding import Interval, ParamLayout, balanced_sizes, intervals_of_sizes, local_parts
from shardwise.exact.by_parts import add_bias, apply_norm, norm_heads
from shardwise.exact.products import ExactProducts
from shardwise.kernels.elementwise import in_blocks
from shardwise.nn.arithmetic import Activation, Arithmetic, Norm


class ExactNorm(Norm):
    """``Norm`` by parts of the sequence or of the heads: a gradient is whole as soon as it is made."""

    partial_gradients = False

    def __call__(self, norm: nn.Module, input_: Tensor, *, group: ProcessGroup, sequence_parallel: bool) -> Tensor:
        """See ``Norm``; ShardingError if the parts are not of one size."""
        return apply_norm(norm, input_, group=group, sequence_parallel=sequence_parallel)

    def add_and_norm(
        self, norm: nn.Module, residual: Tensor, added: Tensor, *, group: ProcessGroup, sequence_parallel: bool
    ) -> tuple[Tensor, Tensor]:
        """See ``Norm``."""
        total = residual + added
        return total, self(norm, total, group=group, sequence_parallel=sequence_parallel)

    def heads(
        self, query_norm: nn.Module, key_norm: nn.Module, query: Tensor, key: Tensor, *, group: ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        """See ``Norm``."""
        return norm_heads(query_norm, query, group=group), norm_heads(key_norm, key, group=group)

    def add_bias(self, output: Tensor, bias: Tensor, *, group: ProcessGroup, sequence_parallel: bool) -> Tensor:
        """See ``Norm``."""
        return add_bias(output, bias, group=group, sequence_parallel=sequence_parallel)


class ExactActivation(Activation):
    """``Activation`` in blocks of a fixed size, so that an element has the same bits wherever it lies."""

    at_any_size = True
    rotates_while_splitting = False
    reads_a_cache = False

    def __call__(self, function: Callable[[Tensor], Tensor], input_: Tensor) -> Tensor:
        """See ``Activation``."""
        return in_blocks(function, input_)

    def counted_heads(self, local: int, whole: int) -> int:
        """All heads: gradients of keys and values are sums over blocks, so these may not depend on the ranks."""
        return whole


class ExactArithmetic(Arithmetic):
    """The arithmetic of a group that sums over parts."""

    norm = ExactNorm()
    activation = ExactActivation()
    # The gradient of a row is summed in the order of the ids: in the same with sequence parallelism and without.
    sequence_first = True
    fuses_loss = False
    # Sums are of all tokens, however many count.
    leaves_out_tokens = False

    def products(self, layout: ParamLayout, split: Literal["output", "input"], *, group: ProcessGroup) -> ExactProducts:
        """See ``Arithmetic``; ConfigError if the parts are not shared by so many ranks."""
        number = trees.exact_parts(group)
        assert number is not None
        assert layout.dim is not None
        parts = local_parts(layout, group.rank(), number, what=f"the {split} of a linear layer")
        return ExactProducts(parts, split, layout.global_shape[layout.dim], number)

    def parts_of_vocabulary(
        self, ranges: Sequence[Interval], *, group: ProcessGroup
    ) -> tuple[list[Interval], Sequence[Interval], int]:
        """See ``Arithmetic``: as many parts as the group sums over. All go one way, however many are here."""
        number = trees.exact_parts(group)
        assert number is not None
        first, vocab_size, per_rank = ranges[group.rank()][0], ranges[-1][1], number // group.size()
        parts = intervals_of_sizes(balanced_sizes(vocab_size, number))
        if any(run != (parts[i * per_rank][0], parts[(i + 1) * per_rank - 1][1]) for i, run in enumerate(ranges)):
            raise ConfigError(
                f"exact: the loss over {vocab_size} ids is cut into {number} parts, and the bounds of the ranks' ids "
                f"({list(ranges)}) are not among the cuts; use a vocabulary that {number} divides, without padding"
            )
        own = parts[group.rank() * per_rank : (group.rank() + 1) * per_rank]
        return [(start - first, stop - first) for start, stop in own], parts, vocab_size

    def sums_in_order(self, ids: Tensor) -> bool:
        """On CUDA the zeros that stand for other ranks' ids would shift the runs that are added."""
        return ids.is_cuda

    def refuse(self, message: str) -> None:
        """Raise a ConfigError of this message."""
        raise ConfigError(message)


_EXACT = ExactArithmetic()


def sum_in_parts(group: ProcessGroup, parts: int) -> None:
    """From now on sum over ``group`` by a tree over ``parts`` parts, and let layers that are made on it sum theirs so.

    Args and errors: those of ``core.communication.trees.sum_in_parts``.
    """
    trees.sum_in_parts(group, parts)
    context_of(group).arithmetic = _EXACT
