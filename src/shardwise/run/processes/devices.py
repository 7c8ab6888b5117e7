"""Where a rank computes, why not on a GPU, and what CUDA is told before it begins."""

from __future__ import annotations

import datetime
import os
from typing import Any, Literal

import torch

from shardwise.core.errors import ConfigError

OVERLAP_VARIABLES = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCH_NCCL_HIGH_PRIORITY": "1"}
"""What lets collectives run beside products: one queue, so that a collective that is launched first begins first, and
streams of high priority for NCCL's kernels, which otherwise wait until a product leaves room."""


def prepare_overlap() -> None:
    """Set ``OVERLAP_VARIABLES``, but for those that the user has set; before anything asks CUDA for something."""
    for name, value in OVERLAP_VARIABLES.items():
        os.environ.setdefault(name, value)


def why_no_gpu(num_local: int) -> str | None:
    """Why ranks of this machine cannot have a GPU each; None if they can.

    Args:
        num_local: ranks on this machine.
    """
    if torch.version.cuda is None and torch.version.hip is None and not torch.cuda.is_available():
        return "this PyTorch was built without CUDA"
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus == 0:
        return "PyTorch finds no GPU here: there is none, no driver, or CUDA_VISIBLE_DEVICES hides them"
    if num_gpus < num_local:
        return f"this machine has {_gpus(num_gpus)} for {num_local} ranks, and each needs one of its own"
    return None


def choose_device(
    wanted: Literal["auto", "cpu", "cuda"], *, local_rank: int, num_local: int
) -> tuple[torch.device, str]:
    """The device of a rank, and why it is that.

    Args:
        wanted: "auto" takes a GPU if there is one for each rank of this machine. With "cuda" a launcher may have given
            each rank a GPU of its own, the only one that it sees.
        local_rank: this rank among those of this machine.
        num_local: ranks on this machine.

    Raises:
        ConfigError: "cuda" is wanted, and there is no GPU for this rank.
    """
    if wanted == "cpu":
        return torch.device("cpu"), "as asked for"
    refusal = why_no_gpu(num_local)
    if refusal is None:
        return torch.device("cuda", local_rank), "a GPU for each rank"
    if wanted == "auto":
        return torch.device("cpu"), refusal
    if torch.cuda.is_available() and torch.cuda.device_count() == 1:
        return torch.device("cuda", 0), "the only GPU that this rank sees"
    raise ConfigError(f"device is 'cuda', but {refusal}; start fewer ranks with --nproc, or use --device cpu")


def refuse_shared_gpus(store: Any, own_gpu: str, *, rank: int, local_rank: int, num_local: int) -> None:
    """Raise ConfigError on every rank of this host if two of them have the same GPU: NCCL would fail, or wait for ever.

    Args:
        store: joins the ranks.
        own_gpu: what tells this rank's GPU from all others, such as its UUID.
        rank: global rank; those of a host follow one another.
        local_rank: this rank among those of this host.
        num_local: ranks on this host.
    """
    peers = range(rank - local_rank, rank - local_rank + num_local)
    store.set(f"shardwise/gpu/{rank}", own_gpu)
    store.wait([f"shardwise/gpu/{peer}" for peer in peers], datetime.timedelta(minutes=10))
    seen: dict[str, int] = {}
    for peer in peers:
        gpu = store.get(f"shardwise/gpu/{peer}").decode()
        other = seen.setdefault(gpu, peer)
        if other != peer:
            raise ConfigError(
                f"ranks {other} and {peer} would share the GPU {gpu}, and NCCL needs one for each rank; start no more "
                "ranks than there are GPUs, or let each see another one (CUDA_VISIBLE_DEVICES)"
            )


def _gpus(number: int) -> str:
    return "1 GPU" if number == 1 else f"{number} GPUs"
