"""The grid of ranks for given axis sizes, and the ranks of every process group. Pure arithmetic."""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from shardwise.core.errors import ConfigError, ContradictionError, TopologyError


def check_size(name: str, size: Any) -> None:
    """Raise ConfigError unless ``size``, the size of axis ``name``, is an integer of at least 1."""
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

    The grid has one axis per entry of ``parallel_size``; the first varies fastest. Ranks that differ only along masked
    axes share a group.

    Args:
        world_size: number of ranks in the grid, the product of ``parallel_size`` (or a multiple: the grid is repeated).
        parallel_size: size of each axis, fastest first.
        mask: True for axes within a group.

    Returns:
        The groups, ordered by their unmasked coordinates (first axis fastest); within a group ranks ascend.

    Raises:
        ConfigError: the sizes do not divide the world, or sizes and mask differ in length.

    >>> generate_masked_orthogonal_rank_groups(8, [2, 2, 2], [False, True, False])
    [[0, 2], [1, 3], [4, 6], [5, 7]]
    """
    if len(parallel_size) != len(mask):
        raise ConfigError(f"sizes {list(parallel_size)} and mask {list(mask)} must have one entry per axis")
    product = math.prod(parallel_size)
    if product < 1 or world_size % product != 0:
        raise ConfigError(
            f"parallel sizes {list(parallel_size)} (product {product}) do not divide the world of {world_size}"
        )
    # The first axis of the array is the slowest axis of the grid.
    grid = np.arange(world_size).reshape([world_size // product, *parallel_size[::-1]])
    masked = [False, *mask[::-1]]
    inner, outer = ([axis for axis in range(grid.ndim) if bool(masked[axis]) == kind] for kind in (True, False))
    groups: list[list[int]] = (
        grid.transpose(outer + inner).reshape(-1, math.prod(grid.shape[a] for a in inner)).tolist()
    )
    return groups


class RankGenerator:
    """The grid of ranks for one order of the axes.

    Args:
        tp, ep, dp, pp, cp: sizes of the axes.
        order: names of the axes joined by "-", fastest-varying first. An axis of size 1 may be left out.
        rank_offset: number added to every rank.

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
        """Return for each axis of ``order`` whether the token (axis names joined by "-") contains it.

        Raises:
            ConfigError: the token names an axis that is not in ``order``.
        """
        wanted, names = token.split("-"), order.split("-")
        if not set(wanted) <= set(names):
            raise ConfigError(f"token {token!r} names an axis that is not in the order {order!r}")
        return [name in wanted for name in names]

    def get_ranks(self, token: str) -> list[list[int]]:
        """Return the groups of ranks that differ only along the axes in ``token``, such as ``"tp"`` or ``"tp-dp"``."""
        groups = generate_masked_orthogonal_rank_groups(
            self.world_size, self.ordered_size, self.get_mask(self.order, token)
        )
        return [[rank + self.rank_offset for rank in group] for group in groups]


DEFAULT_ORDER = "tp-cp-ep-dp-pp"

EmbeddingRanks = Callable[[list[int]], Sequence[int]]


def default_embedding_ranks(pp_ranks: Sequence[int]) -> list[int]:
    """Return the first and last rank of a pipeline group: the stages that hold a tied word embedding."""
    return [pp_ranks[0]] if len(pp_ranks) == 1 else [pp_ranks[0], pp_ranks[-1]]


def default_position_embedding_ranks(pp_ranks: Sequence[int]) -> list[int]:
    """Return the first rank of a pipeline group: the stage that holds the position embedding."""
    return [pp_ranks[0]]


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes of the parallel axes; the world size and these sizes determine the data-parallel size.

    Dense and expert layers have separate grids over the same ranks: ``tp cp dp pp`` and ``etp ep expert-dp pp``.

    Attributes:
        etp: size of tensor parallelism in expert layers; None means ``tp``.
        order: axes from fastest-varying to slowest.
        unshared: names of groups that share no process group with another group of the same ranks.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    order: str = DEFAULT_ORDER
    unshared: ClassVar[frozenset[str]] = frozenset()

    def grids(self, world_size: int) -> tuple[RankGenerator, RankGenerator]:
        """Return the grid of the dense layers and the grid of the expert layers on ``world_size`` ranks."""
        etp = self.tp if self.etp is None else self.etp
        for name, size in (("tp", self.tp), ("pp", self.pp), ("cp", self.cp), ("ep", self.ep), ("etp", etp)):
            check_size(name, size)
        dense, expert = self.tp * self.pp * self.cp, etp * self.ep * self.pp
        for what, size in (
            (f"tp {self.tp} x pp {self.pp} x cp {self.cp}", dense),
            (f"expert tp {etp} x ep {self.ep} x pp {self.pp}", expert),
        ):
            if world_size % size != 0:
                raise TopologyError(f"{what} = {size} does not divide the world of {world_size} ranks")
        decoder = RankGenerator(self.tp, 1, world_size // dense, self.pp, self.cp, self.order)
        experts = RankGenerator(etp, self.ep, world_size // expert, self.pp, 1, self.order)
        if decoder.get_ranks("pp") != experts.get_ranks("pp"):
            raise ConfigError(
                f"order {self.order!r} puts dense and expert layers of one rank on different pipeline stages; "
                "put pp last or make the expert sizes match"
            )
        return decoder, experts

    def rank_lists(
        self,
        world_size: int,
        embedding_ranks: EmbeddingRanks = default_embedding_ranks,
        position_embedding_ranks: EmbeddingRanks = default_position_embedding_ranks,
    ) -> dict[str, list[list[int]]]:
        """Return all groups of each name, as lists of ascending ranks.

        The functions select, from a pipeline group's ranks, those with a tied word embedding, or with the position
        embedding.
        """
        decoder, experts = self.grids(world_size)
        pipelines = decoder.get_ranks("pp")
        return {
            "tp": decoder.get_ranks("tp"),
            "pp": pipelines,
            "cp": decoder.get_ranks("cp"),
            "dp": decoder.get_ranks("dp"),
            "dp_cp": decoder.get_ranks("dp-cp"),
            "mp": decoder.get_ranks("tp-pp"),
            "tp_cp": decoder.get_ranks("tp-cp"),
            "tp_dp": decoder.get_ranks("tp-dp"),
            "tp_dp_cp": decoder.get_ranks("tp-dp-cp"),
            "embd": [_chosen(embedding_ranks, ranks, "embedding") for ranks in pipelines],
            "pos_embd": [_chosen(position_embedding_ranks, ranks, "position embedding") for ranks in pipelines],
            "ep": experts.get_ranks("ep"),
            "expt_tp": experts.get_ranks("tp"),
            "tp_ep": experts.get_ranks("tp-ep"),
            "tp_ep_pp": experts.get_ranks("tp-ep-pp"),
            "expt_dp": experts.get_ranks("dp"),
            **self._further_lists(decoder, experts),
        }

    def _further_lists(self, decoder: RankGenerator, experts: RankGenerator) -> dict[str, list[list[int]]]:
        """Return further groups, which a subclass has."""
        return {}


def _chosen(choose: EmbeddingRanks, pipeline: list[int], what: str) -> list[int]:
    ranks = list(choose(list(pipeline)))
    if not set(ranks) <= set(pipeline) or len(set(ranks)) != len(ranks):
        raise ConfigError(
            f"the function for the {what} ranks chose {ranks} from the pipeline group {pipeline}; it must choose "
            "distinct ranks of that group"
        )
    # A process group keeps its ranks in ascending order.
    return sorted(ranks)
