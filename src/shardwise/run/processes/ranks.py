"""This process as one of the ranks that train together."""

import datetime
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

# torch.distributed.checkpoint needs this module, whose functions have the process group of the moment of its import as
# a default argument. Were that a real group, its threads would be kept for good, and might abort the interpreter while
# it ends; so it is imported while there is none.
import torch.distributed.nn.functional
from torch.distributed import ProcessGroup

from shardwise.core.communication.context import backends_of
from shardwise.core.errors import ConfigError
from shardwise.run.processes.devices import choose_device, join, prepare_overlap, process_group_of
from shardwise.run.processes.watch import Watch
from shardwise.training.bounds import DEFAULT_TIMEOUT, launcher_number

# Ranks start at different times: what they import may come from a slow disk.
_JOINING_SECONDS = 600.0
_HOST_LIMIT = datetime.timedelta(days=1)
_STREAM_LIMIT = datetime.timedelta(hours=1)


@dataclass(frozen=True)
class Ranks:
    """Who this process is.

    Attributes:
        rank: this rank in the world.
        local_rank: this rank among those of this machine.
        world_size: number of ranks.
        device: where this rank computes.
        why_device: why there.
        own_control: a group of all ranks on the CPU, where the world's is on another device.
        watch: of this rank's waits; None if nobody watches.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    own_control: ProcessGroup | None = None
    watch: Watch | None = None
    why_device: str = ""

    @property
    def world(self) -> ProcessGroup:
        """All ranks, on their devices."""
        group = dist.group.WORLD
        assert group is not None
        return group

    @property
    def control(self) -> ProcessGroup:
        """All ranks, to agree on what each does alone: one may take hours for it, as the time limit is a day."""
        return self.world if self.own_control is None else self.own_control

    def phase(self, doing: str, *, limited: bool = False) -> AbstractContextManager[None]:
        """A context in which this rank is ``doing`` that, for messages; see ``Watch.phase``."""
        return nullcontext() if self.watch is None else self.watch.phase(doing, limited=limited)

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.rank == 0

    def on_first(self, callback: Callable[[Any], object] | None) -> Callable[[Any], object]:
        """What calls ``callback`` on the first rank, and does nothing on the others or without one."""
        return callback if callback is not None and self.is_first else lambda _: None


@contextmanager
def open_ranks(
    device: Literal["auto", "cpu", "cuda"], *, timeout: float = DEFAULT_TIMEOUT, overlaps: bool = False
) -> Iterator[Ranks]:
    """Join the other ranks for the length of the block.

    The launcher (``shardwise``, torchrun) says who this rank is in RANK, WORLD_SIZE and LOCAL_RANK; without them it is
    the only one.

    Args:
        device: where to compute; "auto" takes a GPU if there is one for each rank of this machine.
        timeout: seconds that a rank waits for another in a step, and for one that shows no sign of life anywhere; see
            ``Watch``.
        overlaps: collectives are to run beside products on a GPU; see ``prepare_overlap``.

    Raises:
        ConfigError: "cuda" is asked for and there is no GPU for this rank, or another rank has it; or this process has
            joined a process group already.
        LaunchError: the other ranks cannot be reached, or do not come.
    """
    if dist.is_initialized():
        raise ConfigError(
            "this process has joined a process group already, and a function of shardwise.run joins one of its own; "
            "call it before torch.distributed.init_process_group or after destroy_process_group"
        )
    world_size, rank = launcher_number("WORLD_SIZE", least=1) or 1, launcher_number("RANK") or 0
    local_rank, num_local = (
        launcher_number("LOCAL_RANK") or 0,
        launcher_number("LOCAL_WORLD_SIZE", least=1) or world_size,
    )
    if overlaps and device != "cpu" and torch.version.cuda is not None:
        prepare_overlap()
    where, why_device = choose_device(device, local_rank=local_rank, num_local=num_local)
    use_cuda = where.type == "cuda"
    if use_cuda:
        torch.cuda.set_device(where)
    joining = datetime.timedelta(seconds=max(timeout, _JOINING_SECONDS))
    # One rank needs nobody, nor does one that something else left RANK=0 and WORLD_SIZE=1 for.
    if world_size > 1 or {"RANK", "MASTER_ADDR"} <= os.environ.keys():
        join(where, local_rank=local_rank, num_local=num_local, timeout=joining)
    else:
        dist.init_process_group(**process_group_of(where, 1), store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    watch: Watch | None = None
    failed = False
    try:
        # A collective ends at the watch's limit, which is another in a step than while ranks prepare; the groups' own
        # limits are for what the watch cannot see.
        world = dist.group.WORLD
        assert world is not None
        limit = max(_STREAM_LIMIT if use_cuda else _HOST_LIMIT, datetime.timedelta(seconds=timeout))
        for device_type in backends_of(world):
            world._get_backend(torch.device(device_type))._set_default_timeout(limit)
        control = dist.new_group(backend="gloo", timeout=_HOST_LIMIT) if use_cuda and world_size > 1 else None
        if world_size > 1:
            store = dist.distributed_c10d._get_default_store()
            watch = Watch(store, rank, world_size, limit=timeout, waits_in_stream=use_cuda)
            watch.start()
        yield Ranks(rank, local_rank, world_size, where, control, watch, why_device)
    except BaseException:
        failed = True
        raise
    finally:
        if watch is not None:
            watch.stop()
        if failed and use_cuda:
            # Destroying waits for the collectives that the device has been given, which this rank may have left others
            # alone in, or they it.
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()
