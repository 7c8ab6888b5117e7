"""Process groups as one argument: what a model needs to know of the topology."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch.distributed import ProcessGroup

from shardwise import parallel_state
from shardwise.errors import ConfigError
from shardwise.topology import Topology

__all__ = ["ProcessGroupCollection"]


@dataclass
class ProcessGroupCollection:
    """This rank's groups, by the names of ``Topology``; None where the rank is in none.

    Attributes:
        tp: tensor parallel.
        pp: pipeline parallel.
        mp: tensor and pipeline parallel.
        embd: stages that hold a (tied) word embedding.
        pos_embd: stages that hold the position embedding.
        cp: context parallel.
        tp_cp: tensor and context parallel.
        hcp: levels of context parallel, innermost first.
        ep: expert parallel.
        expt_tp: tensor parallel of experts.
        tp_ep: expert tensor and expert parallel.
        tp_ep_pp: expert tensor, expert and pipeline parallel.
        tp_dp_cp: tensor, data and context parallel.
        dp: data parallel.
        dp_cp: data and context parallel.
        expt_dp: data parallel of experts.
        intra_dp_cp: the part of ``dp_cp`` that holds one copy of the optimizer state.
        intra_expt_dp: the part of ``expt_dp`` that holds one copy of the optimizer state.
        inter_dist_opt: the same shard of the optimizer state in every copy; None with one copy.
        intra_dist_opt: all ranks of one copy of the optimizer state.
    """

    tp: ProcessGroup | None = None
    pp: ProcessGroup | None = None
    mp: ProcessGroup | None = None
    embd: ProcessGroup | None = None
    pos_embd: ProcessGroup | None = None
    cp: ProcessGroup | None = None
    tp_cp: ProcessGroup | None = None
    hcp: list[ProcessGroup] | None = None
    ep: ProcessGroup | None = None
    expt_tp: ProcessGroup | None = None
    tp_ep: ProcessGroup | None = None
    tp_ep_pp: ProcessGroup | None = None
    tp_dp_cp: ProcessGroup | None = None
    dp: ProcessGroup | None = None
    dp_cp: ProcessGroup | None = None
    expt_dp: ProcessGroup | None = None
    intra_dp_cp: ProcessGroup | None = None
    intra_expt_dp: ProcessGroup | None = None
    inter_dist_opt: ProcessGroup | None = None
    intra_dist_opt: ProcessGroup | None = None

    @classmethod
    def from_topology(cls, topology: Topology, *, required_pgs: Iterable[str] | None = None) -> ProcessGroupCollection:
        """The groups of ``topology`` that this rank is in.

        Args:
            topology: where they come from.
            required_pgs: names of the fields to fill; all if None.

        Raises:
            ConfigError: a name that is not a field.
        """
        names = list(cls.__dataclass_fields__)
        wanted = names if required_pgs is None else list(required_pgs)
        unknown = sorted(set(wanted) - set(names))
        if unknown:
            raise ConfigError(f"there are no process groups {unknown}; there are {names}")
        groups: dict[str, ProcessGroup] = {name: topology.group(name) for name in wanted if name in topology}
        collection = cls(**groups)  # type: ignore[arg-type]
        levels = topology.sizes.hcp
        if "hcp" in wanted and levels is not None:
            collection.hcp = [topology.group(f"hcp{level}") for level in range(len(levels))]
        return collection

    @classmethod
    def use_mpu_process_groups(cls, required_pgs: Iterable[str] | None = None) -> ProcessGroupCollection:
        """The groups of the ambient topology that this rank is in.

        Args:
            required_pgs: names of the fields to fill; all if None.

        Raises:
            NotInitializedError: ``initialize_model_parallel`` was not called.
            ConfigError: a name that is not a field.
        """
        return cls.from_topology(parallel_state.get_topology(), required_pgs=required_pgs)
