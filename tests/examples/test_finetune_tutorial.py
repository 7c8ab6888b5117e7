"""The tutorial of fine-tuning does what it says, from making a tiny model to the chat with it."""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path

import pytest
import torch

from shardwise.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "tutorials" / "finetune.md").read_text(encoding="utf-8")
SAID = re.compile(r'printf "(.*)" \| ')


@pytest.mark.slow
def test_the_tutorial_of_finetuning(tmp_path, monkeypatch, capsys):
    """Each block as it stands on the page, the commands in this process; each text is printed by the block before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    num_threads = torch.get_num_threads()
    # For a model as small as this, more only wait for each other.
    torch.set_num_threads(1)
    printed, losses = "", []
    try:
        for language, block in re.findall(r"```(python|sh|text)\n(.*?)```", PAGE, re.DOTALL):
            if language == "python":
                exec(block, {})
            elif language == "text":
                assert block in printed
            else:
                printed = ""
                for line in block.splitlines():
                    said = SAID.match(line)
                    monkeypatch.setattr("sys.stdin", io.StringIO(said[1].replace(r"\n", "\n") if said else ""))
                    program, *arguments = shlex.split(SAID.sub("", line))
                    assert program == "shardwise"
                    assert main(arguments) == 0, line
                    printed += capsys.readouterr().out
                losses += map(float, re.findall(r"^loss +(\S+) nats per token", printed, re.MULTILINE))
    finally:
        torch.set_num_threads(num_threads)
    before, after = losses
    assert before > 5
    assert after < 0.1
