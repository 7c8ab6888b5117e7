"""``shardwise compare``: where two runs part."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import tyro

from shardwise.cli.arguments import Arguments
from shardwise.training.bounds import Folder


@dataclass(frozen=True)
class CompareArguments(Arguments):
    """Show where two runs part: the first step, tensor and element in which their metrics or checkpoints differ.

    Runs may have had different layouts. The exit code is 0 if both have metrics of the same steps with the same
    results, and the checkpoints that both have are the same, bit for bit; else 1.

    Attributes:
        run_a: --out of a training run, or one of its checkpoints.
        run_b: that of another.
    """

    run_a: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_A"), Folder("")]
    run_b: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_B"), Folder("")]

    def work(self) -> Callable[[], object]:
        """Compare and print."""
        return partial(_compare, self.run_a, self.run_b)


def _compare(run_a: str, run_b: str) -> None:
    from shardwise.run import compare

    same, lines = compare(run_a, run_b)
    print("\n".join(lines))
    if not same:
        raise SystemExit(1)
