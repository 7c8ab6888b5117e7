"""Trace which functions of the package a call goes through."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import shardwise

PACKAGE = Path(shardwise.__file__).parent.as_posix() + "/"


def name_of(frame: FrameType) -> str:
    """Return a frame's ``FILE:FUNCTION``, such as ``nn/row.py:RowLinear.forward``; empty for code of other packages."""
    path = frame.f_code.co_filename
    return f"{path.removeprefix(PACKAGE)}:{frame.f_code.co_qualname}" if path.startswith(PACKAGE) else ""


@contextmanager
def noting_calls(note: Callable[[str, FrameType], None]):
    """During the block, call ``note(name, frame)`` at each call of a function of the package."""

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (name := name_of(frame)):
            note(name, frame)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def calls_until(stop: Callable[[str], bool], function: Callable[[], Any]) -> list[str]:
    """Return the package's functions that ``function()`` calls, directly or not, up to the first ``stop``."""
    called: list[str] = []

    def note(name: str, _: FrameType) -> None:
        if not (called and stop(called[-1])):
            called.append(name)

    with noting_calls(note):
        function()
    assert stop(called[-1]), called
    return called[:-1]


def stacks_at(names: set[str], function: Callable[[], Any]) -> dict[str, list[str]]:
    """Return, for each of ``names``, the package's functions on the stack at its first call, innermost last."""
    stacks: dict[str, list[str]] = {}

    def note(name: str, frame: FrameType | None) -> None:
        if name in names and name not in stacks:
            stacks[name] = []
            while frame is not None:
                stacks[name].insert(0, name_of(frame))
                frame = frame.f_back

    with noting_calls(note):
        function()
    return {name: [*filter(None, stack)] for name, stack in stacks.items()}
