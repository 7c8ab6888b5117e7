"""How many of our functions lie between the call of a layer and its communication."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import shardwise
from shardwise.layers import ColumnLinear

PACKAGE = Path(shardwise.__file__).parent.as_posix() + "/"


def names(frame: FrameType) -> tuple[str, str]:
    """File and function of a frame; the file is empty where it is not of the package."""
    path = frame.f_code.co_filename
    return path.removeprefix(PACKAGE) if path.startswith(PACKAGE) else "", frame.f_code.co_qualname


def calls_until(stop: Callable[[str, str], bool], function: Callable[[], Any]) -> list[str]:
    """Our functions that ``function()`` calls, one after the other or in each other, before the first ``stop``."""
    called: list[str] = []
    stopped = False

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal stopped
        file, name = names(frame)
        if event == "call" and file and not stopped:
            stopped = stop(file, name)
            if not stopped:
                called.append(f"{file}:{name}")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    assert stopped, called
    return called


def is_transport(file: str, _: str) -> bool:
    return file.startswith("communication/transports/") and not file.endswith("transports/__init__.py")


@pytest.mark.ranks(2)
def test_from_a_column_layer_to_the_transport(group):
    layer = ColumnLinear(6, 10, group=group, sequence_parallel=True)
    input_ = torch.randn(4, 2, 6, requires_grad=True)
    # What is set up once for a group is not on the way.
    layer(input_)
    called = calls_until(is_transport, lambda: layer(input_))
    assert called[0] == "layers/column.py:ColumnLinear.forward"
    assert len(called) <= 10, chr(10).join(called)
