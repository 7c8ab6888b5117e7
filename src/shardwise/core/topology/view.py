"""The groups that a model takes: a frozen view of a topology, a mesh, or groups made elsewhere; exchanges over them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shardwise.core.communication.agreement import gather_objects
from shardwise.core.errors import ConfigError, TopologyError
from shardwise.core.topology.groups import Topology


@dataclass(frozen=True)
class Groups:
    """This rank's process groups, one for each kind of parallelism that a model takes part in.

    None means that there is no such axis; a group of one rank means the same.

    Attributes:
        tp: tensor parallel: the ranks that split each layer.
        pp: pipeline parallel: the stages.
        dp: data parallel: the ranks that see different samples.
        embd: the first and the last stage, which hold a tied embedding and output weight.

    Raises:
        ConfigError: something that is not a process group.
    """

    tp: ProcessGroup
    pp: ProcessGroup | None = None
    dp: ProcessGroup | None = None
    embd: ProcessGroup | None = None

    def __post_init__(self) -> None:
        for spec in fields(self):
            group = getattr(self, spec.name)
            if not isinstance(group, ProcessGroup) and (spec.name == "tp" or group is not None):
                hint = "; a model on one rank takes a group of one" if group is None else ""
                raise ConfigError(f"Groups.{spec.name} is {group!r}, which is not a process group{hint}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Groups:
        """Returns the object itself, since a process group cannot be copied."""
        return self

    @classmethod
    def of(cls, topology: Topology) -> Groups:
        """Those of a topology that this rank is in."""
        named = {name: topology.group(name) for name in ("tp", "pp", "dp", "embd") if name in topology}
        return cls(**named)

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh) -> Groups:
        """The dimensions ``tp``, ``pp`` and ``dp`` of a mesh; tied weights over several stages need ``embd`` besides.

        Raises:
            TopologyError: the mesh has no dimension ``tp``.
        """
        names = mesh.mesh_dim_names or ()
        if "tp" not in names:
            raise TopologyError(f"the mesh has the dimensions {names}; it needs one that is named 'tp'")
        return cls(**{name: mesh.get_group(name) for name in ("tp", "pp", "dp") if name in names})

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
    """The groups whose ranks share a model, without those of one rank; there is at least one."""
    found = [group for group in (groups.tp, groups.pp) if group is not None]
    return [group for group in found if group.size() > 1] or found[:1]


def gather_from_stages(value: _T, what: str, groups: Groups) -> list[_T]:
    """Every stage's ``value``, in their order; this rank's alone if there is one stage."""
    return [value] if groups.num_stages == 1 or groups.pp is None else gather_objects(value, what, group=groups.pp)
