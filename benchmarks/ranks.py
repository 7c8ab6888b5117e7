"""Common code of workers that are ranks: join the process group, and time steps that all ranks run together."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from shardwise.core.topology import Topology

NUM_RANKS = 2
COLLECTIVE_TIMEOUT = timedelta(minutes=5)


def join_ranks(store: str, rank: int, *, tp: int = NUM_RANKS, world: int = NUM_RANKS) -> Topology:
    """Join the gloo group of ``world`` ranks through the file ``store``, and create a topology with this ``tp``."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world,
        timeout=COLLECTIVE_TIMEOUT,
    )
    return Topology.create(tp=tp, timeout=COLLECTIVE_TIMEOUT)


def leave_ranks(topology: Topology) -> None:
    """Leave the groups of ``join_ranks``."""
    topology.destroy()
    dist.destroy_process_group()


def seconds_of(
    step: Callable[[], object], num_steps: int, *, num_warmup_steps: int = 1, together: bool = False
) -> float:
    """Return the seconds of ``num_steps`` steps on this rank; with ``together``, starting when all ranks are ready."""
    # Warm up, because the caches are filled by another variant.
    for _ in range(num_warmup_steps):
        step()
    # No garbage collection during the steps, as usual in measurements and in large training runs.
    gc.collect()
    gc.disable()
    if together:
        dist.barrier()
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    seconds = time.perf_counter() - start
    gc.enable()
    return seconds
