"""Run the tests and benchmarks of this library on one GPU, and write a dated table.

    make gpu                                  # or, if another Python has PyTorch with CUDA:
    make gpu GPU_PYTHON=/opt/torch/bin/python
    python benchmarks/gpu.py --rehearsal --out /tmp/table     # on a CPU, at sizes that take moments

It installs nothing and needs no network. Tests and benchmarks together take at most ten minutes; the table lists those
that have not started by then as not run. Libraries to compare with (Liger, cut-cross-entropy, quack) are used if they
are installed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUDGET_SECONDS = 570.0
# Approximate time of the benchmarks after the tests.
_FOR_BENCHMARKS = 200.0
_TO_REPORT = 20.0

# Modules and the packages that contain them.
PACKAGES = {
    "numpy": "numpy",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "tyro": "tyro",
    "tqdm": "tqdm",
    "jinja2": "jinja2",
    "triton": "triton",
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
    "hypothesis": "hypothesis",
}


def why_not(*, rehearsal: bool) -> str | None:
    """Return the reason why nothing can be measured here, in one line; None if all requirements are met."""
    found = []
    if importlib.util.find_spec("torch") is None:
        found.append("this Python has no PyTorch")
    elif not rehearsal:
        import torch

        if torch.version.cuda is None:
            found.append(f"PyTorch {torch.__version__} has no CUDA")
        elif not torch.cuda.is_available():
            found.append(
                f"PyTorch {torch.__version__} sees no GPU; does nvidia-smi show one, with a driver new enough?"
            )
        elif (capability := torch.cuda.get_device_capability(0)) < (8, 0):
            found.append(f"{torch.cuda.get_device_name(0)} has compute capability {capability[0]}.{capability[1]}")
    missing = [package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        found.append(f"packages are missing: {', '.join(missing)}")
    if not found:
        return None
    return (
        f"{'; '.join(found)} (Python: {sys.executable}). make gpu needs one NVIDIA GPU of compute capability 8.0 or "
        "newer, and a Python with a CUDA build of PyTorch and the packages of the tests; it installs nothing. Say "
        "which Python that is: make gpu GPU_PYTHON=/path/to/python. How to get there: docs/first-gpu.md"
    )


def run_tests(folder: Path, *, rehearsal: bool, limit: float) -> tuple[list[Any], bool]:
    """Run ``tests/gpu`` for at most ``limit`` seconds, and return rows of the table and whether all tests passed."""
    from gpus.measuring import Row

    report = folder / "tests.xml"
    environment = os.environ | {"SHARDWISE_GPU_TESTS": "rehearsal" if rehearsal else "cuda"}
    if rehearsal:
        environment |= {"TRITON_INTERPRET": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider", "--tb=short"]
    command += ["-o", "junit_family=xunit2", f"--junitxml={report}", "--color=no", "tests/gpu"]
    rows, num_passed = [], 0
    with subprocess.Popen(command, cwd=ROOT, env=environment) as tests:
        try:
            code = tests.wait(limit)
        except subprocess.TimeoutExpired:
            rows.append(Row("tests", "the rest of tests/gpu", f"not done in {limit:.0f} s", "passes", False))
            # pytest then ends the current test and reports the earlier ones.
            tests.send_signal(signal.SIGINT)
            try:
                code = tests.wait(_TO_REPORT)
            except subprocess.TimeoutExpired:
                tests.kill()
                code = tests.wait()
    if not report.exists():
        return [*rows, Row("tests", "tests/gpu", f"pytest ended with {code}", "all pass", False)], False
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        wrong = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        if wrong is None:
            num_passed += 1
            continue
        message = " ".join((wrong.get("message") or "").split())[:200]
        rows.append(Row("tests", str(case.get("name")), wrong.tag, "passes", False, message))
    passed = code == 0 and not rows and num_passed > 0
    return [Row("tests", "tests/gpu", f"{num_passed} passed, {len(rows)} did not", "all pass", passed), *rows], passed


def measurements(*, rehearsal: bool) -> list[tuple[str, Callable[[], list[Any]]]]:
    """Return the measurements in order, each with a name and a function that returns rows."""
    import torch
    import torch.distributed as dist
    from gpus import losses, models, updates
    from gpus.measuring import Limits

    device = torch.device("cpu") if rehearsal else torch.device("cuda", 0)
    loss_sizes, model_sizes = losses.LossSizes(), models.ModelRunSizes()
    width, num_bytes, num_parameters = 8192, 4 << 30, 1 << 29
    if rehearsal:
        width, num_bytes, num_parameters = 64, 1 << 16, 1 << 14
        loss_sizes = losses.LossSizes(num_tokens=8, vocab_size=40, hidden_size=16, repeats=2)
        model_sizes = models.ModelRunSizes(
            num_layers=1, hidden_size=16, num_heads=2, num_query_groups=1, ffn_hidden_size=32, vocab_size=300,
            sequence_length=8, samples=2, steps=1, new_tokens=2, saved_bytes=1 << 14,
        )  # fmt: skip
    found: list[Limits] = []

    def limits() -> list[Any]:
        found.append(Limits.measure(device, width=width, num_bytes=num_bytes))
        return found[0].rows()

    def world() -> dist.ProcessGroup:
        group = dist.group.WORLD
        assert group is not None
        return group

    return [
        ("limits", limits),
        ("loss", lambda: losses.measure_plain(device, loss_sizes, world())),
        ("loss with output layer", lambda: losses.measure_linear(device, loss_sizes, world())),
        ("update", lambda: updates.measure_update(device, num_parameters, loss_sizes.repeats)),
        ("model", lambda: models.measure_model(device, model_sizes, world(), found[0])),
        ("saving", lambda: models.measure_saving(device, model_sizes)),
    ]


def measure_all(*, rehearsal: bool, until: float) -> tuple[list[Any], bool]:
    """Run all measurements that can start before ``until``, and return rows and whether all succeeded."""
    import torch
    import torch.distributed as dist
    from gpus.measuring import Row

    rows, succeeded = [], True
    backend = "gloo" if rehearsal else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        for name, measure in measurements(rehearsal=rehearsal):
            if time.monotonic() > until:
                rows.append(Row(name, "", "not run: the time was used up"))
                continue
            print(f"measuring: {name}", flush=True)
            try:
                rows += measure()
            # The next measurement may succeed. The table lists the failure.
            except Exception as error:
                succeeded = False
                reason = " ".join(str(error).split())[:200]
                rows.append(Row(name, "", f"failed: {type(error).__name__}", met=False, note=reason))
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    finally:
        dist.destroy_process_group()
    return rows, succeeded


def text_of(rows: Sequence[Any], facts: dict[str, Any], date: str, title: str = "On one GPU") -> str:
    """Format the table in Markdown."""
    lines = [f"# {title}, {date}", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", "| | | value | goal | | |", "|---|---|---|---|---|---|"]
    for row in rows:
        met = {None: "", True: "met", False: "missed"}[row.met]
        cells = (row.section, row.name, row.value, row.goal, met, row.note)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def facts_of(*, rehearsal: bool) -> dict[str, Any]:
    """Return the device and the versions."""
    import torch
    from common import machine_facts

    facts = {name: value for name, value in machine_facts().items() if name in ("python", "torch", "system")}
    facts["triton"] = importlib.import_module("triton").__version__
    if rehearsal:
        return {"rehearsal": "on a CPU, at sizes that say nothing of a GPU"} | facts
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    return {"GPU": f"{torch.cuda.get_device_name(0)}, {memory:.0f} GiB", "CUDA": torch.version.cuda} | facts


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything and return the exit code: 0 if all tests pass and everything was measured, else 1 or 2."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rehearsal", action="store_true", help="on a CPU, at sizes that take moments")
    parser.add_argument("--no-tests", action="store_true", help="measure only")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the table")
    arguments = parser.parse_args(argv)
    begun, rehearsal = time.monotonic(), arguments.rehearsal
    if (reason := why_not(rehearsal=rehearsal)) is not None:
        print(f"make gpu: {reason}", file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows, succeeded = [], True
    if not arguments.no_tests:
        limit = BUDGET_SECONDS - _FOR_BENCHMARKS
        rows, succeeded = run_tests(arguments.out, rehearsal=rehearsal, limit=limit)
        with contextlib.suppress(FileNotFoundError):
            (arguments.out / "tests.xml").unlink()
    measured, all_measured = measure_all(rehearsal=rehearsal, until=begun + BUDGET_SECONDS - 60)
    rows += measured
    date = datetime.date.today().isoformat()
    facts = facts_of(rehearsal=rehearsal)
    text = text_of(rows, facts, date)
    path = arguments.out / f"gpu-{date}.md"
    path.write_text(text)
    values = {"benchmark": "gpu", "date": date, "machine": facts, "rows": [vars(row) for row in rows]}
    path.with_suffix(".json").write_text(json.dumps(values, indent=2) + "\n")
    print(f"\n{text}\nwritten to {path}")
    return 0 if succeeded and all_measured else 1


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "src"))
    sys.exit(main())
