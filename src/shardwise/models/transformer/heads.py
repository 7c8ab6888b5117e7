"""The widths of attention heads, and the split of heads over ranks: pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from shardwise.core.errors import ConfigError
from shardwise.core.sharding import Interval, ParamLayout, balanced_sizes, intervals_of_sizes

# A larger width is a mistake. It raises an error before it takes time or memory.
_LARGEST = 1 << 30


class Heads(NamedTuple):
    """Number of query heads, number of key-value heads, and width of a head."""

    queries: int
    groups: int
    width: int


@dataclass(frozen=True)
class LatentAttention:
    """Ranks and widths of multi-head latent attention.

    Keys and values of all heads are projections of one latent of each token. A head's query and key have a part that is
    not rotated, and then a rotated part; that of the key is the same for all heads.

    Attributes:
        key_value_rank: width of the latent of keys and values.
        plain_width: width of the part of a head's query and key that is not rotated.
        rotary_width: width of the rotated part, an even number.
        value_width: width of a head's value.
        query_rank: width of a latent of queries; None if queries are a projection of the hidden states.

    Raises:
        ConfigError: a value is out of range.

    Source: DeepSeek-AI 2024 (arXiv:2405.04434), section 2.1.
    """

    key_value_rank: int
    plain_width: int
    rotary_width: int
    value_width: int
    query_rank: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (value is None and name == "query_rank") and (type(value) is not int or not 1 <= value <= _LARGEST):
                raise ConfigError(f"latent: {name} is {value!r}; it must be an integer from 1 to {_LARGEST}")
        if self.rotary_width % 2:
            raise ConfigError(f"latent: rotary_width is {self.rotary_width}; pairs are rotated, so it must be even")

    @property
    def head_width(self) -> int:
        """Width of a head's query and key."""
        return self.plain_width + self.rotary_width


@dataclass(frozen=True)
class GlobalHeads:
    """Heads of layers without a window, in a model whose layers with one have others (Gemma 4).

    Attributes:
        groups: number of key-value heads.
        width: width of a head.
        keys_are_values: whether a head's value is its key before norm and rotation, so that there is no projection.

    Raises:
        ConfigError: a value is out of range.
    """

    groups: int
    width: int
    keys_are_values: bool = False

    def __post_init__(self) -> None:
        for name in ("groups", "width"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= _LARGEST:
                raise ConfigError(f"global_heads: {name} is {value!r}; it must be an integer from 1 to {_LARGEST}")


@dataclass(frozen=True)
class LocalHeads:
    """Consecutive heads of a tensor-parallel rank: all, or those that a context-parallel rank computes.

    Attributes:
        queries_of_groups: for each of these key-value heads, the number of its query heads among them.
        first_group, first_query: number of the tensor-parallel rank's key-value and query heads before them.
    """

    queries_of_groups: tuple[int, ...]
    first_group: int = 0
    first_query: int = 0

    @property
    def is_even(self) -> bool:
        """True if all key-value heads have the same number of query heads."""
        return len(set(self.queries_of_groups)) == 1

    @property
    def groups(self) -> Interval:
        """These key-value heads, of those of the tensor-parallel rank."""
        return self.first_group, self.first_group + len(self.queries_of_groups)

    @property
    def queries(self) -> Interval:
        """These query heads, of those of the tensor-parallel rank."""
        return self.first_query, self.first_query + sum(self.queries_of_groups)

    def over(self, ranks: int) -> tuple[LocalHeads, ...]:
        """Split all heads of a tensor-parallel rank over other ranks, as ``HeadSplit`` does.

        >>> [part.groups for part in LocalHeads((2, 2)).over(3)]
        [(0, 1), (1, 2), (1, 2)]

        Args:
            ranks: number of ranks, at most the number of query heads.
        """
        ends = (0, *accumulate(self.queries_of_groups))
        if len(self.queries_of_groups) >= ranks:
            groups = intervals_of_sizes(balanced_sizes(len(self.queries_of_groups), ranks))
            return tuple(LocalHeads(self.queries_of_groups[slice(*own)], own[0], ends[own[0]]) for own in groups)
        parts = []
        for first, last in intervals_of_sizes(balanced_sizes(ends[-1], ranks)):
            numbers = [min(last, end) - max(first, start) for start, end in pairwise(ends)]
            own = [group for group, number in enumerate(numbers) if number > 0]
            parts.append(LocalHeads(tuple(numbers[group] for group in own), own[0], first))
        return tuple(parts)


@dataclass(frozen=True)
class HeadSplit:
    """The heads of each rank.

    With at least as many key-value heads as ranks, ranks hold whole groups: a key-value head and all of its query
    heads. With fewer, the query heads are split, and a rank holds a copy of each key-value head that its query heads
    use. Groups or query heads are split by the balanced rule, in order.

    Attributes:
        queries_per_group: number of query heads that share a key-value head, over all ranks.
        groups: interval of key-value heads of each rank.
        queries: interval of query heads of each rank.
    """

    queries_per_group: int
    groups: tuple[Interval, ...]
    queries: tuple[Interval, ...]

    def queries_of_groups(self, rank: int) -> tuple[int, ...]:
        """Return, for each key-value head of ``rank``, the number of its query heads on that rank."""
        return tuple(stop - start for start, stop in self._queries_by_group(rank))

    def num_first_groups(self, rank: int) -> int:
        """Return the number of key-value heads of ``rank`` that no earlier rank holds; they are its last ones."""
        start, stop = self.groups[rank]
        return stop - (start if rank == 0 else max(start, self.groups[rank - 1][1]))

    def query_sizes(self) -> tuple[int, ...]:
        """Return the number of query heads of each rank."""
        return tuple(stop - start for start, stop in self.queries)

    def qkv_layout(self, row_shape: tuple[int, ...], head_dim: int, *, has_values: bool = True) -> ParamLayout:
        """Return the layout of a query-key-value weight ``[rows, *row_shape]``.

        Its rows are one block per key-value head: its queries, its key, its value, each with ``head_dim`` rows. For
        each of its key-value heads, a rank holds the key, the value and the rank's own queries. Without ``has_values``
        a block ends with its key.
        """
        shared = 1 + has_values
        block = self.queries_per_group + shared
        intervals = []
        for rank, (first, _) in enumerate(self.groups):
            runs = []
            for group, (start, stop) in enumerate(self._queries_by_group(rank), first):
                # `shared * group` keys and values precede the queries of `group` in the weight.
                key = group * block + self.queries_per_group
                runs += [(start + shared * group, stop + shared * group), (key, key + shared)]
            intervals.append([(start * head_dim, stop * head_dim) for start, stop in runs])
        num_groups = self.groups[-1][1]
        return ParamLayout.of_intervals((num_groups * block * head_dim, *row_shape), 0, intervals)

    def _queries_by_group(self, rank: int) -> list[Interval]:
        first, last = self.queries[rank]
        n = self.queries_per_group
        return [(max(first, group * n), min(last, (group + 1) * n)) for group in range(*self.groups[rank])]


def qkv_sections(num_heads: int, num_groups: int, head_dim: int) -> tuple[tuple[Interval, ...], ...]:
    """Return the rows of queries, keys and values in a query-key-value weight; see ``HeadSplit.qkv_layout``.

    >>> qkv_sections(4, 2, 1)
    (((0, 2), (4, 6)), ((2, 3), (6, 7)), ((3, 4), (7, 8)))

    Args:
        num_heads: number of query heads.
        num_groups: number of key-value heads, a divisor of ``num_heads``.
        head_dim: number of rows of a head.
    """
    n = num_heads // num_groups
    return tuple(
        tuple(
            ((block + first) * head_dim, (block + last) * head_dim) for block in range(0, num_groups * (n + 2), n + 2)
        )
        for first, last in ((0, n), (n, n + 1), (n + 1, n + 2))
    )


def split_heads(num_heads: int, num_groups: int, world_size: int) -> HeadSplit:
    """Split attention heads over ranks.

    >>> split_heads(6, 2, 4).groups
    ((0, 1), (0, 2), (1, 2), (1, 2))

    Args:
        num_heads: number of query heads.
        num_groups: number of key-value heads, a divisor of ``num_heads``.

    Raises:
        ConfigError: there are fewer query heads than ranks.
    """
    if num_heads < world_size:
        raise ConfigError(
            f"{num_heads} attention heads cannot be split over {world_size} tensor-parallel ranks; use at most as many "
            "ranks as attention heads"
        )
    n = num_heads // num_groups
    if num_groups >= world_size:
        groups = intervals_of_sizes(balanced_sizes(num_groups, world_size))
        return HeadSplit(n, groups, tuple((start * n, stop * n) for start, stop in groups))
    queries = intervals_of_sizes(balanced_sizes(num_heads, world_size))
    return HeadSplit(n, tuple((start // n, (stop - 1) // n + 1) for start, stop in queries), queries)
