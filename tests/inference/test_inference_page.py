"""The example of docs/inference.md runs."""

import re
from pathlib import Path

import pytest
import torch.distributed as dist

PAGE = Path(__file__).parents[2] / "docs" / "inference.md"


@pytest.mark.ranks(2)
def test_the_example_of_the_page_runs(group, monkeypatch):
    (script,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    # The ranks of a test have joined already, and leave later.
    monkeypatch.setattr(dist, "init_process_group", lambda backend: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    shown = []
    exec(compile(script, str(PAGE), "exec"), {"print": shown.append})
    assert shown == [True]
