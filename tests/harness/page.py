"""Run the examples of the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch.distributed as dist

DOCS = Path(__file__).parents[2] / "docs"


def run_example(name: str, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Run the Python blocks of a page as one program, on the ranks of a test."""
    text = (DOCS / name).read_text(encoding="utf-8")
    script = "\n".join(re.findall(r"^```python\n(.*?)```", text, re.DOTALL | re.MULTILINE))
    assert script
    # The ranks of a test are already in a group, and leave it later.
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **alone: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    shown: list[object] = []
    exec(compile(script, name, "exec"), {"print": shown.append})
    return shown
