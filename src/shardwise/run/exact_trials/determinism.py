"""Kernels whose results do not depend on threads, for exact runs: PyTorch's on CUDA, MKL's on Intel's processors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.deterministic

from shardwise.kernels.products import is_intel

# Its attributes are set by a function, which type checkers do not see.
_SETTINGS: Any = torch.utils.deterministic
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
# Those with which cuBLAS is deterministic, by its documentation; the first is the larger.
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
