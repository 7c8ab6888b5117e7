"""``shardwise env``: versions, devices, backends, and which fast paths are on and why not."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from shardwise.cli.arguments import Arguments


@dataclass(frozen=True)
class EnvArguments(Arguments):
    """Show versions, devices, backends, and which fast paths are on and why not.

    Attributes:
        json: print JSON, for a bug report or a script.
        debug: show stack traces.
    """

    json: bool = False

    def work(self) -> Callable[[], object]:
        """Print what this machine has."""
        from shardwise.cli.machine import as_table, gather

        report = gather()
        return partial(print, json.dumps(report, indent=2) if self.json else as_table(report))
