"""How ranks are laid out: sizes, to a grid of ranks (pure), to process groups.

A ``Topology`` is frozen once built. Several may live in one process; ``parallel_state`` holds the ambient one.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import ConfigError, TopologyError

DEFAULT_ORDER = "tp-cp-ep-dp-pp"

EmbeddingRanks = Callable[[Sequence[int]], list[int]]


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
        self.world_size = tp * dp * pp * cp * ep
        self.name_to_size = {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "cp": cp}
        names = order.lower().split("-")
        unknown = [name for name in names if name not in self.name_to_size]
        if unknown or len(set(names)) != len(names):
            raise ConfigError(f"order {order!r} must name each of tp, cp, ep, dp, pp at most once, joined by '-'")
        for name, size in self.name_to_size.items():
            if size < 1:
                raise ConfigError(f"the size of axis {name!r} is {size}; it must be at least 1")
            if name not in names:
                if size != 1:
                    raise ConfigError(f"axis {name!r} has size {size} but the order {order!r} leaves it out")
                names.append(name)
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


def default_embedding_ranks(pp_ranks: Sequence[int]) -> list[int]:
    """First and last rank of a pipeline group: the stages that hold a tied word embedding."""
    return [pp_ranks[0]] if len(pp_ranks) == 1 else [pp_ranks[0], pp_ranks[-1]]


def default_position_embedding_ranks(pp_ranks: Sequence[int]) -> list[int]:
    """First rank of a pipeline group: the stage that holds the position embedding."""
    return [pp_ranks[0]]


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes of the axes; data parallelism takes what the others leave of the world.

    Attributes:
        tp: tensor parallelism.
        pp: pipeline parallelism.
        cp: context parallelism.
        ep: expert parallelism.
        etp: tensor parallelism of expert layers; ``tp`` if None.
        order: axes from fastest-varying to slowest.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    order: str = DEFAULT_ORDER

    def grids(self, world_size: int) -> tuple[RankGenerator, RankGenerator]:
        """The grid of the dense layers and that of the expert layers, on ``world_size`` ranks.

        Raises:
            ConfigError: the sizes do not divide the world.
        """
        etp = self.tp if self.etp is None else self.etp
        for name, size in (("tp", self.tp), ("pp", self.pp), ("cp", self.cp), ("ep", self.ep), ("etp", etp)):
            if size < 1:
                raise ConfigError(f"the size of axis {name!r} is {size}; it must be at least 1")
        dense = self.tp * self.pp * self.cp
        expert = etp * self.ep * self.pp
        if world_size % dense != 0:
            raise ConfigError(
                f"tp {self.tp} x pp {self.pp} x cp {self.cp} = {dense} does not divide the world of {world_size} ranks"
            )
        if world_size % expert != 0:
            raise ConfigError(
                f"expert tp {etp} x ep {self.ep} x pp {self.pp} = {expert} does not divide the world of "
                f"{world_size} ranks"
            )
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
        """All groups of every kind, by name, as lists of ranks. Pure."""
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
            # A process group keeps its ranks in ascending order, whatever order they are given in.
            "embd": [sorted(embedding_ranks(ranks)) for ranks in pipelines],
            "pos_embd": [sorted(position_embedding_ranks(ranks)) for ranks in pipelines],
            "ep": experts.get_ranks("ep"),
            "expt_tp": experts.get_ranks("tp"),
            "tp_ep": experts.get_ranks("tp-ep"),
            "tp_ep_pp": experts.get_ranks("tp-ep-pp"),
            "expt_dp": experts.get_ranks("dp"),
        }


@dataclass(frozen=True)
class Topology:
    """The process groups of this rank, by name; build with ``Topology.create``.

    Names: ``tp pp cp dp dp_cp mp tp_cp tp_dp tp_dp_cp embd pos_embd ep expt_tp tp_ep tp_ep_pp expt_dp``. Groups of the
    same ranks are one process group.

    Attributes:
        sizes: sizes of the axes.
        world_size: number of ranks.
        rank_in_world: this rank.
    """

    sizes: ParallelSizes
    world_size: int
    rank_in_world: int
    _ranks: Mapping[str, tuple[int, ...]] = field(repr=False)
    _groups: Mapping[str, ProcessGroup] = field(repr=False)

    @classmethod
    def create(
        cls,
        sizes: ParallelSizes | None = None,
        *,
        timeout: datetime.timedelta | None = None,
        embedding_ranks: EmbeddingRanks = default_embedding_ranks,
        position_embedding_ranks: EmbeddingRanks = default_position_embedding_ranks,
        **axes: Any,
    ) -> Topology:
        """Create all groups. Collective: every rank of the world calls it with the same arguments.

        Args:
            sizes: sizes of the axes.
            timeout: time limit of a collective; the backend's default if None.
            embedding_ranks: from a pipeline group's ranks, those that hold a tied word embedding.
            position_embedding_ranks: the same for the position embedding.
            **axes: sizes by name in place of ``sizes``, as in ``Topology.create(tp=2)``.

        Raises:
            TopologyError: ``torch.distributed`` is not initialised.
            ConfigError: the sizes do not divide the world.
        """
        if not dist.is_initialized():
            raise TopologyError(
                "torch.distributed is not initialised; call torch.distributed.init_process_group() first, "
                "or start the program with torchrun"
            )
        if sizes is None:
            sizes = ParallelSizes(**axes)
        elif axes:
            raise ConfigError(f"give sizes or axes by name, not both: {sizes} and {axes}")
        world_size, own_rank = dist.get_world_size(), dist.get_rank()
        rank_lists = sizes.rank_lists(world_size, embedding_ranks, position_embedding_ranks)
        created: dict[tuple[int, ...], ProcessGroup] = {}
        own_ranks: dict[str, tuple[int, ...]] = {}
        own_groups: dict[str, ProcessGroup] = {}
        for name, lists in rank_lists.items():
            for ranks in map(tuple, lists):
                # Every rank takes part in creating every group, in the same order.
                if ranks not in created:
                    created[ranks] = dist.new_group(list(ranks), timeout=timeout, group_desc=f"shardwise.{name}")
                if own_rank in ranks:
                    own_ranks[name], own_groups[name] = ranks, created[ranks]
        return cls(sizes, world_size, own_rank, own_ranks, own_groups)

    def __contains__(self, name: str) -> bool:
        """Whether this rank is in a group of that name (a middle stage is in no embedding group)."""
        return name in self._groups

    def group(self, name: str) -> ProcessGroup:
        """This rank's group of that name.

        Raises:
            TopologyError: there is none.
        """
        try:
            return self._groups[name]
        except KeyError:
            raise TopologyError(
                f"rank {self.rank_in_world} is in no group {name!r}; it is in {sorted(self._groups)}"
            ) from None

    def ranks(self, name: str) -> tuple[int, ...]:
        """Global ranks of this rank's group of that name, in group order."""
        self.group(name)
        return self._ranks[name]

    def size(self, name: str) -> int:
        """Number of ranks in this rank's group of that name."""
        return len(self.ranks(name))

    def rank(self, name: str) -> int:
        """This rank's place in its group of that name."""
        return self.ranks(name).index(self.rank_in_world)

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The dense grid as a DeviceMesh over the same groups, slowest axis first: ``topology.mesh["dp"]``."""
        decoder, _ = self.sizes.grids(self.world_size)
        names = [name for name in decoder.order.split("-") if name != "ep"][::-1]
        shape = [decoder.name_to_size[name] for name in names]
        grid = torch.arange(self.world_size).reshape(shape)
        device_type = "cuda" if dist.get_backend() == "nccl" else "cpu"
        return DeviceMesh.from_group(
            [self.group(name) for name in names], device_type, mesh=grid, mesh_dim_names=tuple(names)
        )

    def destroy(self) -> None:
        """Destroy the groups, so that no descriptor stays open. Collective; the topology is of no use afterwards."""
        self.__dict__.pop("mesh", None)
        for group in {id(group): group for group in self._groups.values()}.values():
            dist.destroy_process_group(group)
