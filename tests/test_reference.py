"""The reference of the site has every public name; `make docs` builds it, and a warning there is an error."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from test_public_api import EXPORTS

ROOT = Path(__file__).parents[1]
IMPORT = re.compile(r"^ *from (shardwise[\w.]*) import (?:\(([^)]*)\)|(.*))$", re.MULTILINE)


@pytest.fixture(scope="module")
def reference():
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "site" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def described(reference):
    return reference.public_names()


def names_of(module, described):
    """Return the names on the page of a module, which may have another of its names."""
    found = importlib.import_module(module)
    return next((names for page, names in described.items() if importlib.import_module(page) is found), {})


def test_every_export_is_described(described):
    for module, names in EXPORTS.items():
        assert set(names.split()) <= described[module].keys()


def test_every_name_of_the_doors_signatures_is_described(described):
    surface = json.loads((ROOT / "tests" / "signatures.json").read_text(encoding="utf-8"))
    missing = [
        f"{module}.{name}"
        for module, names in surface.items()
        for name in names
        if "." not in name and name[0] != "_" and name not in names_of(module, described)
    ]
    assert missing == []


def test_what_pages_and_examples_import_is_described(described):
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]
    missing = set()
    for page in pages:
        for module, several, one in IMPORT.findall(page.read_text(encoding="utf-8")):
            for name in re.findall(r"\w+", re.sub(r"#.*| as \w+", "", several or one)):
                if f"{module}.{name}" not in described and name not in names_of(module, described):
                    missing.add(f"{page.relative_to(ROOT)}: {module}.{name}")
    assert missing == set()


def test_a_name_is_described_once_and_every_other_page_refers_to_it(reference, described):
    homes = {home for names in described.values() for home in names.values()}
    assert all(home.rpartition(".")[2] in described[home.rpartition(".")[0]] for home in homes)
    linear = described["shardwise.nn"]["ColumnLinear"]
    assert linear == described["shardwise.nn.column"]["ColumnLinear"] == "shardwise.nn.ColumnLinear"
    page = reference._page("shardwise.nn.column", described["shardwise.nn.column"])
    assert ":py:obj:`ColumnLinear <shardwise.nn.ColumnLinear>`" in page
    assert ".. autoclass::" not in page
