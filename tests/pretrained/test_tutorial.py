"""The tutorial of a pretrained model does what it says, each command on the page's number of ranks."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from harness.program import Program
from pretrained_models import FETCHED

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/tutorials/pretrained.md").read_text(encoding="utf-8")


def test_the_tutorial_of_a_pretrained_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text is printed by the block before; ``make`` runs in the repository, the other commands in a new folder."""
    assert FETCHED is not None
    monkeypatch.chdir(tmp_path)
    Path(".venv").mkdir()
    Path(".venv/pretrained").symlink_to(FETCHED)
    # Not the options of the make that runs the tests.
    variables = {"SHARDWISE_CACHE": tmp_path / "cache", "MAKEFLAGS": None, "MAKELEVEL": None}
    variables["PATH"] = f"{ROOT / '.venv/bin'}:{os.environ['PATH']}"
    printed = ""
    for language, block in re.findall(r"```(python|sh|text)\n(.*?)```", PAGE, re.DOTALL):
        if language == "python":
            exec(block, {})
        elif language == "text":
            assert block in printed
        else:
            with Program("sh", "-ec", block, folder=ROOT if "make" in block else tmp_path, **variables) as shell:
                printed = shell.finish().stdout
    rows = [json.loads(line) for line in Path("runs/pirate/metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 18
    assert Path("runs/pirate/adapter_model.safetensors").is_file()
