"""Process groups as one argument: what a model needs to know of the topology."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import ProcessGroup

from shardwise import parallel_state
from shardwise.topology import Topology


@dataclass
class ProcessGroupCollection:
    """This rank's groups, by the names of ``Topology``; None where the rank is in none.

    Attributes:
        tp: tensor parallel.
        pp: pipeline parallel.
        cp: context parallel.
        dp: data parallel.
        dp_cp: data and context parallel.
        mp: tensor and pipeline parallel.
        tp_cp: tensor and context parallel.
        tp_dp_cp: tensor, data and context parallel.
        embd: stages that hold a (tied) word embedding.
        pos_embd: stages that hold the position embedding.
        ep: expert parallel.
        expt_tp: tensor parallel of experts.
        tp_ep: expert tensor and expert parallel.
        tp_ep_pp: expert tensor, expert and pipeline parallel.
        expt_dp: data parallel of experts.
    """

    tp: ProcessGroup | None = None
    pp: ProcessGroup | None = None
    cp: ProcessGroup | None = None
    dp: ProcessGroup | None = None
    dp_cp: ProcessGroup | None = None
    mp: ProcessGroup | None = None
    tp_cp: ProcessGroup | None = None
    tp_dp_cp: ProcessGroup | None = None
    embd: ProcessGroup | None = None
    pos_embd: ProcessGroup | None = None
    ep: ProcessGroup | None = None
    expt_tp: ProcessGroup | None = None
    tp_ep: ProcessGroup | None = None
    tp_ep_pp: ProcessGroup | None = None
    expt_dp: ProcessGroup | None = None

    @classmethod
    def from_topology(cls, topology: Topology) -> ProcessGroupCollection:
        """All groups of ``topology`` that this rank is in."""
        names = cls.__dataclass_fields__
        return cls(**{name: topology.group(name) for name in names if name in topology})

    @classmethod
    def use_mpu_process_groups(cls) -> ProcessGroupCollection:
        """All groups of the ambient topology.

        Raises:
            TopologyError: ``initialize_model_parallel`` was not called.
        """
        return cls.from_topology(parallel_state.get_topology())
