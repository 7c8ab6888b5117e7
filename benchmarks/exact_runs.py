"""Runs of one model in many layouts, each in new processes, and a comparison of their bits."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.core.errors import LaunchError
from shardwise.doctor.comparison import compare
from shardwise.run.metrics import read_metrics

Layout = tuple[int, str]
"""Number of ranks, and flags of ``shardwise train``."""

_POLL_SECONDS = 0.05


@dataclass
class Runs:
    """The runs of one model in one dtype; the first run is the reference for the others.

    Args:
        name: name of the model and dtype in the printed lines.
        folder: parent of the runs' folders; the folder of a run is removed after the comparison.
        flags: flags of ``shardwise train`` for all runs.
        num_steps: number of steps of every run.

    Attributes:
        outcomes: a line for each run.
        wrong: the lines of failures.
    """

    name: str
    folder: Path
    flags: Sequence[str]
    num_steps: int
    outcomes: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def prove(self, layouts: Sequence[Layout]) -> None:
        """Run in each layout; change the layout in the middle; kill a rank; and check that plain runs differ."""
        first, *others = layouts
        self._finish(self._start("first", first, "--exact"), first)
        for layout in others:
            self._check(layout)
        half = self.num_steps // 2
        self._check((4, "--tp 4"), saved_at=half, then=(4, "--pp 2"))
        self._check((4, "--tp 4"), killed_at=half, then=(2, "--tp 2"))
        for name, layout in (("plain", first), ("other", (2, "--tp 2"))):
            self._finish(self._start(name, layout), layout)
        differ = not compare(self.folder / "plain", self.folder / "other")[0]
        self._report("without --exact on 2 ranks --tp 2", "other bits, as it must be" if differ else None)

    def _check(
        self, layout: Layout, *, saved_at: int | None = None, killed_at: int | None = None, then: Layout | None = None
    ) -> None:
        """Compare a run in ``layout`` with the first run; with ``then``, the run is resumed in this second layout."""
        ranks, flags = layout
        where, problem = f"{ranks} ranks {flags}".strip(), None
        middle = saved_at or killed_at
        try:
            saves = (
                [] if middle is None else ["--training.save-every", str(max(1, middle if saved_at else middle // 2))]
            )
            program = self._start("other", layout, "--exact", *saves)
            if killed_at is not None:
                self._kill(program, killed_at)
            else:
                self._finish(program, layout)
            if then is not None:
                if saved_at is not None:
                    shutil.rmtree(self.folder / f"other/checkpoints/step-{self.num_steps:08d}")
                self._finish(self._start("other", then, "--exact", "--resume", "auto"), then)
                how = f"saved at step {saved_at}" if saved_at else f"a rank killed at step {killed_at}"
                where += f", {how}, resumed on {then[0]} ranks {then[1]}"
            same, lines = compare(self.folder / "first", self.folder / "other")
            expected = f"metrics of {self.num_steps} steps: the same bits"
            problem = None if same and expected in lines else f"OTHER BITS: {'; '.join(lines)}"
        except LaunchError as error:
            problem = f"FAILED: {error}"
        self._report(where, problem or "the same bits", is_wrong=problem is not None)
        shutil.rmtree(self.folder / "other", ignore_errors=True)

    def _report(self, where: str, outcome: str | None, *, is_wrong: bool = False) -> None:
        line = f"{self.name}, {where}: {outcome or 'THE SAME BITS, so that nothing is seen here'}"
        print(line, flush=True)
        self.outcomes.append(line)
        if is_wrong or outcome is None:
            self.wrong.append(line)

    def _start(self, out: str, layout: Layout, *more: str) -> subprocess.Popen[str]:
        ranks, flags = layout
        command = [sys.executable, "-m", "shardwise", "train", *self.flags, *flags.split(), *more]
        command += ["--out", str(self.folder / out), "--nproc", str(ranks)]
        log = self.folder / "log.txt"
        with log.open("w") as file:
            return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, text=True)

    def _finish(self, program: subprocess.Popen[str], layout: Layout) -> None:
        if program.wait() != 0:
            raise LaunchError(f"on {layout[0]} ranks {layout[1]}: {self._last_words()}")

    def _kill(self, program: subprocess.Popen[str], step: int) -> None:
        """Kill the last rank after ``step`` steps."""
        metrics = self.folder / "other/metrics.jsonl"
        while len(read_metrics(metrics)) < step:
            if program.poll() is not None:
                raise LaunchError(f"the run that is to be killed has ended: {self._last_words()}")
            time.sleep(_POLL_SECONDS)
        ranks = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
        os.kill(int(ranks[-1]), signal.SIGKILL)
        if program.wait() == 0:
            raise LaunchError("a rank was killed, and the run ended well")

    def _last_words(self) -> str:
        return " ".join((self.folder / "log.txt").read_text().split()[-60:])
