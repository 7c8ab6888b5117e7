"""The example of docs/data_parallel.md runs, and gives every rank the same."""

import re
from pathlib import Path

import pytest
import torch.distributed as dist

PAGE = Path(__file__).parents[2] / "docs" / "data_parallel.md"


@pytest.mark.ranks(2)
def test_the_example_of_the_page_runs(group, monkeypatch):
    (script,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    # The ranks of a test have joined already, and leave later.
    monkeypatch.setattr(dist, "init_process_group", lambda backend: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    shown = []
    exec(compile(script, str(PAGE), "exec"), {"print": shown.append})
    everywhere = [None, None]
    dist.all_gather_object(everywhere, shown, group=group)
    assert everywhere[0] == everywhere[1]
    assert re.fullmatch(r"norm \d\.\d{6}", shown[0])
