"""The page about the catalogue: its target runs, and the table of results has every case."""

import re
import socket
import sys
from pathlib import Path

import pytest
from harness.program import run as run_program

from shardwise.conformance import all_cases, run

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/conformance.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "benchmarks/results/conformance-2026-11-26.md").read_text(encoding="utf-8")
HOOK = "            x.register_hook(self.summed)\n"


@pytest.fixture
def example(tmp_path):
    (code,) = re.findall(r"^```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)
    target = tmp_path / "target.py"
    target.write_text(code, encoding="utf-8")
    return target


@pytest.mark.slow
def test_the_target_of_the_page_passes_what_it_offers(example):
    report = run(example, "linear/*")
    assert report.is_sound, report.of("failed")
    assert len(report.of("passed")) == 7
    assert report.of("not offered")


@pytest.mark.slow
def test_it_fails_without_the_line_that_the_page_names(example):
    code = example.read_text(encoding="utf-8")
    assert HOOK in code
    example.write_text(code.replace(HOOK, ""), encoding="utf-8")
    report = run(example, "linear/*")
    assert "# The gradient of the input is the sum over the ranks. Without the hook, six cases fail." in code
    assert len(report.of("failed")) == 6
    assert all("the gradient of the input" in each.message for each in report.of("failed"))


def test_the_table_has_every_case_and_report():
    rows = re.findall(r"^\| `(\w+/\w+)` (.*?) \| (.*?) \|", RESULTS, re.MULTILINE)
    assert rows == [(each.name, each.summary, each.report) for each in all_cases()]


def test_a_script_shows_every_failure_of_another_project():
    scripts = "".join(script.read_text(encoding="utf-8") for script in (ROOT / "examples/conformance").glob("*.py"))
    failed = re.findall(r"^\| `\w+/\w+` .*? \| (.*?) \|.*\*\*failed\*\*", RESULTS, re.MULTILINE)
    assert failed
    for report in failed:
        assert "class of bug" in report or f"#{report.rpartition('#')[2]}" in scripts, report
    listed = re.findall(r"^\| `(\w+\.py)` \|", (ROOT / "examples/conformance/README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(script.name for script in (ROOT / "examples/conformance").glob("*.py"))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("transformers_glm_norms.py", "sum of the ranks"),
        ("torch_bf16_loss.py", "largest difference 0."),
        ("torch_uneven_rowwise.py", "must have same reduction dim"),
        ("transformers_norms_under_accumulation.py", "times as large"),
    ],
)
def test_a_script_still_shows_its_failure(script, said):
    done = run_program(
        sys.executable, str(ROOT / "examples/conformance" / script), exit_code=1, MASTER_PORT=str(free_port())
    )
    assert said in done.stdout


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
