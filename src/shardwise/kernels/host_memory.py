"""Fewer page faults in the memory of CPU tensors, where they would take a share of a step.

A fresh 32 MiB tensor costs 8,192 page faults, a tenth of the time of the weight gradient that is written into it.

- In huge pages it costs 16. Linux gives them to a program that asks (``madvise(2)``, ``MADV_HUGEPAGE``), where
  ``/sys/kernel/mm/transparent_hugepage/enabled`` is not ``never``. No result depends on it.
- Memory that was freed and kept costs none. The GNU C library gives back free memory at the end of its heap, and every
  block above 32 MiB as soon as it is freed, so a training step may fault in the same memory again and again (8,000
  faults in a step of the demo's model, a sixth of its time, or none, by the places of the blocks).
"""

import ctypes
import os
import sys
from collections.abc import Callable
from functools import cache

from torch import Tensor

from shardwise.kernels.dispatch import HUGE_PAGES

_HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14

# Numbers of mallopt(3), and the environment variables that say the same.
_THRESHOLDS = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_THRESHOLD_": -3}
_KEPT_BYTES = 1 << 30


def empty_in_huge_pages(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """An uninitialised tensor of ``shape``, of the dtype and on the device of ``like``; if it is large and on a CPU, in
    huge pages where the system has them.
    """
    empty = like.new_empty(shape)
    if HUGE_PAGES.runs(empty, size=empty.nbytes):
        advise = _madvise()
        assert advise is not None
        first = -(-empty.data_ptr() // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        last = (empty.data_ptr() + empty.nbytes) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
        # A refusal changes nothing but the time.
        advise(first, last - first, _MADV_HUGEPAGE)
    return empty


def why_not_huge_pages() -> str | None:
    """Why tensors are not put in huge pages; None if large ones are, as far as the system grants it."""
    return None if _madvise() is not None else "the system has no madvise"


def keep_freed_memory() -> bool:
    """Let this process keep up to 1 GiB that it frees, and blocks of up to as much, for its next tensors.

    For a process that repeats its work, as training does; ``shardwise train`` and ``finetune`` call it. The user's
    ``MALLOC_TRIM_THRESHOLD_`` and ``MALLOC_MMAP_THRESHOLD_`` have priority.

    Returns:
        True if the C library has such a setting.
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
    """A function of Linux's C library that returns an ``int``; None where there is none."""
    if not sys.platform.startswith("linux"):
        return None
    # Another C library than GNU's has no mallopt.
    function: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        # A function of ctypes; a Callable has no such attribute.
        function.argtypes = list(argument_types)  # type: ignore[attr-defined]
    return function
