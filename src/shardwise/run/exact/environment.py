"""The environment that determines the bits of exact runs: device, libraries, compiler, switches and CUDA kernels."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.deterministic
from torch.distributed import ProcessGroup

from shardwise.core.communication.agreement import gather_objects
from shardwise.core.errors import ConfigError
from shardwise.kernels.compiled import compiler_version
from shardwise.kernels.products import is_intel, processor_says

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
"""Environment variables that choose between kernels with different rounding, in Shardwise and in other libraries."""


def arithmetic(device: torch.device) -> dict[str, str | None]:
    """Return the properties that must be equal on all ranks for them to compute the same bits, by name.

    Args:
        device: this rank's device.
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
    """Check that all ranks compute the same bits. Collective.

    Raises:
        ConfigError: two ranks differ in a property, which the message names; on every rank.
    """
    first, *others = gather_objects(arithmetic(device), "what ranks compute with", group=group)
    for rank, other in enumerate(others, 1):
        for name in first | other:
            if first.get(name) != other.get(name):
                raise ConfigError(
                    f"parallel.exact needs ranks that compute alike: {name} is {first.get(name)} on rank 0 and "
                    f"{other.get(name)} on rank {rank}; make them the same, or leave --exact out"
                )


# PyTorch sets the attributes of this module in a function, which type checkers do not see.
_SETTINGS: Any = torch.utils.deterministic
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
# According to its documentation cuBLAS is deterministic with these values. The first is the larger workspace.
_DETERMINISTIC = (":4096:8", ":16:8")
_MKL_ORDER = "MKL_CBWR"


def fix_order_of_mkl() -> None:
    """Make MKL's products have the same bits on any number of threads.

    Call it before the first product of this process, when MKL reads the variable. A value set by the user stays. MKL
    did not need the variable on processors of other vendors.

    Source: Intel's guide to MKL, "Obtaining numerically reproducible results".
    """
    if is_intel():
        os.environ.setdefault(_MKL_ORDER, "AUTO,STRICT")


def use_deterministic_algorithms(device: torch.device) -> None:
    """Make PyTorch use only deterministic kernels; an operation without one raises an error that names it.

    On a CPU this is ``fix_order_of_mkl``. Call it before the first product on the device.

    Args:
        device: device of the run.
    """
    if device.type != "cuda":
        fix_order_of_mkl()
        return
    if os.environ.get(_WORKSPACE) not in _DETERMINISTIC:
        os.environ[_WORKSPACE] = _DETERMINISTIC[0]
    # Filling is not needed, because Shardwise reads no uninitialized memory.
    _SETTINGS.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)


@contextlib.contextmanager
def deterministic_algorithms(device: torch.device) -> Iterator[None]:
    """Apply ``use_deterministic_algorithms`` during the block."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = _SETTINGS.fill_uninitialized_memory
    use_deterministic_algorithms(device)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        _SETTINGS.fill_uninitialized_memory = filled
