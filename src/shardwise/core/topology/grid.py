"""The grid of ranks, and the groups along its axes. Pure arithmetic."""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardwise.core.errors import ConfigError, ContradictionError


def check_size(name: str, size: Any) -> None:
    """Raise ConfigError unless ``size``, that of axis ``name``, is a whole number of at least 1."""
    try:
        is_possible = operator.index(size) >= 1 and not isinstance(size, bool)
    except TypeError:
        is_possible = False
    if not is_possible:
        raise ConfigError(f"the size of axis {name!r} is {size!r}; it must be a whole number of at least 1")


def generate_masked_orthogonal_rank_groups(
    world_size: int, parallel_size: Sequence[int], mask: Sequence[bool]
) -> list[list[int]]:
    """Partition ranks into the groups along the masked axes of the grid.

    The grid has one axis per entry of ``parallel_size``, the first varying fastest. Ranks that differ only along masked
    axes share a group.

    Args:
        world_size: number of ranks in the grid, the product of ``parallel_size`` (or a multiple: the grid is repeated).
        parallel_size: size of each axis, fastest first.
        mask: which axes lie within a group.

    Returns:
        The groups, ordered by their unmasked coordinates (first axis fastest); within a group ranks ascend.

    Raises:
        ConfigError: the sizes do not divide the world, or sizes and mask differ in length.

    >>> generate_masked_orthogonal_rank_groups(8, [2, 2, 2], [False, True, False])
    [[0, 2], [1, 3], [4, 6], [5, 7]]
    """
    if len(parallel_size) != len(mask):
        raise ConfigError(f"sizes {list(parallel_size)} and mask {list(mask)} must have one entry per axis")
    product = int(np.prod(parallel_size, dtype=np.int64))
    if product < 1 or world_size % product != 0:
        raise ConfigError(
            f"parallel sizes {list(parallel_size)} (product {product}) do not divide the world of {world_size}"
        )
    sizes = [*parallel_size, world_size // product]
    masked = [*mask, False]
    # The slowest axis of the ranks is the first of the array.
    grid = np.arange(world_size).reshape(sizes[::-1])
    slow_to_fast = list(range(len(sizes)))
    outer = [axis for axis in slow_to_fast if not masked[::-1][axis]]
    inner = [axis for axis in slow_to_fast if masked[::-1][axis]]
    group_size = int(np.prod([sizes[::-1][axis] for axis in inner], dtype=np.int64))
    groups: list[list[int]] = grid.transpose(outer + inner).reshape(-1, group_size).tolist()
    return groups


class RankGenerator:
    """The grid of ranks for one order of the axes.

    Args:
        tp, ep, dp, pp, cp: sizes of the axes.
        order: names of the axes joined by "-", fastest-varying first. An axis of size 1 may be left out.
        rank_offset: added to every rank.

    Raises:
        ConfigError: an axis of size over 1 is missing from ``order``, or ``order`` names an unknown or repeated axis.
    """

    def __init__(self, tp: int, ep: int, dp: int, pp: int, cp: int, order: str, rank_offset: int = 0) -> None:
        self.tp, self.ep, self.dp, self.pp, self.cp = tp, ep, dp, pp, cp
        self.rank_offset = rank_offset
        self.name_to_size = {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "cp": cp}
        names = str(order).lower().split("-")
        unknown = [name for name in names if name not in self.name_to_size]
        if unknown or len(set(names)) != len(names):
            raise ConfigError(f"order {order!r} must name each of tp, cp, ep, dp, pp at most once, joined by '-'")
        for name, size in self.name_to_size.items():
            check_size(name, size)
            if name not in names:
                if size != 1:
                    raise ContradictionError(f"axis {name!r} has size {size} but the order {order!r} leaves it out")
                names.append(name)
        self.world_size = tp * dp * pp * cp * ep
        self.order = "-".join(names)
        self.ordered_size = [self.name_to_size[name] for name in names]

    def get_mask(self, order: str, token: str) -> list[bool]:
        """Which axes of ``order`` the token (axis names joined by "-") contains.

        Raises:
            ConfigError: the token names an axis that is not in ``order``.
        """
        wanted, names = token.split("-"), order.split("-")
        if not set(wanted) <= set(names):
            raise ConfigError(f"token {token!r} names an axis that is not in the order {order!r}")
        return [name in wanted for name in names]

    def get_ranks(self, token: str) -> list[list[int]]:
        """The groups of ranks that differ only along the axes in ``token``, such as ``"tp"`` or ``"tp-dp"``."""
        groups = generate_masked_orthogonal_rank_groups(
            self.world_size, self.ordered_size, self.get_mask(self.order, token)
        )
        return [[rank + self.rank_offset for rank in group] for group in groups]
