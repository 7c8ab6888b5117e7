"""Avoid page faults in the memory of CPU tensors, which can take a large share of a step.

A new 32 MiB tensor causes 8,192 page faults, which take a tenth of the time of the weight gradient written into it.

- In huge pages it causes 16. Linux grants huge pages on request (``madvise(2)``, ``MADV_HUGEPAGE``) unless
  ``/sys/kernel/mm/transparent_hugepage/enabled`` is ``never``. Results do not depend on them.
- Memory that the process keeps after freeing it causes none. The GNU C library returns free memory at the end of its
  heap, and every block above 32 MiB, to the system. A training step may then fault in the same memory each time: a step
  of the demo's model has 8,000 faults, a sixth of its time, or none, depending on the addresses of the blocks.
"""

import ctypes
import os
from collections.abc import Callable
from functools import cache

from torch import Tensor

from shardwise.kernels.dispatch import HUGE_PAGES

_HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14

# Options of mallopt(3), by the environment variables that set them.
_THRESHOLDS = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_THRESHOLD_": -3}
_KEPT_BYTES = 1 << 30


def empty_in_huge_pages(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return an uninitialised tensor of ``shape`` with the dtype and device of ``like``, in huge pages if it is large,
    on a CPU, and the system has them.
    """
    empty = like.new_empty(shape)
    if HUGE_PAGES.runs(empty, size=empty.nbytes):
        advise = _madvise()
        assert advise is not None
        first = -(-empty.data_ptr() // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        last = (empty.data_ptr() + empty.nbytes) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
        # If the system refuses, only the speed changes.
        advise(first, last - first, _MADV_HUGEPAGE)
    return empty


def why_not_huge_pages() -> str | None:
    """Return why no tensor is in huge pages; None if large tensors are, as far as the system grants it."""
    return None if _madvise() is not None else "the system has no madvise"


def keep_freed_memory() -> bool:
    """Let this process keep up to 1 GiB of freed memory, and freed blocks of up to that size, for its next tensors.

    Call it in a process that repeats its work, such as training; ``shardwise train`` and ``finetune`` do. The user's
    ``MALLOC_TRIM_THRESHOLD_`` and ``MALLOC_MMAP_THRESHOLD_`` take precedence.

    Returns:
        True if the C library has these options.
    """
    set_option = _c_function("mallopt", ctypes.c_int, ctypes.c_int)
    if set_option is None:
        return False
    chosen = [set_option(number, _KEPT_BYTES) for name, number in _THRESHOLDS.items() if name not in os.environ]
    return all(chosen)


def _madvise() -> Callable[..., int] | None:
    return _c_function("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@cache
def _c_function(name: str, *argument_types: type) -> Callable[..., int] | None:
    """Return a function of Linux's C library that returns an ``int``; None if there is none."""
    # C libraries other than GNU's have no mallopt.
    function: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        # A ctypes function has this attribute; a Callable does not.
        function.argtypes = list(argument_types)  # type: ignore[attr-defined]
    return function
