"""What workers that are ranks share: joining the process group, and timing steps that all ranks take together."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from shardwise.core.topology import Topology

NUM_RANKS = 2
COLLECTIVE_TIMEOUT = timedelta(minutes=5)


def join_ranks(store: str, rank: int, *, tp: int = NUM_RANKS) -> Topology:
    """Join the gloo group of all ranks, which meet through the file ``store``, and split every layer over ``tp``."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, NUM_RANKS),  # type: ignore[attr-defined]
        rank=rank,
        world_size=NUM_RANKS,
        timeout=COLLECTIVE_TIMEOUT,
    )
    return Topology.create(tp=tp, timeout=COLLECTIVE_TIMEOUT)


def leave_ranks(topology: Topology) -> None:
    """Leave what ``join_ranks`` joined."""
    topology.destroy()
    dist.destroy_process_group()


def seconds_of(
    step: Callable[[], object], num_steps: int, *, num_warmup_steps: int = 1, together: bool = False
) -> float:
    """Seconds that ``num_steps`` steps take on this rank; with ``together``, from when all ranks are ready."""
    # Another variant had the caches.
    for _ in range(num_warmup_steps):
        step()
    # Who times steps, or trains at scale, chooses when Python collects its garbage.
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
