"""The picture of a run, whatever the text is called and wherever it is drawn."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from harness.program import run

from shardwise.core.errors import ConfigError
from shardwise.run import compare
from shardwise.run.pictures import draw_evaluations, draw_folders

DRAW = """
import sys
from pathlib import Path
from shardwise.run.pictures import draw_runs
rows = [{"step": step, "bits_per_byte": 2.0, "held_out_bits_per_byte": 2.1} for step in range(3)]
if len(sys.argv) > 3:
    rows = [row | {"expert_load_max": 1.5, "expert_load_min": 0.2} for row in rows]
print(draw_runs({"": rows}, Path(sys.argv[1]), references={"zlib -9": 2.5}, title=sys.argv[2]))
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


def rows_of(steps: int) -> list[dict[str, float]]:
    return [{"step": step, "loss": 2.0, "held_out_loss": 2.1, "grad_norm": 0.0} for step in range(steps)]


def test_runs_of_several_folders_are_one_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("a", "b $^{"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(3)))
    folders = [tmp_path / "a", tmp_path / "b $^{"]
    draw_folders(folders, tmp_path / "runs.svg")
    drawn = (tmp_path / "runs.svg").read_text()
    # matplotlib leaves the texts that it draws as comments. Shown are the names without what they have in common.
    texts = re.findall(r"<!-- (.*?) -->", drawn)
    assert {"a", "b $^{", "learning rate", "gradient norm", "tokens/s", "loss"} <= set(texts)
    (tmp_path / "a" / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="a has no metrics to draw; give the --out of a training run"):
        draw_folders(folders, tmp_path / "runs.svg")
    with pytest.raises(ConfigError, match=r"runs\.pdf is no picture; its name must end in \.png or \.svg"):
        compare(*folders, picture=tmp_path / "runs.pdf")
    with pytest.raises(ConfigError, match="--also is for --picture"):
        compare(*folders, also=folders)


def test_evaluations_are_bars_with_their_values(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    values = {f"runs/{'long' * 20}/{name}": value for name, value in {"a": 0.5, "b" * 90: 1.25}.items()}
    draw_evaluations(values, tmp_path / "bars.svg", title="some texts", unit="bits per byte")
    texts = re.findall(r"<!-- (.*?) -->", (tmp_path / "bars.svg").read_text())
    assert {"0.5000", "1.2500", "a", "some texts"} <= set(texts)
    assert max(map(len, texts)) <= 40
