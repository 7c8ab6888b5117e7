"""Three ways in which context-parallel ranks attend to all positions of a sequence that they share.

``"all_gather"`` gathers keys and values. ``"a2a"`` exchanges positions for heads, so that a rank has all positions of
some heads (Ulysses). ``"p2p"`` takes keys and values one rank after the other (``ring_attention``).

Source: Jacobs et al. 2023 (arXiv:2309.14509), for the exchange.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from shardwise.core.communication import moves
from shardwise.core.communication.collectives import all_gather
from shardwise.core.errors import ConfigError
from shardwise.core.sequence_view import ContextShard
from shardwise.core.sharding import Interval, balanced_sizes, intervals_of_sizes
from shardwise.models.transformer.attention_blocks import of_one_width
from shardwise.nn.recompute import is_kept_briefly, made_again

Way = Literal["all_gather", "a2a", "p2p"]


class HeadPart(NamedTuple):
    """Some of a rank's heads.

    Attributes:
        queries: interval of query heads.
        groups: interval of key-value heads.
        queries_of_groups: for each key-value head, the number of its query heads.
    """

    queries: Interval
    groups: Interval
    queries_of_groups: tuple[int, ...]


def parts_of_heads(queries_of_groups: Sequence[int], ranks: int) -> list[HeadPart]:
    """Split heads over ranks: whole key-value heads, or query heads with copies of key-value heads if these are fewer.

    >>> [part.queries_of_groups for part in parts_of_heads((2, 2, 2), 2)]
    [(2, 2), (2,)]
    >>> [(part.queries, part.groups) for part in parts_of_heads((3, 1), 3)]
    [((0, 2), (0, 1)), ((2, 3), (0, 1)), ((3, 4), (1, 2))]

    Args:
        queries_of_groups: for each key-value head, the number of its query heads.
        ranks: number of ranks, at most that of query heads.
    """
    ends = list(accumulate(queries_of_groups))
    starts = [0, *ends[:-1]]
    if len(ends) >= ranks:
        groups = intervals_of_sizes(balanced_sizes(len(ends), ranks))
        return [
            HeadPart((starts[first], ends[last - 1]), (first, last), tuple(queries_of_groups[first:last]))
            for first, last in groups
        ]
    parts = []
    for first, last in intervals_of_sizes(balanced_sizes(ends[-1], ranks)):
        own = [i for i in range(len(ends)) if starts[i] < last and ends[i] > first]
        numbers = tuple(min(last, ends[i]) - max(first, starts[i]) for i in own)
        parts.append(HeadPart((first, last), (own[0], own[-1] + 1), numbers))
    return parts


def choose_way(asked: str, queries_of_groups: Sequence[int], ranks: int) -> Way:
    """Return the way that is asked for, or for "auto" the one that sends fewer numbers.

    With ``h`` query and ``g`` key-value heads, the exchanges of ``c`` ranks send ``4 (h + g) / c`` numbers for each
    position and width of a head in a step, and gathers with the sum of gradients ``6 g``. Exchanges are chosen only if
    all ranks get equally many heads.

    Args:
        asked: ``config.cp_comm_type``.
        queries_of_groups: for each key-value head of this rank, the number of its query heads.
        ranks: number of context-parallel ranks.

    Raises:
        ConfigError: "a2a" is asked for, and there are fewer heads than ranks.
    """
    heads, groups = sum(queries_of_groups), len(queries_of_groups)
    if asked == "auto":
        return "a2a" if groups % ranks == 0 and 4 * (heads + groups) < 6 * groups * ranks else "all_gather"
    if asked == "a2a" and heads < ranks:
        raise ConfigError(
            f"cp_comm_type 'a2a' gives each of {ranks} context-parallel ranks some of the {heads} heads that a "
            "tensor-parallel rank has; use 'all_gather' or 'p2p', or fewer ranks"
        )
    return cast(Way, asked)


def attend_to_gathered(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor, shard: ContextShard
) -> Tensor:
    """Attend to the keys and values of all ranks, which the backward gathers again.

    Args:
        attend: attention of ``query`` to keys and values of all positions.
        query: ``[b, heads, s/c, d]``.
        key, value: ``[b, groups, s/c, d]``.
        shard: the positions of each rank.

    Returns:
        ``[b, heads, s/c, d]``.
    """
    # [s/c, b, groups, d], whose ranks follow each other in memory.
    own = torch.cat([key, value], dim=-1).permute(2, 0, 1, 3).contiguous()
    along: dict[str, Any] = {"dim": 0, "group": shard.group, "sizes": shard.sizes}
    whole = shard.in_order(moves.gather_for_parts(own, **along), dim=0)

    def again() -> Tensor:
        return shard.in_order(all_gather(own.detach(), **along), dim=0)

    widths = key.size(-1), value.size(-1)
    with nullcontext() if is_kept_briefly() else made_again(whole, again):
        keys, values = whole.permute(1, 2, 0, 3).split(widths, dim=-1)
        return attend(query, keys, values)


def attend_by_heads(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shard: ContextShard,
    parts: Sequence[HeadPart],
) -> Tensor:
    """Exchange positions for heads, attend to all positions with some of the heads, and exchange back.

    Args:
        attend: attention of this rank's part of the heads.
        query, key, value, shard: as for ``attend_to_gathered``.
        parts: the heads of each rank.

    Returns:
        ``[b, heads, s/c, d]``.
    """
    width, b, own = value.size(-1), query.size(0), parts[shard.group.rank()]
    query, key, padded = of_one_width(query, key, value)
    # Heads in the order of the ranks that they go to, as rows of one position of one head.
    chosen = [
        tensor[:, slice(*heads)]
        for part in parts
        for tensor, heads in ((query, part.queries), (key, part.groups), (padded, part.groups))
    ]
    rows = torch.cat(chosen, dim=1).permute(1, 2, 0, 3).flatten(0, 1)
    numbers = [part.queries[1] - part.queries[0] for part in parts]
    counts = [n + 2 * len(part.queries_of_groups) for n, part in zip(numbers, parts, strict=True)]
    rank, sizes = shard.group.rank(), shard.sizes
    of_ranks = [counts[rank] * size for size in sizes]
    received = moves.all_to_all(
        rows, group=shard.group, output_sizes=of_ranks, input_sizes=[count * shard.size for count in counts]
    )
    found = [each.view(counts[rank], -1, *rows.shape[1:]) for each in received.split(of_ranks)]
    whole = shard.in_order(torch.cat(found, dim=1), dim=1).permute(2, 0, 1, 3)
    own_groups = len(own.queries_of_groups)
    query, key, padded = whole.split([numbers[rank], own_groups, own_groups], dim=1)
    context = attend(query, key, padded[..., :width])
    returned = [each.permute(1, 2, 0, 3).flatten(0, 1) for each in shard.of_ranks(context, dim=2)]
    back = [number * shard.size for number in numbers]
    rows = moves.all_to_all(
        torch.cat(returned),
        group=shard.group,
        output_sizes=back,
        input_sizes=[numbers[rank] * size for size in sizes],
    )
    return torch.cat([each.view(-1, shard.size, b, width) for each in rows.split(back)]).permute(2, 0, 1, 3)
