"""``shardwise train``: one command for one rank, ranks on this machine, and ranks that a launcher started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shardwise.cli.arguments import FinetuneArguments, TrainArguments, parse_train_arguments
from shardwise.cli.launch import launch_ranks, shardwise_command
from shardwise.cli.rank import RankEnvironment
from shardwise.errors import ConfigError
from shardwise.folder_lock import check_free


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
    settings.check_world(world_size)
    if environment is None:
        check_free(Path(settings.out))
    if environment is None and world_size > 1:
        program = shardwise_command(command, *argv)
        return launch_ranks(world_size, program, command=f"shardwise {command}", debug=arguments.debug, resumable=True)
    body()
    return 0
