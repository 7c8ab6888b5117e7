"""Checks of this machine before a run starts: devices, compilers, shared memory and network interfaces."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import combinations

import torch

from shardwise.core.communication.transports.channel import channel_bytes
from shardwise.core.communication.transports.shared_memory import MAX_RANKS
from shardwise.kernels.compiled import why_no_compiler
from shardwise.run.processes.ranks import addresses_towards, interface_of, is_loopback
from shardwise.run.quantities import shown_bytes

SHARED_MEMORY_FOLDER = "/dev/shm"
# Files of the drivers of NVIDIA's and of AMD's GPUs.
_DRIVERS = {"NVIDIA's": "/proc/driver/nvidia/version", "AMD's": "/dev/kfd"}
# A run of CPU ranks has at most one channel for each axis and one for all ranks.
_CHANNELS = 4
# The size for containers in NVIDIA's guide to NCCL, "Troubleshooting".
_NCCL_BYTES = 1 << 30


def find_problems() -> list[str]:
    """Return the reasons why runs on this machine would fail or leave its GPUs unused, each with a remedy."""
    return [*_unused_gpus(), *_compilers(), *_shared_memory(), *_peers(), *_interfaces()]


def _unused_gpus() -> Iterator[str]:
    if torch.cuda.is_available():
        return
    if torch.version.cuda is None and torch.version.hip is None:
        why = "was built without support for them: install the build that PyTorch's installation page names"
    else:
        why = "finds none: check the driver and CUDA_VISIBLE_DEVICES"
    for makers, path in _DRIVERS.items():
        if os.path.exists(path):
            yield f"this machine has a driver for {makers} GPUs, and PyTorch {torch.__version__} {why}"


def _compilers() -> Iterator[str]:
    if not torch.cuda.is_available():
        return
    if find_spec("triton") is None:
        yield "there is a GPU and no package triton, so Shardwise's kernels do not run: install triton"
    elif (why := why_no_compiler()) is not None:
        yield f"Triton needs a C compiler to load its kernels, and {why}: install gcc or set CC"


def _shared_memory() -> Iterator[str]:
    if not os.path.isdir(SHARED_MEMORY_FOLDER):
        return
    num_gpus, free = torch.cuda.device_count(), shutil.disk_usage(SHARED_MEMORY_FOLDER).free
    needed = _NCCL_BYTES if num_gpus > 1 else _CHANNELS * channel_bytes(MAX_RANKS)
    if free < needed:
        user = "NCCL between GPUs" if num_gpus > 1 else f"{MAX_RANKS} CPU ranks"
        yield (
            f"{SHARED_MEMORY_FOLDER} has {shown_bytes(free)} left, and {user} may need {shown_bytes(needed)}: free "
            "some, or start the container with --shm-size=1g"
        )


def _peers() -> Iterator[str]:
    apart = [
        pair
        for pair in combinations(range(torch.cuda.device_count()), 2)
        if not torch.cuda.can_device_access_peer(*pair)
    ]
    if apart:
        pairs = ", ".join(f"{one} and {other}" for one, other in apart[:4]) + (", ..." if len(apart) > 4 else "")
        yield (
            f"GPUs {pairs} cannot access each other's memory, so that messages go through the host's: use tp only "
            "between others, and look at nvidia-smi topo -m"
        )


def _interfaces() -> Iterator[str]:
    existing = [name for _, name in socket.if_nameindex()]
    master = os.environ.get("MASTER_ADDR")
    towards = None
    if master:
        try:
            here, _ = addresses_towards(master)
            # The first host may know its own name as loopback, which tells nothing of the other hosts.
            towards = None if is_loopback(here) else interface_of(here)
        except OSError as error:
            yield f"MASTER_ADDR {master} cannot be reached ({error}): use a name or an address of the first host"
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = os.environ.get(variable)
        if not value:
            continue
        chosen = [name for name in existing if _is_chosen(value, name, exactly=variable == "GLOO_SOCKET_IFNAME")]
        if not chosen:
            yield f"{variable}={value} names no network interface of this machine: use one of {', '.join(existing)}"
        elif towards is not None and towards not in chosen:
            yield f"{variable}={value} does not reach MASTER_ADDR {master}: use {towards}"


def _is_chosen(value: str, name: str, *, exactly: bool) -> bool:
    """Whether a variable chooses an interface.

    NCCL takes a list of prefixes; after ``^`` they are excluded, and after ``=`` they are whole names. gloo takes whole
    names.

    Source: NCCL's page on environment variables, ``NCCL_SOCKET_IFNAME``.
    """
    if exactly:
        return name in value.split(",")
    excludes, value = value.startswith("^"), value.removeprefix("^")
    whole, value = value.startswith("="), value.removeprefix("=")
    return excludes != any(name == each if whole else name.startswith(each) for each in value.split(",") if each)
