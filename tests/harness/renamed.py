"""Turns tests that were written before paths and names moved into tests of today: ``python renamed.py FOLDER``.

``tests/renames.json`` lists regular expressions, each with what stands there now and, if it is for some rooms alone, an
expression for the path of the file. They are applied one after the other to every Python file of the folder, in place.
See docs/decisions/0011-engine-and-doors.md.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

RENAMES = json.loads(Path(__file__).parents[1].joinpath("renames.json").read_text(encoding="utf-8"))


def renamed(text: str, path: str) -> str:
    """The text of a test, with the paths and names of today; ``path`` is the file's, from the folder of all tests."""
    for old, new, *rooms in RENAMES:
        if all(re.search(room, path) for room in rooms):
            text = re.sub(old, new, text)
    return text


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for path in sorted(folder.rglob("*.py")):
        text = renamed(path.read_text(encoding="utf-8"), path.relative_to(folder).as_posix())
        path.write_text(text, encoding="utf-8")
