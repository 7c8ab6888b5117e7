"""Which functions of the package lie on the way from one place to another."""

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
    """``FILE:FUNCTION`` of a frame, such as ``nn/row.py:RowLinear.forward``; empty if it is not of the package."""
    path = frame.f_code.co_filename
    return f"{path.removeprefix(PACKAGE)}:{frame.f_code.co_qualname}" if path.startswith(PACKAGE) else ""


@contextmanager
def noting_calls(note: Callable[[str, FrameType], None]):
    """Within, ``note(name, frame)`` is called whenever a function of the package is."""

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (name := name_of(frame)):
            note(name, frame)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def calls_until(stop: Callable[[str], bool], function: Callable[[], Any]) -> list[str]:
    """Our functions that ``function()`` calls, one after the other or in each other, before the first ``stop``."""
    called: list[str] = []

    def note(name: str, _: FrameType) -> None:
        if not (called and stop(called[-1])):
            called.append(name)

    with noting_calls(note):
        function()
    assert stop(called[-1]), called
    return called[:-1]


def stacks_at(names: set[str], function: Callable[[], Any]) -> dict[str, list[str]]:
    """Our functions that are on the stack when ``function()`` first calls each of ``names``, itself the last one."""
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
