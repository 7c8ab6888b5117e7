"""The examples of docs/inference.md run."""

import pytest
from harness.page import run_example


@pytest.mark.ranks(2)
def test_the_example_of_the_page_runs(group, monkeypatch):
    assert run_example("inference.md", monkeypatch) == [("length", 8, 0), ("length", 30, 30), True]
