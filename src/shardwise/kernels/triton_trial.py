"""Whether Triton's kernels can be compiled and run here, found out by trying the smallest one.

Triton compiles a kernel when it is first called: its own ``ptxas`` makes machine code, and a C compiler with Python's
headers the function that launches it. Images without them import Triton all the same.

This module needs Triton: ``dispatch`` imports it where it can be had.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import _disable_current_modes

# Triton's convention: what is known when a kernel is compiled has a name in capitals.
# ruff: noqa: N803

_SIZE = 32


@triton.jit
def _double_kernel(numbers, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(numbers + place, 2.0 * tl.load(numbers + place))


def why_not(device_index: int) -> str | None:
    """Why no kernel of Triton's runs on a CUDA device, in one line; None if one does."""
    try:
        # What a caller's modes do with tensors is not tried here.
        with _disable_current_modes(), torch.cuda.device(device_index):
            numbers = torch.ones(_SIZE, device="cuda")
            _double_kernel[(1,)](numbers, SIZE=_SIZE)
            agrees = numbers.tolist() == [2.0] * _SIZE
    # Whatever is wrong with an optional package and its compilers, PyTorch's own operations run.
    except Exception as error:
        reason = (str(error).strip() or "failed").splitlines()[0]
        return f"Triton cannot run a kernel here: {type(error).__name__}: {reason}"
    return None if agrees else "the kernels of Triton that are compiled here compute wrong numbers"
