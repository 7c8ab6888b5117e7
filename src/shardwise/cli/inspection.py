"""The commands that only report: ``compare`` and ``env``."""

import json
import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from shardwise.cli.arguments import Arguments
from shardwise.training.bounds import Folder


@dataclass(frozen=True)
class CompareArguments(Arguments):
    """Show where two runs diverge, and whether by rounding or by a fault.

    Shows the first step, tensor and element in which the metrics or the checkpoints of two runs differ. The layouts of
    the runs may differ. Differences of plain runs are judged: up to 20 steps are repeated on one rank, in the run's
    dtype and with another rounding, from the last checkpoint that is the same in both runs or from the start. The exit
    code is 0 if the results have the same bits or differ by rounding alone; 1 if a fault is suspected, if an exact run
    differs, or if the differences were not judged; 2 if the runs cannot be compared.

    Attributes:
        run_a: --out folder of a training run, or one of its checkpoints.
        run_b: the same for the other run.
        rerun: judge differences by repeating steps; --no-rerun only shows them.
    """

    run_a: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_A"), Folder("")]
    run_b: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_B"), Folder("")]
    rerun: bool = True

    def work(self) -> None:
        from shardwise.run import compare

        comparison = compare(
            self.run_a, self.run_b, rerun=self.rerun, on_repeat=lambda text: print(text, file=sys.stderr, flush=True)
        )
        print("\n".join(comparison.lines))
        if not comparison.is_sound:
            raise SystemExit(1)


@dataclass(frozen=True)
class EnvArguments(Arguments):
    """Show versions, devices, backends, and which fast paths are on and why not.

    With --check, show only what would make a run on this machine fail, or leave its GPUs unused, such as a PyTorch
    without CUDA, a missing compiler or a network interface that does not reach the master; the exit code is then 1 if
    there is anything, otherwise 0.

    Attributes:
        check: look for what would make a run fail.
        json: print JSON, for a bug report or a script.
        debug: show stack traces.
    """

    check: bool = False
    json: bool = False

    def work(self) -> None:
        if self.check:
            from shardwise.run.processes.checks import find_problems

            problems = find_problems()
            lines = [f"problem: {each}" for each in problems] or ["nothing found that would make a run fail here"]
            print(json.dumps(problems, indent=2) if self.json else "\n".join(lines))
            if problems:
                raise SystemExit(1)
            return
        from shardwise.cli.machine import as_table, gather

        report = gather()
        print(json.dumps(report, indent=2) if self.json else as_table(report))
