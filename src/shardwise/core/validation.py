"""Checks of tensor values; each check reads the data, so it can be disabled.

Reading data from a GPU synchronizes the host with the device. Ids on CUDA are therefore not read where they are used.
Inside ``DeferredChecks``, which every training step uses, the host reads the outcome together with the step's other
numbers and raises the same error as on a CPU. Elsewhere the check is an assertion on the device.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.core.errors import VocabularyError

_of_thread = threading.local()

_P = ParamSpec("_P")
_R = TypeVar("_R")


def on_host(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run ``function``, which computes with indices, outside of modes such as the one of fake tensors."""

    @functools.wraps(function)
    def call(*args: _P.args, **options: _P.kwargs) -> _R:
        with _disable_current_modes():
            return function(*args, **options)

    return call


def validation_applies() -> bool:
    """True if values can be read now: not during compilation, and not while a CUDA graph is captured."""
    if torch.compiler.is_compiling():
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


class DeferredChecks:
    """Defers the checks of ``check_ids`` in its ``with`` block, and returns their outcome as a tensor.

    Use it in a loop that reads other numbers from the device anyway::

        with DeferredChecks() as checks:
            loss = model(tokens, labels=labels).mean()
            loss.backward()
        loss, failed = torch.stack([loss.detach(), checks.failed(loss.device)]).tolist()   # one synchronisation
        if failed:
            checks.run()                       # raises the error of the first that failed
        optimizer.step()

    Inside the block, ids that are out of range are replaced by id 0. The block affects only the thread that enters it.
    """

    def __init__(self) -> None:
        self._flags: list[Tensor] = []
        self._checks: list[Callable[[], None]] = []

    def __enter__(self) -> DeferredChecks:
        self._before = deferred_checks()
        _of_thread.checks = self
        return self

    def __exit__(self, *exception: object) -> None:
        _of_thread.checks = self._before

    def add(self, failed: Tensor, check: Callable[[], None]) -> None:
        """Record a check that raises, and a bool scalar on the device that is True if the check fails."""
        self._flags.append(failed)
        self._checks.append(check)

    def failed(self, device: torch.device) -> Tensor:
        """Return 1.0 if any check has failed, otherwise 0.0, as an fp32 scalar on ``device``."""
        if not self._flags:
            return torch.zeros((), device=device)
        return torch.stack(self._flags).any().float()

    def run(self) -> None:
        """Run the recorded checks in order; this synchronizes with the device."""
        for check in self._checks:
            check()


def deferred_checks() -> DeferredChecks | None:
    """Return the active ``DeferredChecks`` of this thread, if any."""
    found: DeferredChecks | None = getattr(_of_thread, "checks", None)
    return found


def check_ids(
    ids: Tensor,
    vocab_size: int,
    *,
    what: str,
    ignore_index: int | None = None,
    may_wait: bool = False,
) -> None:
    """Raise VocabularyError for ids that are not integers or, if ``validation_applies``, outside the vocabulary.

    Inside ``DeferredChecks`` the range check is deferred. Elsewhere ids on CUDA are asserted on the device
    (``torch._assert_async``), as in PyTorch's own embedding, so that a failure ends the program at a later operation.
    ``may_wait`` checks immediately on CUDA as well, which synchronizes. ``ignore_index`` is valid too. ``what`` names
    the ids.
    """
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise VocabularyError(f"{what} of shape {list(ids.shape)} is of {ids.dtype}; ids are of an integer dtype")
    if ids.numel() == 0 or not validation_applies():
        return
    wrong = (ids < 0) | (ids >= vocab_size)
    if ignore_index is not None:
        wrong &= ids != ignore_index
    allowed = "" if ignore_index is None else f" (and is not ignore_index {ignore_index})"
    message = f"is outside the vocabulary of {vocab_size} ids{allowed}"
    deferred = deferred_checks()
    if deferred is not None:
        deferred.add(wrong.any(), partial(_raise_first, ids, wrong, what, message))
    elif ids.is_cuda and not may_wait:
        torch._assert_async(~wrong.any(), f"a {what} {message}")
    elif wrong.any():
        _raise_first(ids, wrong, what, message)


def _raise_first(ids: Tensor, wrong: Tensor, what: str, message: str) -> None:
    where = wrong.nonzero()
    if where.size(0):
        position = where[0].tolist()
        raise VocabularyError(f"{what} {int(ids[tuple(position)])} at position {position} {message}")


def safe_to_look_up(ids: Tensor, vocab_size: int) -> Tensor:
    """Return the ids; inside ``DeferredChecks``, ids that are out of range are replaced by 0."""
    if torch.compiler.is_compiling() or deferred_checks() is None:
        return ids
    return ids.masked_fill((ids < 0) | (ids >= vocab_size), 0)
