"""A run of two ranks of which one is stopped in the middle."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from harness.program import Program
from run.tiny import tiny_settings

_TINY = ["--model.num-layers", "2", "--model.hidden-size", "32", "--model.num-heads", "4", "--model.vocab-size", "301"]
_TINY += ["--model.sequence-length", "24", "--training.global-batch-size", "4", "--device", "cpu"]
LIMIT = 10
"""Seconds of ``--timeout``: more than a busy machine may keep a rank from running, as that would be a hang too."""


def check_stopped_rank_is_named(folder: Path, *settings: str, place: str, **variables: str) -> None:
    """Stop rank 1 after three steps: rank 0 says so, at the limit too, and no process is left."""
    tiny_settings(folder)  # writes the text
    metrics = folder / "run" / "metrics.jsonl"
    told = ["--data", str(folder / "text.txt"), "--out", str(folder / "run"), *_TINY, *settings]
    told += ["--training.steps", "1000000", "--timeout", str(LIMIT)]
    # Ranks that compile kernels in their first step may, on a busy machine, be done further apart than the limit.
    variables["CC"] = "false"
    with Program("-m", "shardwise", "train", *told, SHARDWISE_CACHE=folder / "cache", **variables) as run:
        run.wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 3, "three steps are done")
        (stopped,) = [pid for pid in run.children() if _rank_of(pid) == 1]
        os.kill(stopped, signal.SIGSTOP)
        run.wait_for_line(rf"train: rank 0: waiting for rank 1 for \d+ s, in {place}")
        line = run.wait_for_line(
            rf"error: rank 0: waiting for rank 1 for (\d+) s, in {place}.*, at step \d+; no sign of life for \d+ s"
        )
        # How much more it is says how busy the machine is.
        assert int(line[1]) >= LIMIT
        # One that is stopped hears no signal but SIGKILL and SIGCONT, and has ended all the same.
        run.finish(exit_code=1)


def _rank_of(pid: int) -> int:
    variables = dict(item.partition("=")[::2] for item in Path(f"/proc/{pid}/environ").read_text().split("\0"))
    return int(variables.get("RANK", "-1"))
