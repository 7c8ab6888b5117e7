"""The most memory that a call needs at one time: by tensors, and by the process as the system sees it."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

_M_MMAP_THRESHOLD = -3


class LivePeak(TorchDispatchMode):
    """Counts the bytes of the storages that operations in the block return, and that ``count`` is told of."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> LivePeak:
        def resized(storage: Any, size: int) -> Any:
            result = self._resize(storage, size)
            self._count(storage)
            return result

        # Code that frees and fills a tensor's memory calls the method, not an operator.
        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of ``tensors``, each once."""
        for tensor in tensors:
            # A subclass around other tensors has a storage without memory.
            if not is_traceable_wrapper_subclass(tensor):
                self._count(tensor.untyped_storage())

    def _count(self, storage: torch.UntypedStorage) -> None:
        # Memory that ranks share is not of one of them, and is there before.
        if storage.filename is not None:
            return
        key, size = storage._cdata, storage.nbytes()
        held = self._sizes.get(key)
        if held is None:
            weakref.finalize(storage, self._remove, key)
        self._sizes[key] = size
        self.live += size - (held or 0)
        self.peak = max(self.peak, self.live)

    def _remove(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


def resident_peak(call: Callable[[], object]) -> int:
    """By how many bytes ``call`` raises this process's resident memory at most, files that it maps included."""
    libc = ctypes.CDLL(None)
    # A large block has memory of its own, which goes back when it is freed: what lies between blocks of the common heap
    # would be counted or not as chance has it.
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 17)
    # What was freed before goes back to the system, so that it is not used again unseen or freed during the call.
    gc.collect()
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    call()
    peak = resident("VmHWM") - before
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 25)
    return peak


def resident(field: str) -> int:
    """A field of this process's status in bytes, such as ``"VmRSS"``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
