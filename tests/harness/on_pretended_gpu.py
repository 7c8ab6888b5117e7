"""The process with a pretended GPU, and helpers for functions that run in it.

All tensors on the GPU are fake (``torch._subclasses.FakeTensorMode``): they have shape, dtype and device, but no
values. Therefore a training step of any size, on one of any number of ranks, takes seconds: ``join`` a group that does
nothing, create the model under ``fake_tensors``, and record with a ``StepRecorder`` the devices of tensors, waits for
the GPU, copies between devices and launches.

Limits: no kernel can be launched, and the package's reference code runs instead of its Triton kernels. Fused attention
and norms are decomposed, so the kernel that a GPU would choose is unknown. A model with fake parameters cannot be
moved. A value that is read under a recorder is 0. Operations whose output size depends on values raise an error.
"""

from __future__ import annotations

import collections
import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import ProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise

PACKAGE = str(Path(shardwise.__file__).parent) + os.sep
# Operators other than `item` that read values on the host, because the size of their result depends on the values.
_READ_VALUES = {
    "aten.nonzero.default",
    "aten.masked_select.default",
    "aten._unique2.default",
    "aten.unique_dim.default",
    "aten.equal.default",
    "aten.repeat_interleave.Tensor",
}
_INDEXING = {"aten.index.Tensor", "aten.index_put.default", "aten.index_put_.default", "aten._index_put_impl_.default"}


def join(backend: str = "cuda:fake", *, world_size: int = 1, rank: int = 0) -> ProcessGroup:
    """Become one of ``world_size`` ranks whose collectives do nothing."""
    store: Any = dist.HashStore() if "gloo" in backend else FakeStore()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    world = dist.group.WORLD
    assert world is not None
    return world


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Make all tensors created in the block fake."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


class StepRecorder(TorchDispatchMode):
    """Records what concerns the GPU inside its ``with`` block, including backward passes.

    Enter it inside ``fake_tensors()``. A place is the innermost line of the package on the stack, such as
    ``"models/transformer/masks.py:120"``, or ``"autograd"``.

    Attributes:
        waits: number of times that the host reads values and therefore waits for the GPU, by operator and place.
        copies: number of copies between devices, by ``"cpu to cuda"`` and place.
        pageable: number of these copies that the host waits for, because its memory is not pinned or the copy is
            blocking.
        operators: number of calls of each operator with a tensor on the GPU, by name.
        made: number of tensors created from no other tensor, by device, dtype, shape and place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: collections.Counter[tuple[str, str]] = collections.Counter()
        self.copies: collections.Counter[tuple[str, str]] = collections.Counter()
        self.pageable: collections.Counter[tuple[str, str]] = collections.Counter()
        self.operators: collections.Counter[str] = collections.Counter()
        self.made: collections.Counter[tuple[str, str, tuple[int, ...], str]] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, str(func)
        given = list(tensors_in((args, kwargs)))
        on_gpu = any(tensor.device.type == "cuda" for tensor in given)
        if on_gpu:
            self.operators[name] += 1
            if _reads_values(name, args):
                self.waits[name, _place()] += 1
        if name == "aten._local_scalar_dense.default" and isinstance(args[0], FakeTensor):
            return False if args[0].dtype == torch.bool else 0.0 if args[0].is_floating_point() else 0
        if name == "aten.record_stream.default":
            return None
        if name == "aten._pin_memory.default":
            pinned = torch.empty_like(args[0])
            pinned.is_pinned_here = True
            return pinned
        if func.namespace == "c10d":
            _check_backends(func, args, given)
        result = func(*args, **kwargs)
        if not given:
            for tensor in tensors_in(result):
                dtype = str(tensor.dtype).removeprefix("torch.")
                self.made[str(tensor.device), dtype, tuple(tensor.shape), _place()] += 1
        elif name in ("aten._to_copy.default", "aten.copy_.default"):
            source, target = (args[0], result) if name == "aten._to_copy.default" else (args[1], args[0])
            if source.device.type != target.device.type:
                copy = f"{source.device.type} to {target.device.type}", _place()
                self.copies[copy] += 1
                non_blocking = kwargs.get("non_blocking") or (name == "aten.copy_.default" and args[2:] == (True,))
                if not (non_blocking and any(hasattr(tensor, "is_pinned_here") for tensor in (source, target))):
                    self.pageable[copy] += 1
        return result


def _reads_values(name: str, args: Any) -> bool:
    if name in _INDEXING:
        return any(isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1])
    return name in _READ_VALUES or name == "aten._local_scalar_dense.default"


def _check_backends(func: Any, args: Any, given: list[Tensor]) -> None:
    """Refuse a tensor on a device for which the group has no backend, which fake tensors would hide."""
    names = [argument.name for argument in func._schema.arguments]
    group = ProcessGroup.unbox(args[names.index("process_group")])
    for tensor in given:
        group._get_backend(tensor.device)


def _place() -> str:
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            return f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno}"
        frame = frame.f_back
    return "autograd"


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def serve() -> None:
    """Run the request in each line of the standard input in a fork, until the input ends."""
    faulthandler.enable()
    torch.set_num_threads(1)
    # Replace PyTorch's queries to CUDA, which is missing. Triton's kernels are not chosen for a GPU this old.
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_name = lambda device=None: "pretended GPU"
    torch.cuda.max_memory_allocated = lambda device=None: 0
    torch.cuda.mem_get_info = lambda device=None: (80 << 30, 80 << 30)
    torch.cuda._exchange_device = torch.cuda._maybe_exchange_device = lambda device: 0
    torch.cuda.get_device_capability = lambda device=None: (0, 0)
    torch.accelerator.current_device_index = lambda: 0
    # Read all values of a tensor at once, not one after the other.
    FakeTensor.tolist = _read_at_once
    # The memory does not exist. The address shows which views start at the same element.
    FakeTensor.data_ptr = lambda tensor: tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.itemsize
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    for line in sys.stdin:
        request, reply = map(Path, line.split())
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _write(reply, _run(request))
            # As after any fork, do not run the exit handlers of the parent.
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if not reply.exists():
            code = os.waitstatus_to_exitcode(status)
            ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            _write(reply, (False, f"the process ended with {ended}"))


def _read_at_once(tensor: FakeTensor) -> Any:
    value = tensor.flatten()[0].item() if tensor.numel() else 0.0
    return np.full(tuple(tensor.shape), value).tolist()


def _run(request: Path) -> tuple[bool, Any]:
    try:
        module_name, path, qualname, args = pickle.loads(request.read_bytes())
        warnings.simplefilter("error")
        # The value that programs on GPUs have; others get a warning.
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        sys.path.insert(0, str(Path(path).parent))
        if module_name not in sys.modules:
            spec = importlib.util.spec_from_file_location(module_name, path)
            assert spec is not None
            assert spec.loader is not None
            module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        value = getattr(sys.modules[module_name], qualname)(*pickle.loads(args))
        return True, pickle.loads(pickle.dumps(value))
    # The test that sent the request must fail with any error.
    except BaseException:
        return False, traceback.format_exc()


def _write(reply: Path, value: tuple[bool, Any]) -> None:
    # The reader waits for the final name, and must find a complete file.
    partial = reply.with_suffix(".partial")
    partial.write_bytes(pickle.dumps(value))
    partial.replace(reply)
