"""A watchdog that detects ranks that wait too long, reports which rank they wait for, and ends this rank at a limit.

Each rank writes a heartbeat to the store every few seconds. From the heartbeats of the others it derives which rank
keeps which waiting.

A step costs nothing extra: every few seconds the watchdog reads the waits registered by other threads
(``core.communication.agreement``). It has two threads, because a thread that uses the store may hang when the network
connection is lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from shardwise.core.communication import agreement
from shardwise.core.errors import DesyncError
from shardwise.core.processes import Process
from shardwise.run.processes.stopping import write_complete

_LONGEST_PATIENCE = 30.0
_LONGEST_INTERVAL = 2.0
_SHORTEST_SILENCE = 2.0
_STORE_SECONDS = 5.0
_IN_STREAM = "a collective on the device"
_NAMED_RANKS = 8

logger = logging.getLogger("shardwise")


class BeatFiles:
    """Heartbeats in files, one for each rank: a ``FileStore`` would keep every one of them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder

    def set(self, rank: str, text: str) -> None:
        write_complete(self._folder / rank, text)

    def get(self, rank: str) -> bytes:
        return (self._folder / rank).read_bytes()


class Watch:
    """Watches this rank's waits from ``start`` to ``stop``.

    A wait in a ``limited`` phase ends at the limit, for any cause. Any other wait may last as long as the ranks it
    waits for are alive and working: reading data for an hour is not a hang. A long wait is logged once, to the logger
    ``shardwise``, after a tenth of the limit or 30 seconds, whichever is less. When a wait must end, a DesyncError is
    passed to ``threading.excepthook`` and the process exits with code 1, because nothing else ends a thread that is
    inside a collective.

    Args:
        store: heartbeats of all ranks, a store for this watchdog alone or ``BeatFiles``.
        rank, world_size: global rank, and number of ranks.
        limit: limit in seconds.
        waits_in_stream: True if collectives return to the host before they complete (NCCL); a step without progress
            then counts as a wait.
    """

    def __init__(self, store: Any, rank: int, world_size: int, *, limit: float, waits_in_stream: bool = False) -> None:
        self._store = store
        self._world_size = world_size
        self._limit = limit
        self._patience = min(_LONGEST_PATIENCE, limit / 10)
        # A busy machine may delay a thread for a moment, however small the limit.
        self._quiet = max(self._patience / 2, _SHORTEST_SILENCE)
        self._interval = min(_LONGEST_INTERVAL, self._patience / 5)
        self._waits_in_stream = waits_in_stream
        host = socket.gethostname()
        self._own = Heartbeat(rank, 0, os.getpid(), os.environ.get("GROUP_RANK", host), host, "preparing")
        self._doing, self._is_limited = "preparing", False
        self._heard: dict[int, tuple[Heartbeat, float]] = {}
        self._answered = time.monotonic()
        # Listen to all ranks at first, to learn their hosts, and always to the next rank, so that each has a listener.
        self._next = (rank + 1) % world_size
        self._wanted: set[int] = set()
        # Silence is counted from when this rank started listening.
        self._listened: dict[int, float] = {}
        self._listen_to(set(range(world_size)) - {rank})
        self._looked = self._awake = time.monotonic()
        self._progress: object = None
        self._progressed = time.monotonic()
        self._said: set[tuple[object, ...]] = set()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Publish the first heartbeat, and start the threads that exchange heartbeats and look for lost ranks."""
        self._store.set(str(self._own.rank), self._own.to_text())
        for name, body in (("shardwise-beats", self._exchange), ("shardwise-watch", self._watch)):
            thread = threading.Thread(target=body, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        agreement.set_ended_ranks(self._ended_ranks)

    def stop(self) -> None:
        """Stop watching, and tell the other ranks that this one is done."""
        agreement.set_ended_ranks(dict)
        self._stopping.set()
        for thread in self._threads:
            thread.join(_STORE_SECONDS)

    @contextlib.contextmanager
    def phase(self, doing: str, *, limited: bool) -> Iterator[None]:
        """Set, for the block, what this rank is ``doing`` ("at step 12", for messages) and if waits are ``limited``."""
        before = self._doing, self._is_limited
        self._doing, self._is_limited = doing, limited
        try:
            yield
        finally:
            self._doing, self._is_limited = before

    def _exchange(self) -> None:
        while not self._stopping.wait(self._interval):
            # If the store does not answer, the watching thread handles it.
            with contextlib.suppress(Exception):
                self._store.set(str(self._own.rank), self._own.to_text())
                for rank in sorted(self._wanted):
                    beat = Heartbeat.from_text(self._store.get(str(rank)))
                    known = self._heard.get(rank)
                    if known is None or known[0].number != beat.number:
                        self._heard[rank] = beat, time.monotonic()
                self._answered = time.monotonic()
        with contextlib.suppress(Exception):
            self._store.set(str(self._own.rank), dataclasses.replace(self._own, left=True).to_text())

    def _watch(self) -> None:
        try:
            while not self._stopping.wait(self._interval):
                self._look()
        except DesyncError:
            self._exit()

    def _ended_ranks(self) -> dict[int, int]:
        """Return the ranks of this host whose process has ended, with its id."""
        beats = [beat for beat, _ in list(self._heard.values()) if beat.node == self._own.node and not beat.left]
        return {beat.rank: beat.pid for beat in beats if Process.find(beat.pid) is None}

    def _wake(self, cause: Cause) -> None:
        """Continue stopped processes of this host, so that they receive the signals of their launcher."""
        for rank in cause.ranks:
            beat, _ = self._heard.get(rank, (self._own, 0.0))
            if beat.node == self._own.node and beat.pid != self._own.pid:
                with contextlib.suppress(OSError):
                    os.kill(beat.pid, signal.SIGCONT)

    def _exit(self) -> NoReturn:
        kind, error, trace = sys.exc_info()
        assert kind is not None
        try:
            threading.excepthook(threading.ExceptHookArgs((kind, error, trace, threading.current_thread())))
        finally:
            os._exit(1)

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked > self._quiet:
            # This process was stopped or had no core to run on, so that the silence was not that of the other ranks.
            self._answered = self._progressed = self._awake = now
            self._listened = dict.fromkeys(self._listened, now)
        self._looked = now
        thread, wait = min(agreement.waits().items(), key=lambda item: item[1].since, default=(0, None))
        try:
            own = self._observe(thread, wait, now)
        except (RuntimeError, ValueError):
            return  # The group was destroyed in the meantime.
        self._own = own
        if len(self._heard) == self._world_size - 1:
            self._listen_to({self._next} | (self._suspected_ranks() if own.waits >= self._patience / 3 else set()))
        if own.waits >= self._patience:
            cause = cause_of_waiting(own, self._others(now), quiet=self._quiet, unheard=now - self._answered)
            if wait is not None:
                wait.finding = cause.text
            self._say_once(cause)
            if self._is_hang(cause):
                self._wake(cause)
                raise DesyncError(cause.text)

    def _observe(self, thread: int, wait: agreement.Wait | None, now: float) -> Heartbeat:
        collectives = _collectives()
        progress = (self._doing, collectives, None if wait is None else wait.since)
        if progress != self._progress:
            self._progress, self._progressed = progress, now
        last = self._own
        own = Heartbeat(
            last.rank, last.number + 1, last.pid, last.node, last.host, self._doing, collectives=collectives
        )
        if wait is None:
            return self._with_suspicion(own, now - self._progressed, now)
        waits = now - max(wait.since, self._awake)
        return dataclasses.replace(
            own,
            waits=waits,
            # Finding the layer takes a while.
            call=wait.describe(thread) if waits >= self._patience / 2 else "",
            group=wait.group_name,
            ranks=tuple(wait.ranks),
            missing=None if wait.missing is None else tuple(wait.missing()),
        )

    def _with_suspicion(self, own: Heartbeat, idle: float, now: float) -> Heartbeat:
        """Add a suspected wait to a beat without one: no progress may be work, or a wait in a library or stream."""
        if idle < self._patience / 3:
            return own
        if self._waits_in_stream and self._is_limited:
            behind = ranks_behind(own, self._others(now), quiet=self._quiet)
            everybody = tuple(range(self._world_size))
            # Only a rank that reports a wait listens to all ranks.
            return dataclasses.replace(
                own, waits=idle if behind else self._patience / 3, call=_IN_STREAM, ranks=everybody, missing=behind
            )
        silent = self._others(now)[self._next].silent if self._next in self._heard else 0.0
        silent = min(idle, max(silent, now - self._answered))
        if silent < max(self._quiet, min(_LONGEST_PATIENCE, self._limit / 4)):
            return own
        both = (own.rank, self._next)
        return dataclasses.replace(own, waits=silent, call="another operation", ranks=both, missing=(self._next,))

    def _suspected_ranks(self) -> set[int]:
        """Return the ranks that this one waits for, directly or through other ranks."""
        found, left = set(), set(self._own.ranks)
        while left:
            rank = left.pop()
            if rank not in found and rank != self._own.rank:
                found.add(rank)
                if rank in self._heard and self._heard[rank][0].waits >= self._patience / 3:
                    left |= set(self._heard[rank][0].ranks)
        return found

    def _others(self, now: float) -> dict[int, PeerStatus]:
        return {
            rank: PeerStatus(
                beat,
                0.0 if beat.left else now - max(since, self._listened.get(rank, now)),
                since >= self._listened.get(rank, now),
            )
            for rank, (beat, since) in list(self._heard.items())
        }

    def _listen_to(self, ranks: set[int]) -> None:
        now = time.monotonic()
        self._listened = {rank: self._listened.get(rank, now) for rank in ranks}
        self._wanted = ranks

    def _say_once(self, cause: Cause) -> None:
        key = (cause.ranks, self._doing)
        if key not in self._said:
            self._said.add(key)
            logger.warning("rank %d: %s", self._own.rank, cause.text, extra={"once": f"waiting {key}"})

    def _is_hang(self, cause: Cause) -> bool:
        if self._own.waits < self._limit:
            return False
        return self._is_limited or cause.silent >= self._limit or cause.stuck >= self._limit / 2


def _collectives() -> dict[str, int]:
    numbers = {}
    for group in list(dist.distributed_c10d._world.pg_map):
        with contextlib.suppress(RuntimeError):
            numbers[str(group.group_name)] = agreement.num_collectives(group)
    return numbers


@dataclass(frozen=True)
class Heartbeat:
    """A heartbeat of a rank.

    The rank waits for ``waits`` seconds (0 if it does not) in ``call`` on ``group``, for ranks; those in
    ``missing`` have not arrived (None if unknown). ``collectives`` counts the collectives that it has started in each
    process group, by the group's name.
    """

    rank: int
    number: int
    pid: int
    node: str
    host: str
    doing: str
    waits: float = 0.0
    call: str = ""
    group: str = ""
    ranks: tuple[int, ...] = ()
    missing: tuple[int, ...] | None = None
    collectives: Mapping[str, int] = field(default_factory=dict)
    left: bool = False

    def to_text(self) -> str:
        """Convert to JSON; the inverse of ``from_text``."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> Heartbeat:
        """Parse the JSON of ``to_text``."""
        value: dict[str, Any] = json.loads(text)
        missing = value["missing"]
        return cls(**{**value, "ranks": tuple(value["ranks"]), "missing": None if missing is None else tuple(missing)})


@dataclass(frozen=True)
class PeerStatus:
    """The last heartbeat from another rank, and the seconds since it, or since this rank started listening if later."""

    beat: Heartbeat
    silent: float
    fresh: bool = True


@dataclass(frozen=True)
class Cause:
    """The cause of a rank's wait.

    Attributes:
        ranks: ranks that the others wait for, directly or through ranks that also wait.
        text: description: "waiting for rank 1 for 30 s, in all_reduce of layer ..., at step 12; ...".
        silent: longest time in seconds that one of ``ranks`` has been silent.
        stuck: shortest wait in a cycle of ranks that wait for each other, in seconds; 0 if there is no cycle.
    """

    ranks: tuple[int, ...]
    text: str
    silent: float
    stuck: float


def cause_of_waiting(own: Heartbeat, heard: Mapping[int, PeerStatus], *, quiet: float, unheard: float = 0.0) -> Cause:
    """Find the cause of this rank's wait.

    Args:
        own: this rank's beat.
        heard: last beats of the other ranks, without those that never sent one.
        quiet: seconds without a beat after which a rank is silent; also the minimum length of a wait that counts.
        unheard: seconds since the store last answered; the beats are outdated by this time.
    """
    lost = unheard >= quiet
    known = {**heard, own.rank: PeerStatus(own, 0.0)}
    first = _missing(own, known, quiet, lost)
    roots: dict[int, None] = {}
    circle: list[float] = [own.waits]
    seen, left = {own.rank}, list(first)
    while left:
        rank = left.pop(0)
        if rank in seen:
            continue
        seen.add(rank)
        beat = known[rank].beat if rank in known else None
        waits_too = beat is not None and beat.waits >= quiet and not lost
        if beat is not None and waits_too and known[rank].silent < quiet:
            following = _missing(beat, known, quiet, lost)
            if following:
                circle.append(beat.waits)
                left += following
                continue
        roots[rank] = None
    ranks = tuple(sorted(roots)) or tuple(first)
    silence = {rank: _silence(rank, known, lost, unheard, own.node) for rank in ranks}
    silent = [rank for rank in ranks if silence[rank] >= quiet]
    text = f"waiting for {_names(ranks, known) or 'other ranks'} for {own.waits:.0f} s, in {own.call}, {own.doing}"
    first_known = known[ranks[0]].beat if ranks and ranks[0] in known and known[ranks[0]].fresh else None
    if lost:
        text += f"; the launcher's store has not answered for {unheard:.0f} s"
    elif silent:
        whose = "" if len(silent) == len(ranks) else f" of {_names(silent, known)}"
        text += f"; no sign of life{whose} for {min(silence[rank] for rank in silent):.0f} s"
    elif first_known is not None and not roots and first_known.call:
        text += f"; rank {ranks[0]} waits too, in {first_known.call}, {first_known.doing}"
    elif first_known is not None and first_known.doing != own.doing:
        text += f"; rank {ranks[0]} is {first_known.doing}"
    stuck = 0.0 if roots else min(circle)
    return Cause(ranks, text, max(silence.values(), default=0.0), stuck)


def ranks_behind(own: Heartbeat, heard: Mapping[int, PeerStatus], *, quiet: float) -> tuple[int, ...]:
    """Return the ranks that are silent or have started fewer collectives than ``own`` in a group that both are in."""
    return tuple(
        rank
        for rank, other in heard.items()
        if other.silent >= quiet
        or (
            other.fresh
            and any(number < own.collectives.get(name, 0) for name, number in other.beat.collectives.items())
        )
    )


def _missing(beat: Heartbeat, known: Mapping[int, PeerStatus], quiet: float, lost: bool) -> list[int]:
    """Return the ranks that the sender of ``beat`` waits for directly."""
    if beat.missing is not None:
        return list(beat.missing)
    others = [rank for rank in beat.ranks if rank != beat.rank]
    if lost:
        away = [rank for rank in others if rank not in known or known[rank].beat.node != beat.node]
        return away or others
    silent = [rank for rank in others if rank not in known or known[rank].silent >= quiet]
    numbers = {
        rank: known[rank].beat.collectives.get(beat.group, 0)
        for rank in others
        if rank not in silent and known[rank].fresh
    }
    own = beat.collectives.get(beat.group, 0)
    # Only the ranks that have started the fewest collectives: the others may be waiting for them.
    fewest = min(numbers.values(), default=own)
    behind = [rank for rank, number in numbers.items() if number == fewest < own]
    return silent + behind or others


def _silence(rank: int, known: Mapping[int, PeerStatus], lost: bool, unheard: float, node: str) -> float:
    if rank not in known:
        return unheard
    if lost:
        return unheard if known[rank].beat.node != node else 0.0
    return known[rank].silent


def _names(ranks: Sequence[int], known: Mapping[int, PeerStatus]) -> str:
    """Format ranks: "rank 1", or "ranks 1 on b and 3 on c" if there are several hosts."""
    several = len({heard.beat.node for heard in known.values()}) > 1
    names = [
        f"{rank} on {known[rank].beat.host}" if several and rank in known else str(rank)
        for rank in ranks[:_NAMED_RANKS]
    ]
    if len(ranks) > _NAMED_RANKS:
        names.append(f"{len(ranks) - _NAMED_RANKS} more")
    if len(names) <= 1:
        return f"rank {names[0]}" if names else ""
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"
