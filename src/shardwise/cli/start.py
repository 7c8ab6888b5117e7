"""Whether this process is a rank or the launcher of ranks, decided once for every command."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwise.cli.arguments import LaunchArguments
from shardwise.cli.launch import launch_ranks, shardwise_command
from shardwise.cli.rank import RankEnvironment
from shardwise.errors import ConfigError
from shardwise.training.stopping import Interrupted


def run_in_ranks(
    command: str,
    argv: Sequence[str],
    arguments: LaunchArguments,
    body: Callable[[], None],
    *,
    check: Callable[[], None] | None = None,
    prepare: Callable[[int], object] | None = None,
    way_on: Callable[[], str] | None = None,
) -> int:
    """Run ``body`` if this process is a rank or the only one, else start the ranks that will.

    Args:
        command: of ``shardwise``.
        argv: the arguments after it.
        arguments: the same, parsed.
        body: what a rank does.
        check: raises what is wrong with the rest, as far as it is found in no time; not called in a rank of several.
        prepare: raises what a rank would, given their number; called before they are started, which takes seconds.
        way_on: says how the command can go on after it ended early.

    Returns:
        The exit code.

    Raises:
        ConfigError: the arguments do not fit the number of ranks, or ``--nproc`` asks for another than a launcher
            started.
        ShardwiseError: what ``check``, ``prepare`` or ``body`` raised.
    """
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
    if environment is None and check is not None:
        check()
    try:
        if environment is not None or world_size == 1:
            body()
            return 0
        if prepare is not None:
            prepare(world_size)
        program, name = shardwise_command(command, *argv), f"shardwise {command}"
        return launch_ranks(world_size, program, command=name, debug=arguments.debug, way_on=way_on)
    except Interrupted as interruption:
        if way_on is not None:
            interruption.note = way_on()
        raise
