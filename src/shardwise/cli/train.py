"""``shardwise train``: one command for one rank, ranks on this machine, and ranks that a launcher started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shardwise.cli.arguments import RunArguments, parse_train_arguments
from shardwise.cli.start import run_in_ranks
from shardwise.errors import CheckpointError
from shardwise.folder_lock import check_free
from shardwise.training.stopping import way_on


def main(argv: list[str]) -> int:
    """Train, here if this process is a rank or the only one, else in ranks that this process starts.

    Args:
        argv: the arguments after ``train``.

    Returns:
        The exit code.

    Raises:
        ConfigError: a setting out of range, or that does not fit the number of ranks.
    """
    arguments = parse_train_arguments(argv)

    def body() -> None:
        # Late, because PyTorch takes seconds to import, and a wrong setting should not.
        from shardwise.training.run import run

        run(arguments.settings)

    return start_run("train", argv, arguments, body)


def start_run(command: str, argv: list[str], arguments: RunArguments, body: Callable[[], None]) -> int:
    """``run_in_ranks`` for a run into the folder that its settings name, from whose checkpoints it can go on."""
    out = Path(arguments.settings.out)
    return run_in_ranks(
        command, argv, arguments, body, check=lambda: check_free(out), way_on=lambda: _way_on(out / "checkpoints")
    )


def _way_on(folder: Path) -> str:
    """How to go on after the run ended early, from what is on the disk."""
    if not folder.exists():
        return way_on(None)
    # Late, because PyTorch takes seconds to import.
    from shardwise.checkpoint import latest

    try:
        return way_on(latest(folder))
    except CheckpointError as error:
        return str(error)
