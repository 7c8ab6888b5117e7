"""``shardwise train``: one command for one rank, ranks on this machine, and ranks that a launcher started."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import tyro

from shardwise.cli.arguments import RunArguments
from shardwise.training.settings import Settings


@dataclass(frozen=True, kw_only=True)
class TrainArguments(RunArguments):
    """Train a GPT on your text.

    Settings come from their defaults, then from the TOML file of --config (a
    table for each group: [model] num_layers = 8), then from flags. On this
    machine:
      shardwise train --data FOLDER --tp 2
    On many hosts, where torchrun starts the ranks (leave --nproc out there, which
    torchrun takes for a flag of its own unless "--" stands before it):
      torchrun --nnodes 2 --nproc-per-node 8 ... -m shardwise train --data FOLDER
    """

    settings: Annotated[Settings, tyro.conf.arg(name="")]

    def work(self) -> Callable[[], object]:
        """Train."""
        from shardwise.run.run import run

        return partial(run, self.settings)
