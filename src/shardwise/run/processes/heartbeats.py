"""What ranks tell each other of themselves while they run, and who keeps whom waiting.

Each rank puts a beat into the store every few seconds. Nothing here waits or communicates; ``watch`` does.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_NAMED_RANKS = 8


@dataclass(frozen=True)
class Beat:
    """One sign of life.

    Attributes:
        rank: global rank.
        number: grows with every beat.
        pid: of its process.
        node: tells hosts apart.
        host: the host's name.
        doing: "step 12", "preparing".
        waits: seconds that it has waited for another rank; 0 if it does not wait.
        call: what it waits in.
        group: name of the process group in which it waits; empty if it has none.
        ranks: global ranks of that group.
        missing: those that it knows not to have come; None if it does not know.
        collectives: how many collectives it has started in each process group, by name.
        left: it has done its work and goes without further beats.
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
        """As JSON; the inverse of ``from_text``."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> Beat:
        """From ``to_text``'s text."""
        value: dict[str, Any] = json.loads(text)
        missing = value["missing"]
        return cls(**{**value, "ranks": tuple(value["ranks"]), "missing": None if missing is None else tuple(missing)})


@dataclass(frozen=True)
class Heard:
    """What a rank knows of another.

    Attributes:
        beat: the last one.
        silent: seconds since it came, or since this rank began to listen.
        fresh: it came after that.
    """

    beat: Beat
    silent: float
    fresh: bool = True


@dataclass(frozen=True)
class Cause:
    """Why a rank waits.

    Attributes:
        ranks: those that all others wait for, directly or through ranks that wait themselves.
        text: "waiting for rank 1 for 30 s, in all_reduce of layer ..., at step 12; ...".
        silent: seconds without a beat of the one of them that is silent for longest.
        stuck: shortest wait of ranks that wait for each other in a circle; 0 if there is none.
    """

    ranks: tuple[int, ...]
    text: str
    silent: float
    stuck: float


def cause_of_waiting(own: Beat, heard: Mapping[int, Heard], *, quiet: float, unheard: float = 0.0) -> Cause:
    """Why ``own`` waits.

    Args:
        own: this rank's beat.
        heard: what is known of others; a rank that it lacks has never been heard.
        quiet: seconds without a beat that are silence, and after which a wait is one.
        unheard: seconds for which the store has not answered; then nothing new is known of anybody.
    """
    lost = unheard >= quiet
    known = {**heard, own.rank: Heard(own, 0.0)}
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
    text = f"waiting for {_names(ranks, known, own) or 'other ranks'} for {own.waits:.0f} s, in {own.call}, {own.doing}"
    first_known = known[ranks[0]].beat if ranks and ranks[0] in known and known[ranks[0]].fresh else None
    if lost:
        text += f"; the launcher's store has not answered for {unheard:.0f} s"
    elif silent:
        whose = "" if len(silent) == len(ranks) else f" of {_names(silent, known, own)}"
        text += f"; no sign of life{whose} for {min(silence[rank] for rank in silent):.0f} s"
    elif first_known is not None and not roots and first_known.call:
        text += f"; rank {ranks[0]} waits too, in {first_known.call}, {first_known.doing}"
    elif first_known is not None and first_known.doing != own.doing:
        text += f"; rank {ranks[0]} is {first_known.doing}"
    stuck = 0.0 if roots else min(circle)
    return Cause(ranks, text, max(silence.values(), default=0.0), stuck)


def ranks_behind(own: Beat, heard: Mapping[int, Heard], *, quiet: float) -> tuple[int, ...]:
    """The ranks that have started fewer collectives than ``own`` in a group that both are in, or are silent."""
    return tuple(
        rank
        for rank, other in heard.items()
        if other.silent >= quiet
        or (
            other.fresh
            and any(number < own.collectives.get(name, 0) for name, number in other.beat.collectives.items())
        )
    )


def _missing(beat: Beat, known: Mapping[int, Heard], quiet: float, lost: bool) -> list[int]:
    """The ranks whom the sender of ``beat`` waits for directly."""
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
    # Of those that have started fewer, one that is only one short may itself wait for the last.
    fewest = min(numbers.values(), default=own)
    behind = [rank for rank, number in numbers.items() if number == fewest < own]
    return silent + behind or others


def _silence(rank: int, known: Mapping[int, Heard], lost: bool, unheard: float, node: str) -> float:
    if rank not in known:
        return unheard
    if lost:
        return unheard if known[rank].beat.node != node else 0.0
    return known[rank].silent


def _names(ranks: Sequence[int], known: Mapping[int, Heard], own: Beat) -> str:
    """ "rank 1", "ranks 1 on b and 3 on c": hosts are named where there are several."""
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
