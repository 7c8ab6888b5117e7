"""``shardwise train``: one command for one rank, ranks on this machine, and ranks that a launcher started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shardwise.cli.arguments import FinetuneArguments, TrainArguments, parse_train_arguments
from shardwise.cli.launch import launch_ranks, shardwise_command
from shardwise.cli.rank import RankEnvironment
from shardwise.errors import CheckpointError, ConfigError
from shardwise.folder_lock import check_free
from shardwise.training.settings import RunSettings
from shardwise.training.stopping import Interrupted, way_on


def main(argv: list[str]) -> int:
    """Train, here if this process is a rank or the only one, else in ranks that this process starts.

    Args:
        argv: the arguments after ``train``.

    Returns:
        The exit code.

    Raises:
        ConfigError: a setting that cannot be, or that does not fit the number of ranks.
    """
    arguments = parse_train_arguments(argv)

    def body() -> None:
        # Late, because PyTorch takes seconds to import, and a wrong setting should not.
        from shardwise.training.run import run

        run(arguments.settings)

    return run_in_ranks("train", argv, arguments, body)


def run_in_ranks(
    command: str, argv: list[str], arguments: TrainArguments | FinetuneArguments, body: Callable[[], None]
) -> int:
    """Run ``body`` if this process is a rank or the only one, else start the ranks that will.

    Args:
        command: of ``shardwise``.
        argv: the arguments after it.
        arguments: the same, parsed.
        body: what a rank does.

    Returns:
        The exit code.

    Raises:
        ConfigError: settings that do not fit the number of ranks; ``out`` is another run's, or cannot be written to.
    """
    settings = arguments.settings
    environment = RankEnvironment.read()
    if environment is None:
        parallel = settings.parallel
        world_size = parallel.tp * parallel.pp if arguments.nproc is None else arguments.nproc
    else:
        world_size = environment.world_size
        if arguments.nproc not in (None, world_size):
            raise ConfigError(
                f"--nproc asks for {arguments.nproc} ranks, but the launcher started {world_size}; leave --nproc out"
            )
    try:
        settings.check_world(world_size)
    except ConfigError as error:
        if environment is None:
            raise
        raise ConfigError(
            f"{error} (WORLD_SIZE={world_size} is in the environment; unset it and RANK if no launcher set them)"
        ) from error
    if environment is None:
        check_free(Path(settings.out))
    try:
        if environment is None and world_size > 1:
            program, name = shardwise_command(command, *argv), f"shardwise {command}"
            return launch_ranks(
                world_size, program, command=name, debug=arguments.debug, way_on=lambda: _way_on(settings)
            )
        body()
    except Interrupted as interruption:
        interruption.note = _way_on(settings)
        raise
    return 0


def _way_on(settings: RunSettings) -> str:
    """How to go on after the run ended early, from what is on the disk."""
    folder = Path(settings.out) / "checkpoints"
    if not folder.exists():
        return way_on(None)
    # Late, because PyTorch takes seconds to import.
    from shardwise.checkpoint import latest

    try:
        return way_on(latest(folder))
    except CheckpointError as error:
        return str(error)
