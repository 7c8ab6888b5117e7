"""The tutorial of tensor parallelism: its blocks check themselves, and it shows what its last one prints."""

from __future__ import annotations

import re

import pytest
import torch
from harness.page import DOCS, run_example

PAGE = "tutorials/tensor_parallel.md"


@pytest.mark.ranks(1, 2, 3)
def test_the_tutorial_of_tensor_parallelism(group, monkeypatch):
    try:
        shown = list(map(str, run_example(PAGE, monkeypatch)))
    finally:
        torch.set_default_dtype(torch.float32)  # The page computes in fp64.
    if group.rank() > 0:
        assert shown == []
        return
    num_collectives = 4 if group.size() > 1 else 0
    assert shown[0] == f"{group.size()} ranks: a block of {num_collectives} all-reduces equals the dense block"
    if group.size() == 2:
        (printed,) = re.findall(r"```text\n(.*?)```", (DOCS / PAGE).read_text(encoding="utf-8"), re.DOTALL)
        assert shown[1] == printed.rstrip()
