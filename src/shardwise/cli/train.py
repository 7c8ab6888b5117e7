"""``shardwise train``: one command for one rank, ranks on this machine, and ranks that a launcher started."""

from __future__ import annotations

from shardwise.cli.arguments import parse_train_arguments
from shardwise.cli.launch import launch_ranks, shardwise_command
from shardwise.cli.rank import RankEnvironment
from shardwise.errors import ConfigError


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
    settings = arguments.settings
    environment = RankEnvironment.read()
    if environment is None:
        world_size = settings.parallel.tp if arguments.nproc is None else arguments.nproc
    else:
        world_size = environment.world_size
        if arguments.nproc not in (None, world_size):
            raise ConfigError(
                f"--nproc asks for {arguments.nproc} ranks, but the launcher started {world_size}; leave --nproc out"
            )
    settings.check_world(world_size)
    if environment is None and world_size > 1:
        program = shardwise_command("train", *argv)
        return launch_ranks(world_size, program, command="shardwise train", debug=arguments.debug, resumable=True)
    # Late, because PyTorch takes seconds to import, and a wrong setting should not.
    from shardwise.training.run import run

    run(settings)
    return 0
