"""Classes of transformers are measured against the whole model, and shown on a page; docs/models.md has that form."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from harness.program import run as run_program
from plans.page import page
from plans.tiny import OVERRIDES

ROOT = Path(__file__).parents[2]


@pytest.mark.matrix
def test_classes_are_measured_and_a_second_start_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    script = [sys.executable, str(ROOT / "benchmarks" / "models_by_plan.py"), "measure", "--json", str(path), "--only"]
    run_program(*script, "GPTNeoXConfig")
    (name,) = json.loads(path.read_text())["classes"]
    result = run_program(*script, "GPTNeoXConfig", "EsmcConfig")
    assert "GPTNeoX" not in result.stdout
    found = json.loads(path.read_text())
    passes = {name: each["passes"] for name, each in found["classes"].items()}
    verdicts = {
        name: [each["verdict"] for of_pass in of_class.values() for each in of_pass.values()]
        for name, of_class in passes.items()
    }
    assert verdicts == {name: ["right"] * 5, "EsmcConfig": ["refused"] * 3 + ["not run"] * 2}
    shown = page(found, [found], OVERRIDES)
    assert "This holds for 1 at tp 2, 1 at tp 3, 1 at tp 4, 1 with 9 heads, 1 with 12 of width 1." in shown
    assert "| `GPTNeoX` | right | right | right | right | right | right |  |" in shown
    assert "| `Esmc` | refused |" in shown


def test_the_page_has_a_row_for_each_class_and_counts_them() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert f"({len(rows)} classes)" in text.replace("\n", " ")
    numbers = [sum(row[column] == "right" for row in rows) for column in range(1, 6)]
    assert f"This holds for {numbers[0]} at tp 2, {numbers[1]} at tp 3, {numbers[2]} at tp 4" in text
    assert numbers[0] >= 90
    assert numbers[1] >= 75
    assert numbers[2] >= 90
    assert min(numbers[3:]) >= 60
    assert not any(row[column].startswith("wrong") for row in rows for column in range(1, 6))
    # Of these, transformers' own tensor parallelism computes other gradients of the norms of queries and keys.
    theirs = {row[0]: row[6] for row in rows if row[1] == "right"}
    for name in ("Qwen3", "Gemma3Text", "Glm4Moe"):
        assert theirs[f"| `{name}`"].startswith("wrong: "), name
