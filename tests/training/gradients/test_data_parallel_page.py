"""The example of docs/data_parallel.md runs, and gives every rank the same."""

import re

import pytest
import torch.distributed as dist
from harness.page import run_example


@pytest.mark.ranks(2)
def test_the_example_of_the_page_runs(group, monkeypatch):
    shown = run_example("data_parallel.md", monkeypatch)
    everywhere = [None, None]
    dist.all_gather_object(everywhere, shown, group=group)
    assert everywhere[0] == everywhere[1]
    assert re.fullmatch(r"norm \d\.\d{6}", shown[0])
