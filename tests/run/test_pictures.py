"""The picture of a run, whatever the text is called and wherever it is drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.program import run

DRAW = """
import sys
from pathlib import Path
from shardwise.run.metrics import draw_loss
rows = [{"step": step, "bits_per_byte": 2.0, "held_out_bits_per_byte": 2.1} for step in range(3)]
if len(sys.argv) > 3:
    rows = [row | {"expert_load_max": 1.5, "expert_load_min": 0.2} for row in rows]
print(draw_loss(rows, Path(sys.argv[1]), references={"zlib -9": 2.5}, title=sys.argv[2]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [("cost in $ and $^{",), ("中文.txt",), ("loads", "of experts")], ids=["$", "中文", "loads"]
)
def test_nothing_but_the_picture_comes_of_it(tmp_path: Path, words: tuple[str, ...]) -> None:
    pytest.importorskip("matplotlib")
    # No home folder for matplotlib's own files, which it would tell of at length.
    done = run(
        "-c",
        DRAW,
        tmp_path / "loss.png",
        *words,
        HOME="/dev/null",
        MPLCONFIGDIR="",
        XDG_CONFIG_HOME="",
        XDG_CACHE_HOME="",
    )
    assert done.stdout == "None\n"
    assert done.stderr == ""
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
