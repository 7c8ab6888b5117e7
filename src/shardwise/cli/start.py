"""Whether this process is a rank or the launcher of ranks, decided once for every command."""

from collections.abc import Sequence

from shardwise.cli.arguments import Arguments, LaunchArguments
from shardwise.cli.launch import launch_ranks, shardwise_command
from shardwise.cli.rank import RankEnvironment
from shardwise.core.errors import ConfigError


def start_ranks(command: str, argv: Sequence[str], arguments: Arguments) -> int | None:
    """Start the ranks of a command, unless this process is one of them, or the only one.

    Args:
        command: of ``shardwise``.
        argv: the arguments after it.
        arguments: the same, parsed.

    Returns:
        The exit code of the ranks; None if this process is to do the work itself.

    Raises:
        ConfigError: the arguments do not fit the number of ranks, or ``--nproc`` asks for another than a launcher
            started.
        ShardwiseError: what ``arguments`` raised when it looked at the rest.
    """
    if not isinstance(arguments, LaunchArguments):
        return None
    environment = RankEnvironment.read()
    world_size = environment.world_size if environment is not None else arguments.nproc or arguments.num_ranks
    if arguments.nproc not in (None, world_size):
        raise ConfigError(
            f"--nproc asks for {arguments.nproc} ranks, but the launcher started {world_size}; leave --nproc out"
        )
    try:
        arguments.check_world(world_size)
    except ConfigError as error:
        if environment is None:
            raise
        raise ConfigError(
            f"{error} (WORLD_SIZE={world_size} is in the environment; unset it and RANK if no launcher set them)"
        ) from error
    if environment is not None:
        return None
    arguments.check()
    if world_size == 1:
        return None
    arguments.prepare(world_size)
    program, name = shardwise_command(command, *argv), f"shardwise {command}"
    return launch_ranks(world_size, program, command=name, debug=arguments.debug, way_on=arguments.way_on)
