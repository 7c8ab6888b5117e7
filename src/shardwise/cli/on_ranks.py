"""Call a Python function on several ranks of this machine, from a notebook or a script.

The ranks are new processes. cloudpickle sends them the function: one that a notebook or a script defines goes by value,
as no process can import it, and one of a module by its name. Forks of a notebook's process would lack its threads, some
with locks, and could use no GPU that it has used.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import select
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from shardwise.cli.launch import Ending, run_ranks
from shardwise.cli.reporting import DEBUG_HINT, RankEnvironment, run_command
from shardwise.core.errors import ConfigError, LaunchError
from shardwise.core.processes import temporary_prefix
from shardwise.training.bounds import DEFAULT_TIMEOUT, LOCAL_RANKS, TIMEOUT, checks_arguments

_T = TypeVar("_T")

# The path of this process finds the same modules, this one included.
_ANSWER = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from shardwise.cli.on_ranks import answer; answer()"
)
_POLL_MILLISECONDS = 100
_READ_BYTES = 1 << 16


@checks_arguments
def on_ranks(
    function: Callable[..., _T],
    *args: Any,
    nproc: Annotated[int, LOCAL_RANKS] = 2,
    join: bool = True,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    timeout: Annotated[float, TIMEOUT] = DEFAULT_TIMEOUT,
) -> list[_T]:
    """Call a function on ranks of this machine and return what each rank returned.

    The ranks are processes that live for this call. What they print appears here line by line.

    Args:
        function: what each rank calls, also a lambda or a function of a notebook. What it refers to is copied.
        args: its arguments, copied to each rank.
        nproc: number of ranks.
        join: True to call it in the process group of all ranks (``Topology.create`` splits it). False for a function
            that joins the ranks itself, as those of ``shardwise.run`` do.
        device: device of the ranks; "auto" takes a GPU if there is one for each. Only for ``join``.
        timeout: maximum seconds to wait for another rank. Only for ``join``.

    Returns:
        The results, by rank.

    Raises:
        ConfigError: an argument is wrong, this process is itself a rank, or the function, an argument or a result
            cannot be copied to another process.
        LaunchError: the ranks could not be started, or one ended without an error of Python.
        Exception: what the function raised on the rank that failed first; a note has the rank and its stack trace.
    """
    import json

    environment = RankEnvironment.read()
    if environment is not None:
        raise ConfigError(
            f"on_ranks starts ranks, and this process is rank {environment.rank} of {environment.world_size} already; "
            "call the function itself, or unset RANK and WORLD_SIZE if no launcher set them"
        )
    request = _packed((function, args, join, device, timeout), f"{_name_of(function)} or one of its arguments")
    # The folder can be opened by this user only.
    with tempfile.TemporaryDirectory(prefix=temporary_prefix("calls"), ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "call").write_bytes(request)
        command = [sys.executable, "-P", "-c", _ANSWER, name, json.dumps(sys.path)]
        with _printed_here() as output:
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            ending = run_ranks(nproc, command, streams=streams)
        if ending is not None:
            raise _error_of(ending, folder)
        return [_unpacked(folder / f"result{rank}") for rank in range(nproc)]


def answer() -> None:
    """Make the call of ``on_ranks``, as one of its ranks."""
    sys.exit(run_command("on_ranks", partial(_answer, Path(sys.argv[1]))))


def _answer(folder: Path) -> None:
    # A line at a time, so that lines of several ranks do not mix.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # they are files here
    rank = os.environ["RANK"]
    try:
        function, args, join, device, timeout = _unpacked(folder / "call")
        if join:
            from shardwise.run.processes.ranks import open_ranks

            ranks: Any = open_ranks(device, timeout=timeout)
        else:
            ranks = nullcontext()
        with ranks:
            result = function(*args)
        (folder / f"result{rank}").write_bytes(_packed(result, f"the result of {_name_of(function)}"))
    except Exception as error:
        error.add_note(f"on rank {rank}:\n{''.join(traceback.format_exception(error)).rstrip()}")
        with contextlib.suppress(ConfigError):
            (folder / f"error{rank}").write_bytes(_packed(error, "an error"))
        raise


def _error_of(ending: Ending, folder: Path) -> Exception:
    """Return the error of the rank that failed first, or a LaunchError if this process cannot make that error."""
    trace = next((report.trace for report in ending.reports if report.rank == ending.rank), "")
    if trace:
        # A module that is missing here, or a class that cannot be made, may raise anything.
        with contextlib.suppress(Exception):
            error = _unpacked(folder / f"error{ending.rank}")
            if isinstance(error, Exception):
                return error
    failure = LaunchError(ending.message.removesuffix(DEBUG_HINT))
    if trace:
        failure.add_note(trace.rstrip())
    return failure


def _packed(value: object, what: str) -> bytes:
    import cloudpickle

    try:
        packed: bytes = cloudpickle.dumps(value)
    except Exception as error:  # the object's own methods may raise anything
        raise ConfigError(
            f"{what} cannot be copied to another process ({type(error).__name__}: {error}); groups, locks, open files "
            "and generators belong to one process: make them in the function"
        ) from error
    return packed


def _unpacked(path: Path) -> Any:
    import cloudpickle

    return cloudpickle.loads(path.read_bytes())


def _name_of(function: object) -> str:
    return str(getattr(function, "__qualname__", function))


@contextlib.contextmanager
def _printed_here() -> Iterator[int]:
    """Yield a descriptor; what is written to it appears in ``sys.stdout``, which in a notebook is no file."""
    reading, writing = os.pipe()
    ended = threading.Event()
    printer = threading.Thread(target=_print_all, args=(reading, ended), name="output of the ranks")
    printer.start()
    try:
        yield writing
    finally:
        os.close(writing)
        ended.set()
        printer.join()
        os.close(reading)


def _print_all(reading: int, ended: threading.Event) -> None:
    """Print what arrives, until all writers have closed it, or until ``ended``: a rank may have left a process."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    while True:
        last = ended.is_set()
        if poll.poll(0 if last else _POLL_MILLISECONDS):
            data = os.read(reading, _READ_BYTES)
            if not data:
                return
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.write(decoder.decode(data))
                sys.stdout.flush()
        elif last:
            return
