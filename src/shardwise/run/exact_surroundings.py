"""The surroundings that decide on the bits of exact runs: device, libraries, compiler, switches and CUDA's kernels."""

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
"""Variables that choose among kernels, of libraries and of this one, whose results differ by rounding."""


def arithmetic(device: torch.device) -> dict[str, str | None]:
    """The facts that ranks must have in common to compute the same bits, by name.

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


# Its attributes are set by a function, which type checkers do not see.
_SETTINGS: Any = torch.utils.deterministic
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
# cuBLAS is deterministic with these values, by its documentation; the first is the larger.
_DETERMINISTIC = (":4096:8", ":16:8")
_MKL_ORDER = "MKL_CBWR"


def fix_order_of_mkl() -> None:
    """Let MKL's products have the same bits on any number of threads; before the first product of this process.

    MKL reads the variable then. On processors of other vendors it was seen to need nothing. A value that is set stays.

    Source: Intel's guide to MKL, "Obtaining numerically reproducible results".
    """
    if is_intel():
        os.environ.setdefault(_MKL_ORDER, "AUTO,STRICT")


def use_deterministic_algorithms(device: torch.device) -> None:
    """From now on let PyTorch take deterministic kernels only, or raise an error that names the operation.

    On a CPU that is ``fix_order_of_mkl``.

    Args:
        device: of the run; before anything is multiplied on it.
    """
    if device.type != "cuda":
        fix_order_of_mkl()
        return
    if os.environ.get(_WORKSPACE) not in _DETERMINISTIC:
        os.environ[_WORKSPACE] = _DETERMINISTIC[0]
    # Not needed: nothing here reads memory that was not written.
    _SETTINGS.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)


@contextlib.contextmanager
def deterministic_algorithms(device: torch.device) -> Iterator[None]:
    """``use_deterministic_algorithms`` for the length of a block."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = _SETTINGS.fill_uninitialized_memory
    use_deterministic_algorithms(device)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        _SETTINGS.fill_uninitialized_memory = filled
