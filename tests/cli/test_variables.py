"""Page, command and source have the same environment variables."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

import shardwise
from shardwise.cli.arguments import VARIABLES
from shardwise.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "runs.md"
# Constants in capitals of modules that look at the environment.
OTHER = {"AMD64", "CPU", "ERROR", "FAILED", "FINISHED", "HEAD", "KILLED", "WORLD", "ZX"}


def constants() -> set[str]:
    """What looks like a variable's name in modules that look at the environment."""
    found = set()
    for path in Path(shardwise.__file__).parent.rglob("*.py"):
        text = path.read_text()
        if re.search(r"\benviron\b|getenv", text) and path.name != "variables.py":
            strings = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
            found |= {word for word in strings if isinstance(word, str) and re.fullmatch(r"[A-Z][A-Z0-9_]+", word)}
    return found


def test_the_source_has_these_variables_and_no_others():
    found = {name for name in constants() - OTHER if not name.startswith("SIG")}
    assert found == set(VARIABLES)


def test_the_page_has_them_with_their_meaning():
    section = PAGE.read_text().split("\n## Environment variables\n")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE))
    assert rows == VARIABLES


@pytest.mark.parametrize("name", ["ONEDNN", "TRITON", "SHARED_MEMORY", "CUDA_GRAPHS"])
def test_a_switch_is_0_or_1(capsys, monkeypatch, name):
    monkeypatch.setenv(f"SHARDWISE_{name}", "maybe")
    assert main(["env"]) == 2
    message = f"the environment has SHARDWISE_{name}=maybe, which must be 0 or 1; change it, or unset it"
    assert capsys.readouterr() == ("", f"shardwise env: error: {message}\n")


def test_the_command_shows_them(capsys, monkeypatch):
    monkeypatch.setenv("SHARDWISE_CACHE", "/there")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert main(["env", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["environment"]
    assert shown.keys() == VARIABLES.keys()
    assert (shown["SHARDWISE_CACHE"], shown["XDG_CACHE_HOME"]) == ("/there", None)
