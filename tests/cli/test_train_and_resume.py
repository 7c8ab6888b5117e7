"""The real command, killed in the middle: what it says, and that resuming gives the losses of the uninterrupted run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from training.tiny import tiny_settings

STEPS = 240
SAVE_EVERY = 10

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def start(folder: Path, out: str, *more: str) -> subprocess.Popen[str]:
    tiny_settings(folder)  # writes the text
    command = [
        sys.executable,
        "-m",
        "shardwise",
        "train",
        "--data",
        str(folder / "text.txt"),
        "--out",
        str(folder / out),
    ]
    command += [
        "--parallel.tp",
        "2",
        "--model.num-layers",
        "2",
        "--model.hidden-size",
        "32",
        "--model.vocab-size",
        "301",
    ]
    command += ["--model.sequence-length", "24", "--model.dropout", "0.1", "--training.global-batch-size", "4"]
    command += ["--training.steps", str(STEPS), "--training.save-every", str(SAVE_EVERY), *more]
    environment = {**os.environ, "SHARDWISE_CACHE": str(folder / "cache")}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def finish(process: subprocess.Popen[str], *, exit_code: int = 0) -> str:
    output, errors = process.communicate(timeout=120)
    assert process.returncode == exit_code, errors[-2000:]
    return output + errors


def losses(folder: Path) -> dict[int, float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {row["step"]: row["loss"] for row in rows}


def wait_for_checkpoint(process: subprocess.Popen[str], out: Path, *, at_least: int) -> None:
    """Until a checkpoint of that many steps is there, and the run still goes on."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        assert process.poll() is None, "the run ended before it could be killed"
        if any(int(path.name[5:]) >= at_least for path in (out / "checkpoints").glob("step-*")):
            return
        time.sleep(0.01)
    raise AssertionError("no checkpoint within 90 s")


def reached(out: Path) -> int:
    """The steps of the newest checkpoint."""
    return max(int(path.name[5:]) for path in (out / "checkpoints").glob("step-*"))


def children(pid: int) -> list[int]:
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in listing.splitlines()]
    return [child for child, parent in pairs if parent == pid]


def test_killed_and_interrupted_and_resumed(tmp_path):
    """One run that ends early three times: its losses are those of the run that does not."""
    folder, out = tmp_path, tmp_path / "often"
    finish(start(folder, "whole"))
    expected = losses(folder / "whole")
    assert sorted(expected) == list(range(STEPS))

    process = start(folder, "often")
    wait_for_checkpoint(process, out, at_least=SAVE_EVERY)
    ranks = children(process.pid)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    said = finish(process, exit_code=1)
    assert "was killed by SIGKILL" in said
    assert "--resume auto" in said
    assert "Traceback" not in said
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)

    process = start(folder, "often", "--resume", "auto")
    wait_for_checkpoint(process, out, at_least=reached(out) + SAVE_EVERY)
    # Launcher and ranks share the session that `start` made.
    ranks = children(process.pid)
    os.killpg(process.pid, signal.SIGKILL)
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)
    process.communicate(timeout=60)

    process = start(folder, "often", "--resume", "auto")
    wait_for_checkpoint(process, out, at_least=reached(out) + SAVE_EVERY)
    os.killpg(process.pid, signal.SIGINT)
    said = finish(process, exit_code=130)
    assert "interrupted; continue with --resume auto" in said
    assert "resumed at step " in said
    assert "Traceback" not in said

    assert "resumed at step " in finish(start(folder, "often", "--resume", "auto"))
    assert losses(out) == expected
