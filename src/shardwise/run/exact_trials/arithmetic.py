"""What decides on the bits of a rank's results beside the program: its device, libraries, compiler and switches."""

from __future__ import annotations

import os

import torch
from torch.distributed import ProcessGroup

from shardwise.core.communication.agreement import gather_objects
from shardwise.core.errors import ConfigError
from shardwise.kernels.compiled import compiler_version
from shardwise.kernels.products import processor_says

_SWITCHES = (
    "SHARDWISE_ONEDNN",
    "SHARDWISE_TRITON",
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
)
"""Variables by which libraries, and this one, choose among kernels whose results differ by rounding."""


def arithmetic(device: torch.device) -> dict[str, str | None]:
    """What ranks must have in common to compute the same bits, by what people call it.

    Args:
        device: that this rank computes on.
    """
    found = {
        "PyTorch": torch.__version__,
        "the processor": processor_says("model name"),
        "its instructions": torch.backends.cpu.get_cpu_capability(),
        "the C compiler": compiler_version(),
    }
    if device.type == "cuda":
        found |= {"the GPU": torch.cuda.get_device_name(device), "the CUDA version": torch.version.cuda}
    return found | {name: os.environ.get(name) for name in _SWITCHES}


def check_arithmetic(device: torch.device, *, group: ProcessGroup) -> None:
    """Refuse ranks that would compute the same thing with other bits. Collective.

    Args:
        device: that this rank computes on.
        group: all ranks.

    Raises:
        ConfigError: two ranks differ; the message says in what. On every rank.
    """
    first, *others = gather_objects(arithmetic(device), "what ranks compute with", group=group)
    for rank, other in enumerate(others, 1):
        for name in first | other:
            if first.get(name) != other.get(name):
                raise ConfigError(
                    f"parallel.exact needs ranks that compute alike: {name} is {first.get(name)} on rank 0 and "
                    f"{other.get(name)} on rank {rank}; make them the same, or leave --exact out"
                )
