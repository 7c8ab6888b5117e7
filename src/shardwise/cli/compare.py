"""The command ``compare``."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from shardwise.cli.arguments import Arguments
from shardwise.core.atomic_files import no_folder
from shardwise.core.errors import CheckpointError
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
        picture: PNG or SVG file for a picture of the losses of the runs.
        also: further runs for the picture.
    """

    run_a: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_A"), Folder("")]
    run_b: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_B"), Folder("")]
    rerun: bool = True
    picture: Annotated[str | None, Folder()] = None
    also: tuple[str, ...] = ()

    def begins(self) -> str:
        return f"comparing {self.run_a} with {self.run_b}"

    def check_early(self) -> None:
        for folder in (self.run_a, self.run_b, *self.also):
            if not os.path.exists(folder):
                raise CheckpointError(no_folder(Path(folder), "give the --out of a training run"))

    def work(self) -> None:
        from shardwise.run import compare

        comparison = compare(
            self.run_a,
            self.run_b,
            rerun=self.rerun,
            picture=self.picture,
            also=self.also,
            on_repeat=lambda text: print(text, file=sys.stderr, flush=True),
        )
        print("\n".join(comparison.lines))
        if not comparison.is_sound:
            raise SystemExit(1)
