"""Sums whose bits do not depend on the number of ranks: one binary tree over a fixed number of parts.

Floating-point addition is commutative, but not associative: ``(a + b) + (c + d)`` and ``((a + b) + c) + d`` differ in
their bits. The terms are therefore divided into ``exact_parts`` parts, the same at every layout, and one balanced
binary tree sums the parts. Each rank holds ``exact_parts / t`` consecutive parts, which form one subtree, and sums them
locally. This file sums the roots of the ``t`` subtrees between the ranks. Every addition is rounded to the tensor's
dtype, within a rank and between ranks.

``sum_in_parts`` enables this for a group, whose sums then go through ``TreeTransport``. A sum of two ranks has only one
order, so another transport's all-reduce computes it.

Each rank sums one slice of the elements for all ranks. An all-to-all collects the slice from every rank, and an
all-gather distributes the sums. Together they have the volume of a ring all-reduce. A reduce-scatter is the first half.

``exact_total`` sums a few Python numbers of every rank as integers and rounds once, so that any order gives the same
bits.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication.agreement import gather_objects
from shardwise.core.communication.context import context_of
from shardwise.core.communication.transports import OF_SOME_GROUPS, choose_transport
from shardwise.core.communication.transports.transport import Pending
from shardwise.core.errors import ConfigError
from shardwise.core.sharding import balanced_sizes

# With fewer elements every rank gathers all of them: one collective instead of two.
_FEW_ELEMENTS = 1 << 12
# Number of consecutive elements that one thread sums.
_RUN = 1 << 12


def is_power_of_two(number: int) -> bool:
    """Whether ``number`` is 1, 2, 4, ..."""
    return number > 0 and number & (number - 1) == 0


def sum_in_parts(group: ProcessGroup, parts: int) -> None:
    """Make all later sums over ``group`` use a tree over ``parts`` parts.

    ``exact.sum_in_parts`` enables this for the group's layers as well.

    Args:
        group: its size must be a power of two. A group of one rank counts, because its sums must have the same bits as
            those of several ranks.
        parts: a power of two, at least the group's size.

    Raises:
        ConfigError: a size is not a power of two, ``parts`` is too small, or the group already uses another number of
            parts.
    """
    t = group.size()
    if not is_power_of_two(parts):
        raise ConfigError(f"exact_parts is {parts}; it must be a power of two, such as 8")
    if not is_power_of_two(t) or t > parts:
        raise ConfigError(
            f"exact sums over {parts} parts need a power of two of ranks, at most {parts}, and a group has {t}; use "
            "another number of ranks" + (f", or exact_parts {t}" if is_power_of_two(t) else "")
        )
    context = context_of(group)
    if context.exact_parts not in (None, parts):
        raise ConfigError(
            f"exact_parts is {parts}, and the group sums over {context.exact_parts} parts already, of another model; "
            "give this model other groups"
        )
    context.exact_parts = parts
    context.transports = ("trees",)
    context.why_not_overlapped = "sums go over fixed parts by a tree, and so do the products that are summed"


def exact_parts(group: ProcessGroup | None) -> int | None:
    """Return the number of parts of a group's sums; None if the transport sums, or if there is no group."""
    return None if group is None else context_of(group).exact_parts


def tree_sum(terms: Sequence[Tensor], *, may_overwrite: bool = False) -> Tensor:
    """Sum tensors by a balanced binary tree over neighbours.

    Args:
        terms: tensors of one shape and dtype; their number is a power of two. A single tensor is returned itself.
        may_overwrite: allow the sums to overwrite the terms, which otherwise are not modified.
    """
    counter = TreeCounter(may_overwrite=may_overwrite)
    for term in terms:
        counter.add(term)
    return counter.total()


def tree_sum_stacked_(terms: Tensor) -> Tensor:
    """Sum tensors stacked along the first dimension, by the same tree; their number is a power of two.

    Intermediate sums overwrite the terms. The result has its own memory.
    """
    while terms.size(0) > 2:
        terms = terms[0::2].add_(terms[1::2])
    return terms[0] if terms.size(0) == 1 else terms[0] + terms[1]


def deterministic_sum(input_: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Sum all elements, in ``dtype`` if given, independently of the number of threads, unlike ``torch.sum``."""
    flat = input_.reshape(-1)
    return F.pad(flat, (0, -flat.numel() % _RUN)).view(-1, _RUN).sum(dim=1, dtype=dtype).sum()


class TreeCounter:
    """Accumulates terms one by one in the order of the balanced tree, with one partial sum for each level.

    The sums of 1, 2, 4, ... neighbours work like the digits of a binary counter: a new term is added to the sum on its
    level, the result is added to the sum on the next level, and so on.

    Args:
        may_overwrite: allow the sums to overwrite the terms.
    """

    __slots__ = ("_levels", "_may_overwrite")

    def __init__(self, *, may_overwrite: bool = False) -> None:
        self._levels: list[Tensor | None] = []
        self._may_overwrite = may_overwrite

    def add(self, term: Tensor) -> None:
        """Add a term. The object keeps a reference to it, and modifies it only with ``may_overwrite``."""
        for level, waiting in enumerate(self._levels):
            if waiting is None:
                self._levels[level] = term
                return
            # Sums above the first level are this object's own tensors.
            term = torch.add(waiting, term, out=waiting) if level or self._may_overwrite else waiting + term
            self._levels[level] = None
        self._levels.append(term)

    def total(self) -> Tensor:
        """Return the sum of all terms; their number is a power of two."""
        *below, total = self._levels
        assert total is not None
        assert all(waiting is None for waiting in below), "the number of terms is no power of two"
        return total


class TreeTransport:
    """Carries a group's sums by the tree, in one all-to-all and one all-gather of another transport.

    Results are no views, because ``moves`` returns them from autograd functions and callers may write to them in place.
    """

    @staticmethod
    def carries(operation: str, group: ProcessGroup, op: Any) -> bool:
        """Whether a call sums in an order: the sum of two ranks has only one, and a reduce-scatter always sums."""
        return operation == "reduce_scatter" or (
            operation == "all_reduce" and op == dist.ReduceOp.SUM and group.size() > 2
        )

    @staticmethod
    def all_reduce(tensor: Tensor, group: ProcessGroup, op: Any, may_overwrite: bool) -> Pending:
        t, flat = group.size(), tensor.detach().reshape(-1)
        if flat.numel() <= _FEW_ELEMENTS:
            total = tree_sum(_gathered(flat.unsqueeze(0), group, (1,) * t).unbind(0))
        else:
            sizes = balanced_sizes(flat.numel(), t)
            total = _gathered(_summed_slices(flat, sizes, group), group, sizes)
        total = total.view(tensor.shape).detach()
        return Pending(None, lambda: total)

    @staticmethod
    def reduce_scatter(
        tensor: Tensor, group: ProcessGroup, dim: int, sizes: Sequence[int], may_overwrite: bool
    ) -> Pending:
        shape = list(tensor.shape)
        shape[dim] = sizes[group.rank()]
        each = tensor.numel() // tensor.size(dim) if tensor.size(dim) else 0
        parts = tensor.detach().split(list(sizes), dim)
        packed = torch.cat([part.reshape(-1) for part in parts]) if dim else tensor.detach().reshape(-1)
        total = _summed_slices(packed, [size * each for size in sizes], group).view(shape).detach()
        return Pending(None, lambda: total)


OF_SOME_GROUPS["trees"] = TreeTransport


def _gathered(own: Tensor, group: ProcessGroup, sizes: Sequence[int]) -> Tensor:
    return choose_transport("all_gather", own, group).all_gather(own, group, 0, sizes, None).wait()


def _summed_slices(packed: Tensor, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    """Return this rank's slice of the sum of ``packed`` over the ranks."""
    own = sizes[group.rank()]
    transport = choose_transport("all_to_all", packed, group)
    received = transport.all_to_all(packed, group, (own,) * group.size(), sizes).wait()
    return tree_sum(received.split(own)) if own else received


# The smallest positive fp64 number is 2^-1074, and every other fp64 number is a multiple of it.
_LEAST_EXPONENT = 1074


def exact_total(values: Iterable[float], *, groups: Sequence[ProcessGroup], what: str) -> float:
    """Sum the numbers of all ranks, with one rounding to fp64; an infinite or NaN value propagates. Collective.

    Args:
        values: this rank's values, any number of them.
        groups: the groups to sum over, one after the other.
        what: name of the values, for the error message if a rank does not arrive.
    """
    values = list(values)
    others = [value for value in values if not math.isfinite(value)]
    own = sum(_in_least_units(value) for value in values if math.isfinite(value)), sum(others)
    for group in groups:
        if group.size() > 1:
            every = gather_objects(own, what, group=group)
            own = sum(units for units, _ in every), sum(other for _, other in every)
    units, other = own
    return float(other) if other != 0 else _rounded(units)


def _in_least_units(value: float) -> int:
    numerator, denominator = value.as_integer_ratio()
    return numerator << (_LEAST_EXPONENT - (denominator.bit_length() - 1))


def _rounded(units: int) -> float:
    try:
        # Python rounds the quotient of two integers once.
        return units / (1 << _LEAST_EXPONENT)
    except OverflowError:
        return math.copysign(math.inf, units)
