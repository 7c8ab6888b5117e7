"""Recomputation: what a function would keep for its backward is dropped, and computed again when backward needs it.

Built on PyTorch's non-reentrant checkpoint, so that ``torch.autograd.grad``, keyword arguments, nesting and outputs of
any kind work. What is ours: the random streams are part of the state that the recomputation starts from, and layers can
ask where they are (``is_checkpointing``, ``is_recomputing``).

Recomputation ends as soon as all that was saved is there again. A layer whose last act is a collective therefore does
it in an autograd function of its own, after the one that saves: then the recomputation never gets to it. What a layer
saves must be of the same shapes in both phases.

Source: Chen et al. 2016 (arXiv:1604.06174); Korthikanti et al. 2022 (arXiv:2205.05198), section 5.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import Enum
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.utils.checkpoint

from shardwise.random import RandomState, streams


class _Phase(Enum):
    FORWARD = "forward"
    RECOMPUTATION = "recomputation"


class _Phases(threading.local):
    """The checkpointed functions that a thread is inside of, outermost first."""

    def __init__(self) -> None:
        self.entered: list[_Phase] = []


_PHASES = _Phases()


def _innermost() -> _Phase | None:
    # Under torch.compile the compiler decides what is computed twice; a constant keeps the graph whole.
    if torch.compiler.is_compiling() or not _PHASES.entered:
        return None
    return _PHASES.entered[-1]


def is_checkpointing() -> bool:
    """Whether the calling thread is inside the first forward of a checkpointed function.

    Of nested ones the innermost counts: what runs because an outer function is recomputed, but will be recomputed once
    more itself, is in its first forward. Always False under ``torch.compile``.
    """
    return _innermost() is _Phase.FORWARD


def is_recomputing() -> bool:
    """Whether the calling thread is inside the recomputation of a checkpointed function, and what is saved is for use.

    Of nested ones the innermost counts. Always False under ``torch.compile``.
    """
    return _innermost() is _Phase.RECOMPUTATION


def is_kept_briefly() -> bool:
    """Whether either is so: what is saved now is dropped and saved again just before the backward, or used just now."""
    return bool(_PHASES.entered) and not torch.compiler.is_compiling()


class _Forward(AbstractContextManager[None]):
    def __enter__(self) -> None:
        _PHASES.entered.append(_Phase.FORWARD)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _PHASES.entered.pop()


class _Recomputation(AbstractContextManager[None]):
    """The random state of the first forward, for as long as the block lasts. Entered once for each backward."""

    def __init__(self) -> None:
        self._streams = streams()
        self._first = self._streams.snapshot()
        self._outside: list[RandomState] = []

    def __enter__(self) -> None:
        self._outside.append(self._streams.snapshot())
        self._streams.restore(self._first)
        _PHASES.entered.append(_Phase.RECOMPUTATION)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _PHASES.entered.pop()
        self._streams.restore(self._outside.pop())


def _contexts() -> tuple[_Forward, _Recomputation]:
    return _Forward(), _Recomputation()


def recomputed(function: Callable[..., Any], *args: Any, early_stop: bool = True, **kwargs: Any) -> Any:
    """Call ``function`` now and keep its arguments only; call it again when backward wants what it would have saved.

    The second call draws the random numbers of the first, from the default generators and from every ambient stream;
    afterwards they are as they were before it, whether it ends or raises. Without gradients it is a plain call.

    Args:
        function: must compute the same both times.
        args: its positional arguments, tensors or not.
        early_stop: end the second call as soon as all that was saved is there again.
        kwargs: its keyword arguments.

    Returns:
        What ``function`` returns.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    call = partial(function, **kwargs) if kwargs else function
    if torch.compiler.is_compiling():
        return torch.utils.checkpoint.checkpoint(call, *args, use_reentrant=False)
    return torch.utils.checkpoint.checkpoint(
        call, *args, use_reentrant=False, preserve_rng_state=False, context_fn=_contexts, early_stop=early_stop
    )
