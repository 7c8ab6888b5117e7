"""Convert the tests of an older commit to the current names, in place: ``python renamed.py FOLDER``.

``tests/renames.json`` is the map. ``modules`` has the old and new paths of modules and packages (the longest match
counts), ``names`` the paths of single names that moved to another module, ``tests`` the old and new paths of test files
and folders, and ``calls`` the changed calls of a test file, under its old path ("" stands for imports to add). Paths in
the package are without the leading ``shardwise.``. docs/moved.md shows the same map as a page.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import sys
from pathlib import Path, PurePosixPath

RENAMES = json.loads(Path(__file__).parents[1].joinpath("renames.json").read_text(encoding="utf-8"))


def _longest(map_: dict[str, str], path: str, separator: str) -> str:
    parts = path.split(separator)
    for length in range(len(parts), 0, -1):
        head = separator.join(parts[:length])
        if head in map_:
            return separator.join([map_[head], *parts[length:]])
    return path


def new_module(path: str) -> str:
    """Return the current path of ``a.b`` or ``a.b.name``, without the leading ``shardwise.``."""
    for length in range(path.count(".") + 1, 1, -1):
        head = ".".join(path.split(".")[:length])
        if head in RENAMES["names"]:
            return RENAMES["names"][head] + path[len(head) :]
    return _longest(RENAMES["modules"], path, ".")


def new_place(path: str) -> str:
    """Return the current path of a test file, relative to the folder of all tests."""
    return _longest(RENAMES["tests"], path, "/")


def _import(node: ast.ImportFrom, indent: str) -> str:
    """Return the current import statements, one line for each module."""
    module = (node.module or "").removeprefix("shardwise").removeprefix(".")
    lines: dict[str, list[str]] = {}
    for alias in node.names:
        parent, _, leaf = new_module(f"{module}.{alias.name}".removeprefix(".")).rpartition(".")
        known_as = alias.asname or alias.name
        target = ".".join(filter(None, ("shardwise", parent)))
        lines.setdefault(target, []).append(leaf if leaf == known_as else f"{leaf} as {known_as}")
    return "\n".join(f"{indent}from {target} import {', '.join(names)}" for target, names in lines.items())


def renamed(text: str, helpers: dict[str, str]) -> str:
    """Return the text of a test with the current paths; ``helpers`` maps old to new paths of test modules."""
    lines = text.split("\n")
    imports = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "shardwise"
    ]
    for node in sorted(imports, key=lambda node: -node.lineno):
        first, last = node.lineno - 1, node.end_lineno or node.lineno
        if not lines[last - 1][node.end_col_offset or 0 :].strip().startswith(";"):
            indent = " " * node.col_offset
            lines[first:last] = _import(node, indent).replace("from shardwise.", "from \0.").split("\n")
    text = "\n".join(lines)
    text = re.sub(r"\bshardwise\.((?:\w+\.)*\w+)", lambda found: "shardwise." + new_module(found[1]), text)
    text = text.replace("from \0.", "from shardwise.")
    for old, new in helpers.items():
        folder, _, module = old.rpartition(".")
        target, _, leaf = new.rpartition(".")
        text = re.sub(rf"(?m)^(\s*(?:from|import) ){re.escape(old)}\b", rf"\g<1>{new}", text)
        text = re.sub(rf"(?m)^(\s*from ){re.escape(folder)}( import {module}\b)", rf"\g<1>{target}\2", text)
        assert leaf == module
    return text


def with_changed_calls(text: str, place: str) -> str:
    """Return the renamed text of a test with the current calls; ``place`` is its old path."""
    for old, new in RENAMES["calls"].get(place, {}).items():
        assert old in text, f"{place} does not contain {old!r}"
        text = text.replace(old, new) if old else text.replace("\nfrom shardwise", f"\n{new}\nfrom shardwise", 1)
    return text


def main(folder: Path) -> None:
    """Rewrite and move every file in a folder of tests."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]
    places = {path: new_place(path.relative_to(folder).as_posix()) for path in files}
    helpers = {}
    for path, place in places.items():
        old = path.relative_to(folder).as_posix()
        # Skip files whose name has changed: they are test files, which no test imports.
        if old != place and path.suffix == ".py" and path.name == PurePosixPath(place).name:
            helpers[old.removesuffix(".py").replace("/", ".")] = place.removesuffix(".py").replace("/", ".")
    for path, place in places.items():
        if path.suffix == ".py":
            old = path.relative_to(folder)
            text = with_changed_calls(renamed(path.read_text(encoding="utf-8"), helpers), old.as_posix())
            depth = len(PurePosixPath(place).parts) - len(old.parts)
            # The folder above all tests is ``depth`` levels further up.
            levels = re.split(r"(?<=__file__\)\.parents\[)(\d)(?=\])", text)
            levels[1::2] = [str(int(level) + depth) for level in levels[1::2]]
            path.write_text("".join(levels), encoding="utf-8")
        target = folder / place
        if target != path:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(path, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
