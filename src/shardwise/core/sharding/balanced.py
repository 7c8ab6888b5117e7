"""The balanced rule: if ``t`` ranks split ``n`` elements, the first ``n % t`` ranks hold one element more.

There is no padding, and every rank can compute the sizes of all ranks.

Under ``fully_shard`` PyTorch makes a parameter's tensor-parallel shard a ``DTensor``. Each of ``d`` data-parallel ranks
holds ``ceil(n / d)`` of its ``n`` rows, in order; the last ranks may hold fewer rows, or none. The functions of rows
also accept an ordinary tensor, whose rows are all on this rank.

A pipeline cuts the model into ``num_stages * num_chunks`` consecutive parts. Chunk ``c`` of stage ``p`` is part
``c * num_stages + p``. Source: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.errors import ConfigError, ShardingError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
from collections.abc import Sequence
from itertools import accumulate, pairwise

Interval = tuple[int, int]
"""``(start, stop)`` of consecutive indices, ``stop`` excluded."""


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise ShardingError unless ``denominator`` divides ``numerator``."""
    if denominator == 0 or numerator % denominator != 0:
        raise ShardingError(f"{numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """Return the exact quotient; raise ShardingError if there is a remainder."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def balanced_sizes(n: int, t: int) -> tuple[int, ...]:
    """Return the number of elements that each of ``t`` ranks holds of ``n``; the first ``n % t`` hold one more.

    >>> balanced_sizes(13, 4)
    (4, 3, 3, 3)
    """
    if t < 1 or n < 0:
        raise ShardingError(f"cannot split {n} elements over {t} ranks; both must be counts and the ranks at least 1")
    # torch.compile does not trace divmod.
    quotient, remainder = n // t, n % t
    return tuple(quotient + (rank < remainder) for rank in range(t))


def balanced_range(n: int, t: int, rank: int) -> Interval:
    """Return ``(start, stop)`` of a rank's part of ``n`` elements on ``t`` ranks, by the balanced rule.

    >>> balanced_range(13, 4, 1)
    (4, 7)
    """
    if not 0 <= rank < t:
        raise ShardingError(f"rank {rank} is not one of {t} ranks")
    return intervals_of_sizes(balanced_sizes(n, t))[rank]


def uneven_sizes(n: int, t: int) -> tuple[int, ...] | None:
    """Return the balanced sizes of ``n`` elements on ``t`` ranks; None, which collectives accept, if all are equal.

    >>> uneven_sizes(13, 4)
    (4, 3, 3, 3)
    >>> uneven_sizes(12, 4)
    """
    return None if n % t == 0 else balanced_sizes(n, t)


def intervals_of_sizes(sizes: Sequence[int]) -> tuple[Interval, ...]:
    """Return consecutive intervals of the given sizes, starting at 0.

    >>> intervals_of_sizes([2, 3])
    ((0, 2), (2, 5))
    """
    stops = (0, *accumulate(sizes))
    return tuple(pairwise(stops))


def checked_sizes(sizes: Sequence[int] | None, total: int, t: int, what: str) -> tuple[int, ...]:
    """Check that ``sizes`` are ``t`` counts with sum ``total`` and return a tuple; None means balanced sizes."""
    if sizes is None:
        return balanced_sizes(total, t)
    result = tuple(int(size) for size in sizes)
    if len(result) != t or sum(result) != total or min(result) < 0:
        raise ShardingError(f"{what}: sizes {list(result)} must be {t} counts, one per rank, that sum to {total}")
    return result


def checked_dim(dim: int, shape: Sequence[int]) -> int:
    """Return ``dim`` as a non-negative index into ``shape``; raise ShardingError if there is no such dimension.

    >>> checked_dim(-1, (4, 5))
    1
    """
    if not -len(shape) <= dim < len(shape):
        raise ShardingError(f"shape {list(shape)} has no dimension {dim}")
    return dim % len(shape)


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """True if data-parallel ranks split the rows of the tensor."""
    # The module is slow to import, and no DTensor exists before it is imported.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_rows(tensor: Tensor) -> Tensor:
    """Return the rows that this rank holds, not copied; no gradient flows to a ``DTensor``."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def group_of_rows(param: Tensor) -> ProcessGroup | None:
    """Return the group whose ranks split the rows of a parameter; None if no ranks do."""
    return getattr(param, "row_group", None)


def set_group_of_rows_(param: Tensor, group: ProcessGroup) -> None:
    """Set the group whose ranks split the rows of a ``DTensor``.

    PyTorch caches results by mesh, so the tensor's mesh may be an earlier, equal mesh with destroyed groups.
    """
    param.row_group = group  # type: ignore[attr-defined]


def rows_of_ranks(param: Tensor) -> list[Interval]:
    """Return the interval of a parameter's rows that each rank holds."""
    group = group_of_rows(param)
    num_ranks = 1 if group is None else group.size()
    total, each = param.size(0), -(-param.size(0) // num_ranks)
    return [(min(total, rank * each), min(total, (rank + 1) * each)) for rank in range(num_ranks)]


def first_row(param: Tensor) -> int:
    """Return the index of the first row of a parameter that this rank holds."""
    group = group_of_rows(param)
    return 0 if group is None else rows_of_ranks(param)[group.rank()][0]


def intervals_of_rows(param: Tensor) -> tuple[Interval, ...]:
    """Return the interval of a parameter's elements, in row-major order, that each rank holds."""
    elements = math.prod(param.shape[1:])
    return tuple((start * elements, stop * elements) for start, stop in rows_of_ranks(param))


def interval_of_rows(param: Tensor) -> Interval | None:
    """Return the interval of a parameter's elements that this rank holds; None if no ranks split the rows."""
    group = group_of_rows(param)
    return None if group is None else intervals_of_rows(param)[group.rank()]


def stage_layers(
    num_layers: int,
    num_stages: int,
    *,
    num_chunks: int = 1,
    first: int | None = None,
    last: int | None = None,
    count_embedding: bool = False,
    count_loss: bool = False,
) -> tuple[tuple[range, ...], ...]:
    """Return the layers, counted from 0, of each chunk of each stage.

    Each part holds at least one layer, and all parts hold about the same number. If the layers do not divide evenly,
    the first parts of the model hold one more.

    >>> stage_layers(5, 2)
    ((range(0, 3),), (range(3, 5),))
    >>> stage_layers(4, 2, num_chunks=2)
    ((range(0, 1), range(2, 3)), (range(1, 2), range(3, 4)))
    >>> stage_layers(6, 2, count_embedding=True, count_loss=True)  # 1 + 3, 3 + 1
    ((range(0, 3),), (range(3, 6),))
    >>> [len(chunks[0]) for chunks in stage_layers(7, 3, count_embedding=True, count_loss=True)]
    [2, 3, 2]

    Args:
        num_layers: number of layers of the whole model.
        num_stages: number of pipeline-parallel ranks.
        num_chunks: number of parts of the model on each stage; over 1 for interleaved schedules.
        first: number of layers of the first stage, over all its chunks; None distributes layers as on other stages.
        last: the same for the last stage.
        count_embedding: whether the embedding, in the first part, counts as a layer.
        count_loss: whether output layer and loss, in the last part, together count as a layer.

    Returns:
        ``[stage][chunk]``, ranges of consecutive layers.

    Raises:
        ConfigError: there are more parts than layers, or ``first`` and ``last`` leave no such split.
    """
    _check(num_layers, num_stages, num_chunks, first, last)
    if first is not None and count_embedding:
        raise ConfigError(f"the first stage is given {first} layers, so the embedding cannot be counted; choose one")
    if last is not None and count_loss:
        raise ConfigError(f"the last stage is given {last} layers, so the loss cannot be counted; choose one")
    num_parts = num_stages * num_chunks
    given: dict[int, int] = {}
    for stage, count in ((0, first), (num_stages - 1, last)):
        if count is not None:
            sizes = balanced_sizes(count, num_chunks)
            given |= {chunk * num_stages + stage: size for chunk, size in enumerate(sizes)}
    free = [part for part in range(num_parts) if part not in given]
    weights = {part: int(count_embedding and part == 0) + int(count_loss and part == num_parts - 1) for part in free}
    counts = given | _dealt_out(num_layers - sum(given.values()), weights)
    intervals = intervals_of_sizes([counts[part] for part in range(num_parts)])
    return tuple(
        tuple(range(*intervals[chunk * num_stages + stage]) for chunk in range(num_chunks))
        for stage in range(num_stages)
    )


def _dealt_out(num_layers: int, weights: dict[int, int]) -> dict[int, int]:
    """Give each part one layer, and each further layer to the lightest part; ties go to the earliest."""
    counts = dict.fromkeys(weights, 1)
    for _ in range(num_layers - len(counts)):
        lightest = min(counts, key=lambda part: (counts[part] + weights[part], part))
        counts[lightest] += 1
    return counts


def _check(num_layers: int, num_stages: int, num_chunks: int, first: int | None, last: int | None) -> None:
    if num_stages < 1 or num_chunks < 1:
        raise ConfigError(f"{num_stages} pipeline stages of {num_chunks} chunks: there must be at least 1 of each")
    if num_layers < num_stages * num_chunks:
        of_chunks = f" of {num_chunks} chunks" if num_chunks > 1 else ""
        raise ConfigError(
            f"{num_layers} layers cannot be dealt out to {num_stages} pipeline stages{of_chunks}: each needs at least "
            "one layer; use fewer stages or chunks, or more layers"
        )
    fixed = {"first": first, "last": last}
    if num_stages == 1:
        wrong = {name: count for name, count in fixed.items() if count not in (None, num_layers)}
        if wrong:
            raise ConfigError(f"there is one pipeline stage, with all {num_layers} layers, and it was given {wrong}")
        return
    for name, count in fixed.items():
        if count is not None and count < num_chunks:
            raise ConfigError(
                f"the {name} stage is given {count} layers for its {num_chunks} chunks; give at least one each"
            )
    given = [count for count in fixed.values() if count is not None]
    left, others = num_layers - sum(given), (num_stages - len(given)) * num_chunks
    if left < others or (others == 0 and left != 0):
        raise ConfigError(
            f"of {num_layers} layers the first stage is given {first} and the last {last}, which leaves {left} for "
            f"the other {num_stages - len(given)} stages of {num_chunks} chunks; each chunk needs at least one layer"
        )
