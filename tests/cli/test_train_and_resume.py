"""The real command, killed in the middle: what it says, and that resuming gives the losses of the uninterrupted run."""

from __future__ import annotations

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
SAVE_EVERY = 20

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


def children(pid: int) -> list[int]:
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in listing.splitlines()]
    return [child for child, parent in pairs if parent == pid]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    finish(start(folder, "whole"))
    expected = losses(folder / "whole")
    assert sorted(expected) == list(range(STEPS))
    return folder, expected


def test_one_rank_killed_then_resumed(uninterrupted):
    folder, expected = uninterrupted
    process = start(folder, "one")
    wait_for_checkpoint(process, folder / "one", at_least=40)
    ranks = children(process.pid)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    said = finish(process, exit_code=1)
    assert "was killed by SIGKILL" in said
    assert "--resume auto" in said
    assert "Traceback" not in said
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    resumed = finish(start(folder, "one", "--resume", "auto"))
    assert "resumed at step " in resumed
    assert losses(folder / "one") == expected


def test_all_killed_then_resumed(uninterrupted):
    folder, expected = uninterrupted
    process = start(folder, "all")
    wait_for_checkpoint(process, folder / "all", at_least=60)
    # Launcher and ranks share the session that `start` made.
    os.killpg(process.pid, signal.SIGKILL)
    for rank in children(process.pid):
        os.kill(rank, signal.SIGKILL)
    process.communicate(timeout=60)
    assert "resumed at step " in finish(start(folder, "all", "--resume", "auto"))
    assert losses(folder / "all") == expected


def test_interrupted_leaves_the_checkpoint_and_one_line(uninterrupted):
    folder, expected = uninterrupted
    process = start(folder, "interrupted")
    wait_for_checkpoint(process, folder / "interrupted", at_least=20)
    os.killpg(process.pid, signal.SIGINT)
    said = finish(process, exit_code=130)
    assert "interrupted; continue with --resume auto" in said
    assert "Traceback" not in said
    finish(start(folder, "interrupted", "--resume", "auto"))
    assert losses(folder / "interrupted") == expected


def test_a_used_folder_is_refused_with_one_line(uninterrupted):
    folder, _ = uninterrupted
    said = finish(start(folder, "whole"), exit_code=2)
    (line,) = [line for line in said.splitlines() if "error" in line]
    assert line.startswith("shardwise train: error: ")
    assert "--resume auto" in line
