"""The command ``env``."""

import json
from dataclasses import dataclass

from shardwise.cli.arguments import Arguments


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

    def begins(self) -> str:
        return "looking at this machine"

    def work(self) -> None:
        if self.check:
            from shardwise.run.processes.checks import find_problems

            problems = find_problems()
            lines = [f"problem: {each}" for each in problems] or ["nothing found that would make a run fail here"]
            print(json.dumps(problems, indent=2) if self.json else "\n".join(lines))
            if problems:
                raise SystemExit(1)
            return
        from shardwise.cli.env_report import as_table, gather

        report = gather()
        print(json.dumps(report, indent=2) if self.json else as_table(report))
