"""Run as a program: what is said of Triton where it imports and cannot compile, as in slim images, as JSON.

A process of its own without a compiler in its ``PATH``. The CPU stands for a GPU up to where Triton compiles something.
"""

import contextlib
import json
import sys
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget

from shardwise.kernels import dispatch, loss_reference, triton_trial
from shardwise.kernels.dispatch import LOSS_TRITON, Call, loss_kernels

CALL = Call("cuda", torch.bfloat16)


def main():
    found = {}
    ones = torch.ones
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),
        mock.patch("torch.cuda.device", return_value=contextlib.nullcontext()),
        mock.patch("torch.ones", lambda size, dtype, device: ones(size, dtype=dtype)),
    ):
        # What launches kernels is C, compiled when Triton looks for its driver.
        found["no C compiler"] = LOSS_TRITON.why_not(CALL)

        class Driver:
            get_current_device = staticmethod(lambda: 0)
            get_current_stream = staticmethod(lambda device: 0)
            get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

        triton.runtime.driver.set_active(Driver())
        with mock.patch("triton.knobs.NvidiaTool.from_path", return_value=None):
            found["no ptxas"] = triton_trial.why_not(0)
    # On such a machine the definition runs; the CPU stands for its GPU.
    LOSS_TRITON.device_type = "cpu"
    dispatch.LOSS_CPU.min_size = 1 << 40
    with mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)):
        found["falls back"] = loss_kernels(torch.ones(4, 50)) is loss_reference
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
