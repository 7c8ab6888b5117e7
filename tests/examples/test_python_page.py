"""docs/python.md: its calls do what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from harness.program import run

BLOCKS = re.findall(
    r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8"), re.DOTALL
)


@pytest.mark.slow
def test_the_page_of_calls_from_python(tmp_path, monkeypatch, capsys):
    """All blocks as one script, on one rank."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    num_threads = torch.get_num_threads()
    # For a model as small as this, more only wait for each other.
    torch.set_num_threads(1)
    names = {"__name__": "page"}
    try:
        for block in BLOCKS:
            exec(block, names)
    finally:
        torch.set_num_threads(num_threads)
    printed = capsys.readouterr().out
    assert names["done"].last_loss < names["done"].first_loss
    assert Path(names["done"].checkpoint) == Path("runs/base/checkpoints/step-00000004")
    assert names["text"]
    assert "12 things" in printed
    assert [(each.prompt, each.sample) for each in names["samples"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(measured.sum < 0 for measured in names["scores"])
    assert names["imported"].can_generate
    assert [message["role"] for message in names["messages"]] == ["user", "assistant", "user", "assistant"]
    assert set(names["measured"].metrics) == {"loss", "perplexity", "bits per byte"}
    for folder in ("tuned", "preferred"):
        assert any((tmp_path / folder).glob("*.safetensors")), folder
    assert names["plan"].worst.total > 0
    assert names["best"].plan.worst.total < 2**30
    assert names["rank"].rank == 3
    assert names["largest"].text.batch_size > 1
    assert names["lines"][-1] == "checkpoints of step 4: the same bits"
    assert names["same"]


@pytest.mark.matrix
def test_the_page_on_two_ranks_of_torchrun(tmp_path):
    """All blocks but the last, which plans and compares: its functions join no ranks."""
    (tmp_path / "script.py").write_text("".join(BLOCKS[:-1]), encoding="utf-8")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--local-addr", "127.0.0.1"]
    done = run(*torchrun, "script.py", folder=tmp_path, SHARDWISE_CACHE=tmp_path / "cache", OMP_NUM_THREADS="1")
    assert done.stdout.count("12 things") == 1
    for folder in ("tuned", "preferred"):
        assert any((tmp_path / folder).glob("*.safetensors")), folder
