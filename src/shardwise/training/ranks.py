"""This process as one of the ranks that train together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

# torch.distributed.checkpoint needs this module, whose functions have the process group of the moment of its import as
# a default argument. Were that a real group, its threads would be kept for good, and might abort the interpreter while
# it ends; so it is imported while there is none.
import torch.distributed.nn.functional

from shardwise.errors import ConfigError


@dataclass(frozen=True)
class Ranks:
    """Who this process is.

    Attributes:
        rank: this rank in the world.
        local_rank: this rank among those of this machine.
        world_size: number of ranks.
        device: where this rank computes.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.rank == 0


@contextmanager
def open_ranks(device: Literal["auto", "cpu", "cuda"]) -> Iterator[Ranks]:
    """Join the other ranks for the length of the block.

    The launcher (``shardwise``, torchrun) says who this rank is in RANK, WORLD_SIZE and LOCAL_RANK; without them it is
    the only one.

    Args:
        device: where to compute; "auto" takes a GPU if there is one for each rank of this machine.

    Raises:
        ConfigError: "cuda" is asked for and there is no GPU for this rank.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and num_gpus <= local_rank:
        raise ConfigError(f"device is 'cuda' but this machine has {num_gpus} GPUs for {num_local} ranks; use 'cpu'")
    use_cuda = device == "cuda" or (device == "auto" and num_gpus >= num_local)
    where = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(where)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if use_cuda else "gloo")
    else:
        dist.init_process_group("nccl" if use_cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield Ranks(rank, local_rank, world_size, where)
    finally:
        dist.destroy_process_group()
