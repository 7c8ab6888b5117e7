"""What docs/pipeline.md shows is what happens."""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path

import pytest
import torch.distributed as dist

from shardwise.cli.arguments import parse_command
from shardwise.cli.training import TrainArguments

PAGE = Path(__file__).parents[3] / "docs" / "pipeline.md"


def test_examples():
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.failed == 0
    assert result.attempted >= 9


def test_the_command():
    (command,) = re.findall(r"^    shardwise train (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    settings = parse_command(TrainArguments, shlex.split(command), "shardwise train").settings
    assert (settings.parallel.tp, settings.parallel.pp) == (2, 2)
    settings.check_world(4)


@pytest.mark.ranks(1, 2, 3)
def test_the_script_gives_the_same_numbers_on_any_number_of_stages(group, monkeypatch):
    (script,) = re.findall(r"```python\n(import torch\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    # The ranks of a test have joined already, and leave later.
    monkeypatch.setattr(dist, "init_process_group", lambda backend: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    shown = []
    exec(compile(script, str(PAGE), "exec"), {"print": shown.append})
    assert shown == (["loss 6.917464, gradient norm 0.903674"] if group.rank() == group.size() - 1 else [])
