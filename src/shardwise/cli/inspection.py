"""The commands that only report: ``compare`` and ``env``."""

import json
from dataclasses import dataclass
from typing import Annotated

import tyro

from shardwise.cli.arguments import Arguments
from shardwise.training.bounds import Folder


@dataclass(frozen=True)
class CompareArguments(Arguments):
    """Show where two runs diverge: the first step, tensor and element in which their metrics or checkpoints differ.

    The runs may have different layouts. The exit code is 0 if both runs have the same results for the same steps, and
    their checkpoints of common steps are bit-identical; otherwise it is 1.

    Attributes:
        run_a: --out folder of a training run, or one of its checkpoints.
        run_b: the same for the other run.
    """

    run_a: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_A"), Folder("")]
    run_b: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_B"), Folder("")]

    def work(self) -> None:
        from shardwise.run import compare

        same, lines = compare(self.run_a, self.run_b)
        print("\n".join(lines))
        if not same:
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
