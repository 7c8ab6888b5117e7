"""The process groups that a model needs from the topology, as one argument."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch.distributed import ProcessGroup

from shardwise.core.errors import ConfigError
from shardwise.core.topology import Groups, Topology
from shardwise.megatron.absent import absent_names
from shardwise.megatron.core import parallel_state
from shardwise.megatron.core.parallel_state.ambient import _AMBIENT

__getattr__ = absent_names("process_groups_config")

__all__ = ["ProcessGroupCollection"]


@dataclass(init=False, repr=False, eq=False)
class ProcessGroupCollection:
    """This rank's groups, by the names of ``Topology``; None if the rank is in no such group.

    A group that was not given is a missing attribute: ``hasattr`` returns False, and reading it raises AttributeError.

    Args:
        **groups: groups by name; others may be set later.

    Raises:
        ConfigError: a name that is not a field.

    Attributes:
        tp: tensor parallel.
        pp: pipeline parallel.
        mp: tensor and pipeline parallel.
        embd: stages that hold a (tied) word embedding.
        pos_embd: stages that hold the position embedding.
        cp: context parallel.
        tp_cp: tensor and context parallel.
        hcp: levels of context parallelism, innermost first.
        ep: expert parallel.
        expt_tp: tensor parallel of experts.
        tp_ep: expert tensor and expert parallel.
        tp_ep_pp: expert tensor, expert and pipeline parallel.
        tp_dp_cp: tensor, data and context parallel.
        dp: data parallel.
        dp_cp: data and context parallel.
        expt_dp: data parallel of experts.
        intra_dp_cp: part of ``dp_cp`` that holds one copy of the optimizer state.
        intra_expt_dp: part of ``expt_dp`` that holds one copy of the optimizer state.
        inter_dist_opt: ranks with the same shard of the optimizer state in every copy; None with one copy.
        intra_dist_opt: all ranks of one copy of the optimizer state.
    """

    tp: ProcessGroup | None
    pp: ProcessGroup | None
    mp: ProcessGroup | None
    embd: ProcessGroup | None
    pos_embd: ProcessGroup | None
    cp: ProcessGroup | None
    tp_cp: ProcessGroup | None
    hcp: list[ProcessGroup] | None
    ep: ProcessGroup | None
    expt_tp: ProcessGroup | None
    tp_ep: ProcessGroup | None
    tp_ep_pp: ProcessGroup | None
    tp_dp_cp: ProcessGroup | None
    dp: ProcessGroup | None
    dp_cp: ProcessGroup | None
    expt_dp: ProcessGroup | None
    intra_dp_cp: ProcessGroup | None
    intra_expt_dp: ProcessGroup | None
    inter_dist_opt: ProcessGroup | None
    intra_dist_opt: ProcessGroup | None

    def __init__(self, **groups: Any) -> None:
        _check_names("Unknown attribute", groups)
        self.__dict__.update(groups)

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessGroupCollection:
        """Return a collection of the same groups, because process groups cannot be copied."""
        return ProcessGroupCollection(**vars(self))

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if isinstance(other, ProcessGroupCollection) else NotImplemented

    def __repr__(self) -> str:
        given = vars(self)
        groups = ", ".join(f"{name}({_sizes(given[name])})" for name in _GETTERS if name in given)
        return f"ProcessGroupCollection({groups or 'empty'})"

    @classmethod
    def from_topology(cls, topology: Topology, *, required_pgs: Iterable[str] | None = None) -> ProcessGroupCollection:
        """Collect this rank's groups of ``topology``.

        Args:
            topology: source of the groups.
            required_pgs: names of the fields to fill; all if None.

        Raises:
            ConfigError: a name that is not a field.
        """
        wanted = _requested(required_pgs)
        groups: dict[str, Any] = {name: topology.group(name) if name in topology else None for name in wanted}
        if "hcp" in wanted and (levels := getattr(topology.sizes, "hcp", None)) is not None:
            groups["hcp"] = [topology.group(f"hcp{level}") for level in range(len(levels))]
        return cls(**groups)

    @classmethod
    def use_mpu_process_groups(cls, required_pgs: Iterable[str] | None = None) -> ProcessGroupCollection:
        """Collect this rank's groups of the ambient topology.

        Args:
            required_pgs: names of the fields to fill; all if None.

        Raises:
            NotInitializedError: ``initialize_model_parallel`` was not called.
            ConfigError: a name that is not a field.
        """
        groups = {}
        for name in _requested(required_pgs):
            getter, options = _GETTERS[name]
            # Looked up at each call, so that a test can replace it.
            groups[name] = getattr(parallel_state, getter)(**options)
        return cls(**groups)


# Getter of each group of the ambient topology; unchecked if this rank may be in no such group.
_UNCHECKED = {"check_initialized": False}
_GETTERS: dict[str, tuple[str, dict[str, bool]]] = {
    "tp": ("get_tensor_model_parallel_group", {}),
    "pp": ("get_pipeline_model_parallel_group", {}),
    "mp": ("get_model_parallel_group", {}),
    "embd": ("get_embedding_group", _UNCHECKED),
    "pos_embd": ("get_position_embedding_group", _UNCHECKED),
    "cp": ("get_context_parallel_group", {}),
    "tp_cp": ("get_tensor_and_context_parallel_group", {}),
    "hcp": ("get_hierarchical_context_parallel_groups", _UNCHECKED),
    "ep": ("get_expert_model_parallel_group", {}),
    "expt_tp": ("get_expert_tensor_parallel_group", {}),
    "tp_ep": ("get_expert_tensor_and_model_parallel_group", {}),
    "tp_ep_pp": ("get_expert_tensor_model_pipeline_parallel_group", {}),
    "tp_dp_cp": ("get_tensor_and_data_parallel_group", {"with_context_parallel": True}),
    "dp": ("get_data_parallel_group", {}),
    "dp_cp": ("get_data_parallel_group", {"with_context_parallel": True}),
    "expt_dp": ("get_expert_data_parallel_group", {}),
    "intra_dp_cp": ("get_data_parallel_group", {"with_context_parallel": True, "partial_data_parallel": True}),
    "intra_expt_dp": ("get_expert_data_parallel_group", {"partial_expert_data_parallel": True}),
    "inter_dist_opt": ("get_inter_distributed_optimizer_instance_group", _UNCHECKED),
    "intra_dist_opt": ("get_intra_distributed_optimizer_instance_group", {}),
}


def _group_of(collection: ProcessGroupCollection | None, name: str) -> ProcessGroup:
    """Return the collection's group, or the ambient topology's if the collection has none."""
    group: ProcessGroup | None = getattr(collection, name, None)
    return _AMBIENT.group(name) if group is None else group


def _groups_of(collection: ProcessGroupCollection | None) -> Groups:
    """Return the collection, by default the ambient topology's, as the engine's groups; None for what it lacks."""
    given = collection or ProcessGroupCollection.use_mpu_process_groups()
    names = {"pp": "pp", "dp": "dp", "embd": "embd", "experts": "tp_ep", "expert_tp": "expt_tp", "expert_dp": "expt_dp"}
    return Groups(_group_of(given, "tp"), **{name: getattr(given, own, None) for name, own in names.items()})


def _requested(required_pgs: Iterable[str] | None) -> list[str]:
    names = list(_GETTERS if required_pgs is None else required_pgs)
    _check_names("Invalid process groups requested", names)
    return names


def _check_names(what: str, names: Iterable[str]) -> None:
    unknown = sorted(set(names) - _GETTERS.keys())
    if unknown:
        raise ConfigError(f"{what}: {', '.join(unknown)}; there are {', '.join(_GETTERS)}")


def _sizes(group: Any) -> Any:
    if isinstance(group, list):
        return [_sizes(level) for level in group]
    return None if group is None else group.size()
