"""Process groups of all axes of a rank grid (``Topology``), and the process groups of a model (``Groups``).

A ``Topology`` is immutable once built. A process may have several topologies; ``parallel_state`` of the Megatron API
holds the ambient one.
"""

from __future__ import annotations

import contextlib
import datetime
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shardwise.core.communication import context
from shardwise.core.communication.agreement import agree, check_same, gather_objects
from shardwise.core.communication.context import device_of, is_gloo, is_rehearsal
from shardwise.core.communication.transports.shared_memory import close_channel
from shardwise.core.errors import ConfigError, TopologyError
from shardwise.core.rank_grid import (
    EmbeddingRanks,
    ParallelSizes,
    default_embedding_ranks,
    default_position_embedding_ranks,
)
from shardwise.core.sequence_view import DataShare
from shardwise.core.sockets import own_inodes, refuse_strangers


@dataclass(frozen=True, eq=False)
class Topology:
    """The process groups of this rank, by name; build with ``Topology.create``.

    ====================  ==================================================================================
    dense layers          ``tp cp dp pp``, and together ``dp_cp mp tp_cp tp_dp tp_dp_cp``; ``mp`` is tp and pp
    expert layers         ``expt_tp ep expt_dp``, and together ``tp_ep tp_ep_pp``
    embeddings            ``embd pos_embd``: stages that hold the word embedding, and the position embedding
    ====================  ==================================================================================

    Groups of the same ranks share one process group, except those of ``sizes.unshared``. All
    groups of this rank alone also share one, and its first collective creates its communicator. The other communicators
    are created here if the default group is bound to a device (``init_process_group(device_id=...)``).

    Attributes:
        sizes: sizes of the axes.
        world_size: number of ranks.
        rank_in_world: this rank.
        validate: whether collectives of these groups first check that their ranks agree on the call.
    """

    sizes: ParallelSizes
    world_size: int
    rank_in_world: int
    validate: bool
    _ranks: dict[str, tuple[int, ...]] = field(repr=False)
    _groups: dict[str, ProcessGroup] = field(repr=False)

    @classmethod
    def create(
        cls,
        sizes: ParallelSizes | None = None,
        *,
        timeout: datetime.timedelta | None = None,
        embedding_ranks: EmbeddingRanks = default_embedding_ranks,
        position_embedding_ranks: EmbeddingRanks = default_position_embedding_ranks,
        validate: bool = False,
        **axes: Any,
    ) -> Topology:
        """Create all groups. Collective: every rank of the world calls it with the same arguments.

        Every rank finds wrong arguments before the first group is made. If making a group fails, the groups that were
        made are destroyed. With gloo, no rank returns before all have made their groups: one that destroyed them early
        would close connections that another is still making.

        Args:
            sizes: sizes of the axes.
            timeout: timeout of a collective; None means the default group's timeout (``init_process_group(timeout=)``).
            embedding_ranks: function that selects, from a pipeline group's ranks, those with a tied word embedding.
            position_embedding_ranks: the same for the position embedding.
            validate: check now that all ranks ask for the same sizes, and before each collective of these groups that
                their ranks agree on the call. Each check costs a message.
            **axes: sizes by name instead of ``sizes``, as in ``Topology.create(tp=2)``.

        Raises:
            ConfigError: sizes out of range.
            TopologyError: ``torch.distributed`` is not initialised, the sizes do not divide the world, a group could
                not be made, or another user of this machine is connected to a rank.
            DesyncError: under ``validate``, ranks ask for different sizes.
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
        world_size, own_rank, world = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
        assert world is not None
        if validate:
            check_same(sizes, "the sizes of the topology", group=world)
        rank_lists = sizes.rank_lists(world_size, embedding_ranks, position_embedding_ranks)
        timeout = _default_timeout() if timeout is None else timeout
        before = own_inodes()
        made: dict[tuple[tuple[int, ...], bool], ProcessGroup | None] = {}
        topology = cls(sizes, world_size, own_rank, validate, {}, {})
        try:
            # Each rank creates its group of one. A rank without one helps to create another rank's, because the names
            # of later groups count these calls. Groups of one share a name, under which no rank looks for another.
            alone = [tuple(ranks) for lists in rank_lists.values() for ranks in lists if len(ranks) == 1]
            if alone:
                ranks = (own_rank,) if (own_rank,) in alone else alone[0]
                made[ranks, False] = _new_group("alone", ranks, own_rank, timeout)
            for name, lists in rank_lists.items():
                for ranks in map(tuple, lists):
                    key = ranks, name in sizes.unshared and len(ranks) > 1
                    # Every rank takes part in creating every other group, in the same order.
                    if len(ranks) > 1 and key not in made:
                        made[key] = _new_group(name, ranks, own_rank, timeout)
                    if own_rank in ranks:
                        topology._ranks[name], topology._groups[name] = ranks, made[key]  # type: ignore[assignment]
            if world_size > 1 and not is_rehearsal(world) and is_gloo(world, torch.device("cpu")):
                agree(lambda: refuse_strangers(before), group=world)
            for group in topology.groups() if validate else ():
                context.validate_calls(group)
        except BaseException:
            _destroy(made.values())
            raise
        return topology

    def __contains__(self, name: str) -> bool:
        """True if this rank belongs to a group with this name. A middle stage, for example, has no embedding group."""
        return name in self._groups

    def group(self, name: str) -> ProcessGroup:
        """Return this rank's group with the given name.

        Raises:
            TopologyError: this rank has no such group, or the topology was destroyed.
        """
        try:
            return self._groups[name]
        except KeyError:
            where = f"it is in {sorted(self._groups)}" if self._groups else "the topology was destroyed"
            raise TopologyError(f"rank {self.rank_in_world} is in no group {name!r}; {where}") from None

    def groups(self) -> list[ProcessGroup]:
        """Return all distinct groups of this rank."""
        return list({id(group): group for group in self._groups.values()}.values())

    def ranks(self, name: str) -> tuple[int, ...]:
        """Return the global ranks of the named group of this rank, in group order."""
        self.group(name)
        return self._ranks[name]

    def size(self, name: str) -> int:
        """Return the size of the named group of this rank."""
        return len(self.ranks(name))

    def rank(self, name: str) -> int:
        """Return this rank's index in its named group."""
        return self.ranks(name).index(self.rank_in_world)

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The dense grid as a DeviceMesh over the same groups, slowest axis first.

        ``fully_shard(model, mesh=topology.mesh["dp"])``, ``DTensor.from_local(x, topology.mesh["tp"], [Shard(0)])``.
        """
        decoder, _ = self.sizes.grids(self.world_size)
        names = [name for name in decoder.order.split("-") if name != "ep"][::-1]
        shape = [decoder.name_to_size[name] for name in names]
        grid = torch.arange(self.world_size).reshape(shape)
        groups = [self.group(name) for name in names]
        return DeviceMesh.from_group(groups, device_of(groups[0]).type, mesh=grid, mesh_dim_names=tuple(names))

    def destroy(self) -> None:
        """Destroy the groups and close their descriptors. Every rank should call this; a second call is a no-op."""
        if self.__dict__.pop("mesh", None) is not None:
            _make_dtensor_forget()
        groups = list(self._groups.values())
        self._groups.clear()
        self._ranks.clear()
        _destroy(groups)


def _default_timeout() -> datetime.timedelta | None:
    """Return the default group's timeout, which ``new_group`` does not inherit; None if it has none."""
    world: Any = dist.group.WORLD
    limits = [
        getattr(getattr(world._get_backend(device), "options", None), "_timeout", None)
        for device in world._device_types
    ]
    return max((limit for limit in limits if limit is not None), default=None)


def _new_group(
    name: str, ranks: tuple[int, ...], own_rank: int, timeout: datetime.timedelta | None
) -> ProcessGroup | None:
    """Create the process group of ``ranks``; return None if this rank is not in it."""
    try:
        with _unbound() if len(ranks) == 1 else contextlib.nullcontext() as device:
            group: Any = dist.new_group(list(ranks), timeout=timeout, group_desc=f"shardwise.{name}")
        if own_rank in ranks and device is not None:
            # A barrier runs on this device.
            group.bound_device_id = device
    except Exception as error:
        raise TopologyError(
            f"rank {own_rank} could not make group {name!r} of ranks {list(ranks)}: {error}; every rank must make the "
            "same groups in the same order"
        ) from error
    return group if own_rank in ranks else None


@contextlib.contextmanager
def _unbound() -> Iterator[torch.device | None]:
    """Defer the communicator of each group created in the block to its first collective.

    Yields the default group's device. By default ``new_group`` splits the communicator of a bound default group at
    once, which is collective over the world.
    """
    world: Any = dist.group.WORLD
    device: torch.device | None = world.bound_device_id
    world.bound_device_id = None
    try:
        yield device
    finally:
        world.bound_device_id = device


def _make_dtensor_forget() -> None:
    """Clear DTensor's caches, which would return destroyed groups for a later mesh that compares equal."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


def _destroy(groups: Iterable[ProcessGroup | None]) -> None:
    for group in {id(group): group for group in groups if group is not None}.values():
        close_channel(group)
        # A group that torch.distributed no longer knows was destroyed together with the default group.
        if dist.is_initialized():
            with contextlib.suppress(ValueError):
                dist.destroy_process_group(group)


@dataclass(frozen=True)
class Groups:
    """This rank's process groups, one for each kind of parallelism of a model.

    None means that the model does not use this kind of parallelism. A group of one rank means the same.

    Attributes:
        tp: tensor parallel: the ranks that split each layer.
        pp: pipeline parallel: the stages.
        dp: data parallel: the ranks that see different samples or, with ``cp``, other positions of the same samples;
            gradients are summed over them.
        cp: context parallel: the ranks of ``dp`` that share the positions of the same samples. They are consecutive.
        embd: the first and the last stage, which hold a tied embedding and output weight.
        experts: the ranks that together hold all experts of a layer, and exchange tokens: expert-tensor-parallel times
            expert-parallel, the former faster.
        expert_tp: the ranks that split each expert.
        expert_dp: the ranks that hold the same parts of the same experts.

    Raises:
        ConfigError: an argument is not a process group, or ``dp`` does not have the ranks of ``cp`` in a row.
    """

    tp: ProcessGroup
    pp: ProcessGroup | None = None
    dp: ProcessGroup | None = None
    cp: ProcessGroup | None = None
    embd: ProcessGroup | None = None
    experts: ProcessGroup | None = None
    expert_tp: ProcessGroup | None = None
    expert_dp: ProcessGroup | None = None

    def __post_init__(self) -> None:
        for spec in fields(self):
            group = getattr(self, spec.name)
            if not isinstance(group, ProcessGroup) and (spec.name == "tp" or group is not None):
                hint = "; a model on one rank takes a group of one" if group is None else ""
                raise ConfigError(f"Groups.{spec.name} is {group!r}, which is not a process group{hint}")
        if self.cp is not None and self.cp.size() > 1:
            self._check_cp(dist.get_process_group_ranks(self.cp))

    def _check_cp(self, sharing: list[int]) -> None:
        ranks = [] if self.dp is None else dist.get_process_group_ranks(self.dp)
        blocks = [ranks[first : first + len(sharing)] for first in range(0, len(ranks), len(sharing))]
        if sharing not in blocks:
            raise ConfigError(
                f"Groups.cp has the ranks {sharing}, and Groups.dp {ranks or 'is None'}; dp must have the ranks of all "
                "samples and positions (Topology's group 'dp_cp'), and those that share samples must follow each other"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Groups:
        """Return the object itself, because a process group cannot be copied."""
        return self

    @classmethod
    def of(cls, topology: Topology) -> Groups:
        """Create the groups from a topology."""
        names = {"tp": "tp", "pp": "pp", "dp": "dp_cp", "cp": "cp", "embd": "embd"}
        names |= {"experts": "tp_ep", "expert_tp": "expt_tp", "expert_dp": "expt_dp"}
        return cls(**{name: topology.group(own) for name, own in names.items() if own in topology})

    @classmethod
    def alone(cls, group: ProcessGroup) -> Groups:
        """Create the groups of a model that is whole on one rank, from a group of this rank alone."""
        return cls(tp=group, dp=group, experts=group, expert_tp=group, expert_dp=group)

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh) -> Groups:
        """Create the groups from the dimensions ``tp``, ``pp`` and ``dp`` of a mesh.

        ``tp`` is required, ``cp`` has one rank. Tied weights over several stages also need ``embd``.
        """
        names = mesh.mesh_dim_names or ()
        if "cp" in names and mesh.size(names.index("cp")) > 1:
            raise TopologyError("ranks share samples along 'cp', and no dimension has all of them; use Groups.of")
        if "tp" not in names:
            raise TopologyError(f"the mesh has the dimensions {names}; it needs one that is named 'tp'")
        return cls(**{name: mesh.get_group(name) for name in ("tp", "pp", "dp") if name in names})

    @cached_property
    def data(self) -> DataShare:
        """The samples of this rank, and its positions of each."""
        if self.dp is None:
            return DataShare()
        together = 1 if self.cp is None else self.cp.size()
        samples = self.dp.rank() // together, self.dp.size() // together
        return DataShare(samples, self.cp if together > 1 else None)

    @property
    def stage(self) -> int:
        """This rank's pipeline stage, from 0."""
        return 0 if self.pp is None else self.pp.rank()

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return 1 if self.pp is None else self.pp.size()

    def __repr__(self) -> str:
        named = ((spec.name, getattr(self, spec.name)) for spec in fields(self))
        listed = [f"{name}={dist.get_process_group_ranks(group)}" for name, group in named if group is not None]
        return f"Groups({', '.join(listed)})"


_T = TypeVar("_T")


def model_groups(groups: Groups) -> list[ProcessGroup]:
    """Return the groups whose ranks share a model, without groups of one rank; the result has at least one group."""
    found = [group for group in (groups.tp, groups.pp) if group is not None]
    return [group for group in found if group.size() > 1] or found[:1]


def gather_from_stages(value: _T, what: str, groups: Groups) -> list[_T]:
    """Gather every stage's ``value``, in stage order; with one stage, return only this rank's value."""
    return [value] if groups.num_stages == 1 or groups.pp is None else gather_objects(value, what, group=groups.pp)
