"""Checks of values; each costs a look at the data, so each can be turned off.

A look at a GPU's data makes the host wait for everything that was launched. So on CUDA ids are not looked at where they
are used: inside ``DeferredChecks``, as in every step of training, their outcome is read with the step's other numbers,
and an error is that of a CPU; elsewhere it is asserted on the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from shardwise.core.errors import VocabularyError

_of_thread = threading.local()


def validation_applies() -> bool:
    """True if values can be looked at now: not while compiling, nor while a CUDA graph is captured."""
    if torch.compiler.is_compiling():
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


class DeferredChecks:
    """Inside its ``with`` block ``check_ids`` keeps its checks, and their outcome is a tensor.

    For a loop that reads other numbers of the device anyway::

        with DeferredChecks() as checks:
            loss = model(tokens, labels=labels).mean()
            loss.backward()
        loss, failed = torch.stack([loss.detach(), checks.failed(loss.device)]).tolist()   # one synchronisation
        if failed:
            checks.run()                       # raises the error of the first that failed
        optimizer.step()

    Ids that are out of range are looked up as id 0 inside the block. It concerns the thread that enters it.
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
        """Keep a check that raises, and whether it would: a bool scalar on the device."""
        self._flags.append(failed)
        self._checks.append(check)

    def failed(self, device: torch.device) -> Tensor:
        """1.0 if any check has failed, else 0.0: an fp32 scalar on ``device``."""
        if not self._flags:
            return torch.zeros((), device=device)
        return torch.stack(self._flags).any().float()

    def run(self) -> None:
        """Look now, in the order of the checks."""
        for check in self._checks:
            check()


def deferred_checks() -> DeferredChecks | None:
    """The block that this thread is in, if any."""
    found: DeferredChecks | None = getattr(_of_thread, "checks", None)
    return found


def check_ids(
    ids: Tensor,
    vocab_size: int,
    *,
    what: str,
    ignore_index: int | None = None,
    may_wait: bool = False,
    of: str | None = None,
) -> None:
    """Raise VocabularyError for ids that are no integers or, where ``validation_applies``, outside the vocabulary.

    Inside ``DeferredChecks`` the latter waits. Elsewhere ids on CUDA are asserted on the device
    (``torch._assert_async``), as those of PyTorch's own embedding are: the program ends at a later operation.

    Args:
        ids: integer tensor of any shape.
        vocab_size: ids run from 0 to ``vocab_size - 1``.
        what: name of the ids, for the message.
        ignore_index: one more id that is allowed.
        may_wait: look on CUDA too.
        of: name of the set that they are ids of, for the message; the vocabulary if None.
    """
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise VocabularyError(f"{what} of shape {list(ids.shape)} is of {ids.dtype}; ids are of an integer dtype")
    if ids.numel() == 0 or not validation_applies():
        return
    wrong = (ids < 0) | (ids >= vocab_size)
    if ignore_index is not None:
        wrong &= ids != ignore_index
    allowed = "" if ignore_index is None else f" (and is not ignore_index {ignore_index})"
    message = f"is outside {of or f'the vocabulary of {vocab_size} ids'}{allowed}"
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
    """The ids; inside ``DeferredChecks`` with 0 instead of those that are out of range."""
    if torch.compiler.is_compiling() or deferred_checks() is None:
        return ids
    return ids.masked_fill((ids < 0) | (ids >= vocab_size), 0)
