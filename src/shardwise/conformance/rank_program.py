"""The process that runs cases: ``python -m shardwise.conformance.rank_program TARGET FOLDER``.

It reads orders, one a line. It imports the target and the cases once, and its ranks are copies of it (``fork``), so
that new ones after a hang or a crash cost nothing. It starts no thread itself.
"""

import contextlib
import datetime
import gc
import inspect
import json
import os
import platform
import random
import selectors
import signal
import sys
import time
import traceback
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO, Any, cast

import torch
import torch.distributed as dist

from shardwise.conformance.case import Case, all_cases
from shardwise.conformance.targets import load_target
from shardwise.core.sockets import own_inodes, refuse_strangers
from shardwise.core.topology import Groups, Topology

_AFTER_FAILURE_SECONDS = 1.0
"""Time for the other ranks to end a case after one rank failed. Those that wait for it are then ended."""


def main(target_name: str, folder: Path) -> None:
    """Import the target, say what it offers, and run cases until the input ends."""
    # Ctrl-C reaches every process of the terminal, but only the first handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Libraries print; the replies go to the first standard output, all else to the log.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        cases, target = {each.name: each for each in all_cases()}, load_target(target_name)
    except Exception as error:
        traceback.print_exc()
        print(json.dumps({"error": _first_line(error)}), file=replies)
        return
    offered = _offered(target)
    versions = {"python": platform.python_version(), "torch": torch.__version__} | getattr(target, "versions", {})
    print(json.dumps({"offered": offered, "versions": versions}), file=replies)
    # Otherwise each full collection in a rank would visit and copy everything that was imported.
    gc.freeze()
    ranks = _Ranks(target, folder)
    for line in sys.stdin:
        order = json.loads(line)
        outcome, message = ranks.run(cases[order["case"]], order["seconds"])
        print(json.dumps({"outcome": outcome, "message": message}), file=replies)
    ranks.end()


def _offered(target: ModuleType) -> list[str]:
    """Return the names that a target offers, and for functions ``name.argument``; ``name.*`` if it takes any."""
    names = [name for name in dir(target) if not name.startswith("_") and getattr(target, name)]
    arguments = [
        f"{name}.{'*' if argument.kind is argument.VAR_KEYWORD else argument.name}"
        for name in names
        if inspect.isfunction(getattr(target, name))
        for argument in inspect.signature(getattr(target, name)).parameters.values()
    ]
    return names + arguments


@dataclass
class _Rank:
    pid: int
    orders: IO[str]
    replies: IO[str]


class _Ranks:
    """The processes that run cases; as many as the largest case so far needed."""

    def __init__(self, target: ModuleType, folder: Path) -> None:
        self._target, self._folder = target, folder
        self._ranks: list[_Rank] = []
        self._number = 0

    def run(self, case: Case, seconds: float) -> tuple[str, str]:
        """Run a case, and return the outcome and its message; after a failure, new ranks run the next one."""
        while len(self._ranks) < case.ranks:
            self._fork()
        self._number += 1
        order = {"case": case.name, "store": str(self._folder / f"store{self._number}"), "seconds": seconds}
        for rank in self._ranks[: case.ranks]:
            print(json.dumps(order), file=rank.orders, flush=True)
        replies, complaint = self._replies(case.ranks, seconds)
        if complaint is not None or any(reply["outcome"] != "passed" for _, reply in replies):
            # State that a failure left must not fail the next case.
            self.end()
        for outcome in ("failed", "not offered"):
            for number, reply in replies:
                if reply["outcome"] == outcome:
                    return outcome, f"rank {number}: {reply['message']}"
        return ("passed", "") if complaint is None else ("failed", complaint)

    def end(self) -> None:
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)
        for rank in self._ranks:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(rank.pid, 0)
            rank.orders.close()
            rank.replies.close()
        self._ranks = []

    def _fork(self) -> None:
        orders, replies = os.pipe(), os.pipe()
        number = len(self._ranks)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                # Ends of other ranks' pipes would hide that their writer has ended.
                for other in self._ranks:
                    other.orders.close()
                    other.replies.close()
                os.close(orders[1])
                os.close(replies[0])
                _serve(self._target, number, os.fdopen(orders[0]), os.fdopen(replies[1], "w", buffering=1))
                code = 0
            finally:
                os._exit(code)
        os.close(orders[0])
        os.close(replies[1])
        self._ranks.append(_Rank(pid, os.fdopen(orders[1], "w"), os.fdopen(replies[0])))

    def _replies(self, count: int, seconds: float) -> tuple[list[tuple[int, dict[str, str]]], str | None]:
        """Return the replies of the first ranks, in order of arrival, and why there are not as many; or None."""
        replies: list[tuple[int, dict[str, str]]] = []
        end, waiting = time.monotonic() + seconds, set(range(count))
        with selectors.DefaultSelector() as selector:
            for number in range(count):
                selector.register(self._ranks[number].replies, selectors.EVENT_READ, number)
            while waiting:
                events = selector.select(max(end - time.monotonic(), 0))
                if not events:
                    who = ", ".join(map(str, sorted(waiting)))
                    return replies, f"rank {who} did not end within the time limit"
                for key, _ in events:
                    output = cast(IO[str], key.fileobj)
                    line = output.readline()
                    if not line:
                        return replies, self._end_of(key.data)
                    reply = json.loads(line)
                    replies.append((key.data, reply))
                    waiting.discard(key.data)
                    selector.unregister(output)
                    if reply["outcome"] != "passed":
                        end = min(end, time.monotonic() + _AFTER_FAILURE_SECONDS)
        return replies, None

    def _end_of(self, number: int) -> str:
        _, status = os.waitpid(self._ranks[number].pid, 0)
        code = os.waitstatus_to_exitcode(status)
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"rank {number} ended {how}"


def _serve(target: ModuleType, rank: int, orders: IO[str], replies: IO[str]) -> None:
    """Run cases as a rank, until the input ends."""
    cases = {each.name: each for each in all_cases()}
    for line in orders:
        order = json.loads(line)
        outcome, message = "passed", ""
        try:
            with _world(cases[order["case"]], target, rank, order["store"], order["seconds"]) as groups:
                cases[order["case"]].function(target, groups)
        except NotImplementedError as error:
            outcome, message = "not offered", _first_line(error)
        except BaseException as error:
            traceback.print_exc()
            outcome, message = "failed", _first_line(error)
        print(json.dumps({"outcome": outcome, "message": message}), file=replies, flush=True)


@contextlib.contextmanager
def _world(case: Case, target: ModuleType, rank: int, store: str, seconds: float) -> Iterator[Groups]:
    """Yield the groups of a case, and close them at its end."""
    nothing: Any = lambda *_: None  # noqa: E731
    before = own_inodes()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, case.ranks),  # type: ignore[attr-defined]
        rank=rank,
        world_size=case.ranks,
        timeout=datetime.timedelta(seconds=seconds),
    )
    try:
        refuse_strangers(before)
        topology = Topology.create(tp=case.tp, pp=case.pp, cp=case.cp, ep=case.ep, etp=case.etp)
        groups = Groups.of(topology)
        random.seed(0)
        try:
            getattr(target, "start", nothing)(groups)
            # Each case has the same numbers on all ranks, whichever cases ran before.
            torch.manual_seed(zlib.crc32(case.name.encode()))
            yield groups
            # A rank that ended earlier would close connections that another is still opening.
            dist.barrier()
        finally:
            torch.set_default_dtype(torch.float32)
            getattr(target, "stop", nothing)()
            topology.destroy()
    finally:
        dist.destroy_process_group()


def _first_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return text if isinstance(error, AssertionError) and text else f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
