"""How context-parallel ranks, which share the positions of a sequence, attend to those of all ranks.

- ``all_gather``: a rank gathers the keys and values of all positions for its queries, with any number of heads.
- ``a2a``: the ranks exchange positions for heads. A rank then attends as one rank does, with some of the heads.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.core.communication import moves
from shardwise.core.communication.collectives import all_gather
from shardwise.core.errors import ConfigError
from shardwise.core.sequence_view import ContextShard
from shardwise.models.config import ModelConfig
from shardwise.models.transformer.heads import LocalHeads, split_heads
from shardwise.models.transformer.masks import AttentionMask
from shardwise.nn.recompute import is_kept_briefly, made_again

Attend = Callable[[Tensor, Tensor, Tensor, AttentionMask], Tensor]
"""Attention of queries ``[b, heads, s, d]`` to keys and values ``[b, groups, keys, d]`` under a mask."""


class ContextMethod(Protocol):
    """Attention of this rank's positions to those of all context-parallel ranks.

    Args:
        attend: attention of one rank.
        query: ``[b, heads/t, s/c, d]``.
        key, value: ``[b, groups/t, s/c, d]``; the values may have another width.
        mask: mask of whole sequences.
        shard: the positions of this rank.

    Returns:
        The outputs of this rank's positions, ``[b, heads/t, s/c, d]``.
    """

    def __call__(
        self,
        attend: Attend,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: AttentionMask,
        *,
        shard: ContextShard,
        heads: LocalHeads,
    ) -> Tensor: ...


def attend_to_gathered(
    attend: Attend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    *,
    shard: ContextShard,
    heads: LocalHeads,
) -> Tensor:
    """Attend to the keys and values of all context-parallel ranks, which the backward gathers again."""
    # [s/c, b, groups, d], whose ranks follow each other in memory.
    own = torch.cat([key, value], dim=-1).permute(2, 0, 1, 3).contiguous()
    along: dict[str, Any] = {"dim": 0, "group": shard.group, "sizes": shard.sizes}
    whole = shard.in_order(moves.gather_for_parts(own, **along), dim=0)

    def again() -> Tensor:
        return shard.in_order(all_gather(own.detach(), **along), dim=0)

    widths = key.size(-1), value.size(-1)
    with nullcontext() if is_kept_briefly() else made_again(whole, again):
        keys, values = whole.permute(1, 2, 0, 3).split(widths, dim=-1)
        return attend(query, keys, values, mask)


def attend_with_own_heads(
    attend: Attend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    *,
    shard: ContextShard,
    heads: LocalHeads,
) -> Tensor:
    """Exchange positions for heads, attend to all positions with some of the heads, and exchange back.

    Each context-parallel rank has whole key-value heads with their queries. With fewer key-value heads than ranks it
    has query heads, and a copy of the keys and values that they use.

    Source: Jacobs et al. 2023 (arXiv:2309.14509).
    """
    b, _, own_size, width = query.shape
    value_width = value.size(-1)
    parts = heads.over(shard.group.size())
    mine = parts[shard.group.rank()]
    # The numbers of a position that go to each rank, and come back from it.
    there = [_num(part.queries) * width + _num(part.groups) * (width + value_width) for part in parts]
    back = [_num(part.queries) * value_width for part in parts]
    rank = shard.group.rank()
    # [b, heads, s/c, d] -> [s/c, b, heads, d], as views.
    query, key, value = (tensor.permute(2, 0, 1, 3) for tensor in (query, key, value))
    blocks: list[Tensor] = []
    for part in parts:
        cuts = (query, part.queries), (key, part.groups), (value, part.groups)
        blocks.append(torch.cat([each[:, :, slice(*own)].flatten(2) for each, own in cuts], dim=-1).flatten())
    sent, received = [own_size * b * each for each in there], [size * b * there[rank] for size in shard.sizes]
    mixed = moves.all_to_all(torch.cat(blocks), group=shard.group, input_sizes=sent, output_sizes=received)
    mixed = shard.in_order(mixed.view(shard.length, b, there[rank]), dim=0)
    sections = [_num(mine.queries) * width, _num(mine.groups) * width, _num(mine.groups) * value_width]
    query, key, value = (
        each.unflatten(2, (-1, d)).permute(1, 2, 0, 3)
        for each, d in zip(mixed.split(sections, dim=-1), (width, width, value_width), strict=True)
    )
    context = attend(query, key, value, mask.of_heads(mine, heads)).permute(2, 0, 1, 3).flatten(2)
    sent, received = [size * b * back[rank] for size in shard.sizes], [own_size * b * each for each in back]
    whole = shard.by_rank(context, dim=0).flatten()
    mixed = moves.all_to_all(whole, group=shard.group, input_sizes=sent, output_sizes=received)
    whole = torch.cat([each.view(own_size, b, -1) for each in mixed.split(received)], dim=-1)
    return whole.view(own_size, b, -1, value_width).permute(1, 2, 0, 3)


METHODS: dict[str, ContextMethod] = {"all_gather": attend_to_gathered, "a2a": attend_with_own_heads}
"""Functions by ``config.cp_comm_type``."""


def _choice(heads: LocalHeads, ranks: int, *, draws: bool) -> tuple[str, str]:
    """Return the way of ``"auto"``, and the reason.

    In a forward and a backward a rank receives the keys and values of all positions three times if it gathers them.
    If heads are exchanged, it receives its part of queries, keys, values and outputs twice, and has as much work as the
    other ranks, also if a row has documents of several lengths.
    """
    queries, groups = _num(heads.queries), _num(heads.groups)
    if draws and queries >= ranks:
        return "a2a", "dropout of attention weights with rng global"
    if groups % ranks != 0:
        return "all_gather", f"{groups} key-value heads on {ranks} ranks"
    if 2 * (queries + groups) >= 3 * groups * ranks:
        return "all_gather", f"{queries} query heads, which are more to send than {groups} key-value heads"
    return "a2a", f"{ranks} ranks divide {groups} key-value heads"


def choose_context_method(asked: str, heads: LocalHeads, ranks: int, *, draws: bool) -> str:
    """Return the name of the way in which attention works.

    Args:
        asked: ``config.cp_comm_type``.
        ranks: number of context-parallel ranks.
        draws: whether dropout draws masks of whole sequences, which only ``"a2a"`` supports.
    """
    return asked if asked != "auto" else _choice(heads, ranks, draws=draws)[0]


def describe_context_method(asked: str, heads: LocalHeads, ranks: int, *, draws: bool) -> str:
    """Return the method's name, and for ``"auto"`` the reason; arguments as for ``choose_context_method``."""
    return asked if asked != "auto" else ": ".join(_choice(heads, ranks, draws=draws))


def check_way(config: ModelConfig, tp: int, ranks: int) -> None:
    """Raise ConfigError if ``config.cp_comm_type`` is ``"a2a"`` and there are more ranks than heads."""
    kinds = config.kinds_of_heads
    fewest = min(size for heads in kinds for size in split_heads(heads.queries, heads.groups, tp).query_sizes())
    if config.cp_comm_type == "a2a" and fewest < ranks:
        raise ConfigError(
            f"cp_comm_type 'a2a' divides the query heads of a tensor-parallel rank, which are {fewest}, over {ranks} "
            f"context-parallel ranks: there are more ranks than heads; use cp {fewest} at most, or cp_comm_type "
            "'all_gather'"
        )


def _num(interval: tuple[int, int]) -> int:
    return interval[1] - interval[0]
