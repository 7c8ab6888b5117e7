"""The machines of a plan: memory besides the tensors of a step, memory of a host, and the time of a step.

Sizes of the transports and of a checkpoint are those of the code. The constants here are assumptions, which the report
names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shardwise.core.communication.transports.channel import channel_bytes
from shardwise.core.communication.transports.shared_memory import MAX_RANKS

if TYPE_CHECKING:
    from shardwise.plan.plan import Plan, RankPlan

PROCESS_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
"""Host memory of Python and PyTorch in each process, by the device that it computes on."""

CONTEXT_BYTES = 1 << 30
"""Memory of a GPU for CUDA's context, its libraries and NCCL."""

SLACK = 0.05
"""Memory of a GPU that the allocator holds and cannot use, as a share of the peak of tensors."""


def room_for_tensors(memory: int, device_type: str) -> int:
    """Bytes of a rank's ``memory`` that tensors may take."""
    return int(max(0, memory - CONTEXT_BYTES) / (1 + SLACK)) if device_type == "cuda" else memory


def beyond_tensors(tensors: int, device_type: str) -> int:
    """Bytes of a GPU besides a peak of tensors; 0 on a CPU."""
    return CONTEXT_BYTES + round(SLACK * tensors) if device_type == "cuda" else 0


@dataclass(frozen=True)
class Channels:
    """Shared memory of equal groups of ranks on a host: bytes of one group, number of groups and of their ranks.

    ``axis`` is ``"all"`` for the group of all ranks.
    """

    axis: str
    ranks: int
    groups: int
    num_bytes: int


@dataclass(frozen=True)
class Surroundings:
    """Memory besides the tensors of a step, in bytes, on the host of the rank that needs the most.

    ``batches`` are the samples of a step, on a GPU also of the next; ``snapshot`` the copies for asynchronous saves.
    ``processes``, ``context`` and ``slack`` are assumed; the last two are 0 on a CPU, and ``tensors`` is 0 with GPUs.
    """

    ranks: int
    channels: tuple[Channels, ...]
    batches: int
    snapshot: int
    processes: int
    tensors: int
    context: int
    slack: int

    @classmethod
    def of(cls, plan: Plan, ranks_per_host: int) -> Surroundings:
        """The surroundings of the rank that needs the most, whose host has ``ranks_per_host`` ranks at most."""
        workload, mesh, worst = plan.workload, plan.mesh, plan.worst
        on_cuda, training = workload.device_type == "cuda", workload.settings.training
        first = worst.rank - worst.rank % ranks_per_host
        host = range(first, min(first + ranks_per_host, mesh.world_size))
        of_stages = {rank.stage: rank for rank in plan.stages}
        alike = [of_stages.get(rank // (mesh.tp * mesh.dp), worst) for rank in host]
        with torch.device("meta"):
            samples = workload.batch(mesh.micro_batch_size, with_lengths=True)
        batches = mesh.num_micro_batches(workload) * sum(each.nbytes for each in samples.tensors.values())
        saves = training.asynchronous_saves and (training.save_every or training.save_minutes)
        return cls(
            len(host),
            () if on_cuda else tuple(_channels(worst, host)),
            batches * (2 if on_cuda else 1),
            sum(rank.step.saved for rank in alike) if saves else 0,
            len(host) * PROCESS_BYTES[workload.device_type],
            0 if on_cuda else sum(rank.total for rank in alike),
            CONTEXT_BYTES if on_cuda else 0,
            round(SLACK * worst.total) if on_cuda else 0,
        )

    @property
    def host(self) -> int:
        """Bytes of the host's memory in all."""
        shared = sum(each.groups * each.num_bytes for each in self.channels)
        return self.tensors + shared + self.ranks * self.batches + self.snapshot + self.processes

    @property
    def beyond(self) -> int:
        """Bytes of the device of a rank besides the peak of its step; 0 on a CPU, whose memory is the host's."""
        return self.context + self.slack + self.batches if self.context else 0


def _channels(rank: RankPlan, host: range) -> Iterable[Channels]:
    """The groups that exchange more than messages, if all of their ranks are on the host."""
    axes = {call.axis for call in rank.calls if call.axis and call.name != "send"}
    known: list[set[tuple[int, ...]]] = []
    for axis in ("tp", "dp", "cp", "pp", "embd", "ep", "expert_dp"):
        groups = {group for number in host if set(group := rank.mesh.group(number, axis)) <= set(host)}
        ranks = len(rank.mesh.group(rank.rank, axis))
        # Groups of the same ranks are one.
        if axis in axes and groups and groups not in known and 2 <= ranks <= MAX_RANKS:
            known.append(groups)
            yield Channels(axis, ranks, len(groups), channel_bytes(ranks))
    if len(host) == rank.mesh.world_size and 2 <= len(host) <= MAX_RANKS:
        yield Channels("all", len(host), 1, channel_bytes(len(host)))


@dataclass(frozen=True)
class Rates:
    """Rates of the machines, as the user states them, in FLOP/s and bytes per second; None if not stated."""

    flops: float | None = None
    within_host: float | None = None
    between_hosts: float | None = None
    ranks_per_host: int = 8


@dataclass(frozen=True)
class StepTime:
    """An estimate of a step's time on one rank, in seconds.

    Each product runs at the stated peak, and each collective is a ring that is as fast as its slowest link.
    ``communication`` is None for an axis whose rate is not stated.
    """

    compute: float
    idle: float
    communication: dict[str, float | None]

    @classmethod
    def of(cls, rank: RankPlan, idle_share: float, rates: Rates) -> StepTime | None:
        """The estimate; None without the rate of the device."""
        if rates.flops is None:
            return None
        compute = rank.flops / rates.flops
        times: dict[str, float | None] = {}
        for call, number in rank.calls.items():
            away = rank.leaving(call, rates.ranks_per_host)
            if call.name != "send":
                # A ring waits for its slowest link.
                hosts = {each // rates.ranks_per_host for each in (*rank.group(call), rank.rank)}
                away = float(len(hosts) > 1)
            seconds: float | None = 0.0
            for share, rate in ((1 - away, rates.within_host), (away, rates.between_hosts)):
                if share and seconds is not None:
                    seconds = None if rate is None else seconds + share * number * rank.volume(call) / rate
            before = times.get(call.axis, 0.0)
            times[call.axis] = None if before is None or seconds is None else before + seconds
        return cls(compute, compute * idle_share, times)

    @property
    def least(self) -> float:
        """Seconds if products hide all communication."""
        return self.compute + self.idle

    @property
    def most(self) -> float | None:
        """Seconds if no communication is hidden; None if its time is unknown."""
        total = self.least
        for seconds in self.communication.values():
            if seconds is None:
                return None
            total += seconds
        return total
