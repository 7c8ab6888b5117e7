"""Pipeline schedules as tables: the actions of each stage on micro-batches, and the messages between stages.

A model consists of ``num_stages * num_chunks`` parts, which run in order; chunk ``c`` of stage ``p`` is part
``c * num_stages + p``. A schedule is a table of actions in order, one row per stage.

====== ===================================================================
letter action on one micro-batch and chunk
====== ===================================================================
F      forward
B      backward: the gradients of the chunk's input and of its weights
I      the first half of a backward: the input's gradient
W      the second half: the gradients of the weights of linear layers
====== ===================================================================

The schedules, with ``p`` stages and ``m`` micro-batches; the forward of a stage takes 1, its backward 2 units of time:

============ ================================= ================================= ====================
name         idle time per stage               micro-batches in flight, stage i  chunks
============ ================================= ================================= ====================
gpipe        3 (p - 1)                         m                                 1
1f1b         3 (p - 1)                         min(m, p - i)                     1
interleaved  3 (p - 1) / chunks                see ``Schedule.in_flight``        2 or more
zero-bubble  p - 1                             min(m, p)                         1
============ ================================= ================================= ====================

Messages are ordered by the time at which they would be sent if every action took its nominal time and messages took
none. Each stage sends and receives its messages in that order. There is no deadlock, even if a send blocks until it is
received: the first action or message in this order that is not done can always be done.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple, get_args

from shardwise.core.errors import ConfigError

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
SCHEDULE_NAMES: tuple[str, ...] = get_args(ScheduleName)


class Kind(Enum):
    """Kind of an action."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"

    @property
    def returns_gradient(self) -> bool:
        """True if the action makes a gradient for the part before."""
        return self in (Kind.BACKWARD, Kind.INPUT_GRADIENT)


class Action(NamedTuple):
    """An action of a stage on one micro-batch and chunk.

    >>> str(Action(Kind.FORWARD, 3)), str(Action(Kind.BACKWARD, 0, chunk=1))
    ('F3', 'B0.1')
    """

    kind: Kind
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


class Slot(NamedTuple):
    """An action with its start and finish times."""

    action: Action
    start: float
    finish: float


DURATIONS: Mapping[Kind, float] = {
    Kind.FORWARD: 1.0,
    Kind.BACKWARD: 2.0,
    Kind.INPUT_GRADIENT: 1.0,
    Kind.WEIGHT_GRADIENT: 1.0,
}
"""Nominal time of actions, relative to the forward of a part; a backward has twice as many products."""


@dataclass(frozen=True)
class Schedule:
    """A table of actions, checked on construction; ``str`` draws its timeline.

    Attributes:
        name: name of the schedule.
        num_stages: number of pipeline-parallel ranks.
        num_micro_batches: number of micro-batches per step.
        num_chunks: number of parts of the model on each stage.
        actions: for each stage, its actions in order.

    Raises:
        ConfigError: there are several chunks on a single stage, a stage would wait for ever, or an action is missing,
            repeated or unknown.
    """

    name: str
    num_stages: int
    num_micro_batches: int
    num_chunks: int
    actions: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        if self.num_stages == 1 and self.num_chunks > 1:
            raise ConfigError(
                f"schedule {self.name!r}: one pipeline stage with {self.num_chunks} chunks has nothing to interleave; "
                "give it one chunk, or use at least 2 stages"
            )
        self._check_actions()
        self.timeline()

    def _check_actions(self) -> None:
        """Check that every part has one forward for every micro-batch, and one backward if there are any."""
        trains = any(action.kind is not Kind.FORWARD for row in self.actions for action in row)
        backwards = ("FB", "FIW") if trains else ("F",)
        keys = {
            (micro_batch, chunk) for micro_batch in range(self.num_micro_batches) for chunk in range(self.num_chunks)
        }
        for stage, row in enumerate(self.actions):
            done: dict[tuple[int, int], str] = dict.fromkeys(keys, "")
            for action in row:
                key = (action.micro_batch, action.chunk)
                if key not in done:
                    raise ConfigError(
                        f"schedule {self.name!r}: stage {stage} does {action}, and there are {self.num_micro_batches} "
                        f"micro-batches and {self.num_chunks} chunks"
                    )
                done[key] += action.kind.value
            for (micro_batch, chunk), kinds in done.items():
                if sorted(kinds) not in [sorted(wanted) for wanted in backwards]:
                    raise ConfigError(
                        f"schedule {self.name!r}: stage {stage} does {kinds or 'nothing'} with micro-batch "
                        f"{micro_batch} of chunk {chunk}; it must be {' or '.join(backwards)}"
                    )

    def __str__(self) -> str:
        return drawn(self.timeline())

    @property
    def num_parts(self) -> int:
        """Number of parts of the model, over all stages."""
        return self.num_stages * self.num_chunks

    def part(self, stage: int, chunk: int) -> int:
        """Return the index of a stage's chunk among the parts of the model."""
        return chunk * self.num_stages + stage

    def place(self, part: int) -> tuple[int, int]:
        """Return ``(stage, chunk)`` of a part."""
        return part % self.num_stages, part // self.num_stages

    def in_flight(self, stage: int) -> int:
        """Return the maximum number of micro-batches (counted per chunk) whose activations ``stage`` holds at once."""
        held = most = 0
        splits = any(action.kind is Kind.WEIGHT_GRADIENT for action in self.actions[stage])
        last = Kind.WEIGHT_GRADIENT if splits else Kind.BACKWARD
        for action in self.actions[stage]:
            held += (action.kind is Kind.FORWARD) - (action.kind is last)
            most = max(most, held)
        return most

    def timeline(self, durations: Mapping[Kind, float] = DURATIONS) -> tuple[tuple[Slot, ...], ...]:
        """Return the times of each stage's actions if messages take no time; raise ConfigError on a deadlock."""
        finished: dict[tuple[Kind, int, int], float] = {}
        slots: list[list[Slot]] = [[] for _ in range(self.num_stages)]
        moved = True
        while moved:
            moved = False
            for stage, actions in enumerate(self.actions):
                row = slots[stage]
                while len(row) < len(actions):
                    action = actions[len(row)]
                    needed = [finished.get(key) for key in self.needs(stage, action)]
                    if None in needed:
                        break
                    start = max([row[-1].finish if row else 0.0, *(time for time in needed if time is not None)])
                    finish = start + durations[action.kind]
                    row.append(Slot(action, start, finish))
                    finished[action.kind, action.micro_batch, self.part(stage, action.chunk)] = finish
                    if action.kind.returns_gradient:
                        finished[Kind.BACKWARD, action.micro_batch, self.part(stage, action.chunk)] = finish
                    moved = True
        for stage, row in enumerate(slots):
            if len(row) < len(self.actions[stage]):
                stuck = self.actions[stage][len(row)]
                raise ConfigError(f"schedule {self.name!r}: stage {stage} would wait for ever before {stuck}")
        return tuple(map(tuple, slots))

    def needs(self, stage: int, action: Action) -> Iterator[tuple[Kind, int, int]]:
        """Yield the actions that must end first, as ``(kind, micro-batch, part)``; BACKWARD may mean INPUT_GRADIENT."""
        part, micro_batch = self.part(stage, action.chunk), action.micro_batch
        if action.kind is Kind.FORWARD:
            if part > 0:
                yield Kind.FORWARD, micro_batch, part - 1
        elif action.kind.returns_gradient:
            yield Kind.FORWARD, micro_batch, part
            if part < self.num_parts - 1:
                yield Kind.BACKWARD, micro_batch, part + 1
        else:
            yield Kind.INPUT_GRADIENT, micro_batch, part


def drawn(timeline: Sequence[Sequence[Slot]]) -> str:
    """Return the timeline as text: one line per stage, one column per unit of time, dots while the stage waits.

    >>> row = (Slot(Action(Kind.FORWARD, 0), 0, 1), Slot(Action(Kind.BACKWARD, 0), 2, 4))
    >>> print(drawn([row]))
    stage 0  F0 .  B0 B0
    """
    width = max(len(str(slot.action)) for row in timeline for slot in row) + 1
    end = round(max(row[-1].finish for row in timeline))
    lines = []
    for stage, row in enumerate(timeline):
        cells = ["."] * end
        for slot in row:
            for time in range(round(slot.start), round(slot.finish)):
                cells[time] = str(slot.action)
        lines.append((f"stage {stage}  " + "".join(cell.ljust(width) for cell in cells)).rstrip())
    return "\n".join(lines)


class Message(NamedTuple):
    """Hidden states (or, with ``is_gradient``, a gradient) that a part of the model computed for a neighbour."""

    micro_batch: int
    part: int
    is_gradient: bool
    source: int
    target: int


class Exchange(NamedTuple):
    """Messages that a stage sends and receives at the same time."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


Program = tuple[Action | Exchange, ...]
"""Actions and exchanges of a stage, in order."""


def programs(schedule: Schedule) -> tuple[Program, ...]:
    """Return the program of each stage, in which a message is sent as soon as its action ends.

    >>> from shardwise.training.pipeline.schedules import make_schedule
    >>> for step in programs(make_schedule("gpipe", 2, 1))[1]:
    ...     print(step if isinstance(step, Exchange) else str(step))
    Exchange(sends=(), receives=(Message(micro_batch=0, part=0, is_gradient=False, source=0, target=1),))
    F0
    B0
    Exchange(sends=(Message(micro_batch=0, part=1, is_gradient=True, source=1, target=0),), receives=())
    """
    timeline = schedule.timeline()
    travelling = sorted(
        (slot.finish, message)
        for stage, row in enumerate(timeline)
        for slot in row
        if (message := made_by(schedule, stage, slot.action)) is not None
    )
    return tuple(
        _merged(stage, row, [item for item in travelling if stage in (item[1].source, item[1].target)])
        for stage, row in enumerate(timeline)
    )


def made_by(schedule: Schedule, stage: int, action: Action) -> Message | None:
    """Return the message that ``action`` of ``stage`` sends to another part, or None."""
    part = schedule.part(stage, action.chunk)
    if action.kind is Kind.FORWARD and part < schedule.num_parts - 1:
        return Message(action.micro_batch, part, False, stage, schedule.place(part + 1)[0])
    if action.kind.returns_gradient and part > 0:
        return Message(action.micro_batch, part, True, stage, schedule.place(part - 1)[0])
    return None


def needed_by(schedule: Schedule, stage: int, action: Action) -> Message | None:
    """Return the message that ``action`` of ``stage`` waits for, or None."""
    for kind, micro_batch, part in schedule.needs(stage, action):
        if part != schedule.part(stage, action.chunk):
            return Message(micro_batch, part, kind is not Kind.FORWARD, schedule.place(part)[0], stage)
    return None


def _merged(stage: int, slots: Sequence[Slot], messages: Sequence[tuple[float, Message]]) -> Program:
    """Merge a stage's actions and messages, each action after the messages of its starting time."""
    steps: list[tuple[float, int, Action | Exchange]] = [(slot.start, 1, slot.action) for slot in slots]
    for time, group in itertools.groupby(messages, key=lambda item: item[0]):
        together = [message for _, message in group]
        sends = tuple(message for message in together if message.source == stage)
        receives = tuple(message for message in together if message.target == stage)
        steps.append((time, 0, Exchange(sends, receives)))
    return tuple(step for _, _, step in sorted(steps, key=lambda step: step[:2]))


_F, _B, _I, _W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT


def make_schedule(
    name: str, num_stages: int, num_micro_batches: int, num_chunks: int = 1, *, group_size: int | None = None
) -> Schedule:
    """Make the schedule with the given name.

    >>> print(*map(str, make_schedule("1f1b", 2, 3).actions[0]))
    F0 F1 B0 F2 B1 B2

    Args:
        name: one of ``SCHEDULE_NAMES``.
        num_stages: number of pipeline-parallel ranks.
        num_micro_batches: number of micro-batches per step.
        num_chunks: number of parts of the model on each stage; over 1 if and only if the schedule is "interleaved".
        group_size: for "interleaved", the number of micro-batches that run through a chunk before the next chunk; None
            for ``num_stages``.

    Raises:
        ConfigError: the name is unknown, or the numbers do not fit the schedule.
    """
    if name not in SCHEDULE_NAMES:
        raise ConfigError(f"the pipeline schedule is {name!r}; it must be one of {', '.join(SCHEDULE_NAMES)}")
    if num_stages < 1 or num_micro_batches < 1 or num_chunks < 1:
        raise ConfigError(
            f"{num_stages} pipeline stages of {num_chunks} chunks and {num_micro_batches} micro-batches: there must be "
            "at least 1 of each"
        )
    if name == "interleaved":
        return _interleaved(num_stages, num_micro_batches, num_chunks, group_size or num_stages)
    if num_chunks != 1:
        raise ConfigError(
            f"schedule {name!r} takes one chunk per stage, and there are {num_chunks}; use 'interleaved' or one chunk"
        )
    order: Callable[[int, int, int], list[Action]] = {"gpipe": _gpipe, "1f1b": _1f1b, "zero-bubble": _zero_bubble}[name]
    rows = tuple(tuple(order(stage, num_stages, num_micro_batches)) for stage in range(num_stages))
    return Schedule(name, num_stages, num_micro_batches, 1, rows)


def forward_only(num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> Schedule:
    """Make a schedule of only forward steps, for evaluation with any number of micro-batches.

    >>> print(*map(str, forward_only(2, 3, num_chunks=2).actions[0]))
    F0 F1 F0.1 F1.1 F2 F2.1
    """
    row = tuple(
        Action(_F, micro_batch, chunk)
        for first in range(0, num_micro_batches, num_stages)
        for chunk in range(num_chunks)
        for micro_batch in range(first, min(first + num_stages, num_micro_batches))
    )
    return Schedule("forward-only", num_stages, num_micro_batches, num_chunks, (row,) * num_stages)


def _gpipe(stage: int, p: int, m: int) -> list[Action]:
    """All forward steps, then all backward steps. Source: Huang et al. 2019 (arXiv:1811.06965)."""
    steps = [(index, 0) for index in range(m)]
    return _alternating(steps, steps, ahead=m)


def _1f1b(stage: int, p: int, m: int) -> list[Action]:
    """Forward steps until the first micro-batch has reached the last stage, then a backward for each forward.

    Source: Narayanan et al. 2021 (arXiv:2006.09503), "PipeDream-Flush".
    """
    steps = [(index, 0) for index in range(m)]
    return _alternating(steps, steps, ahead=p - stage - 1)


def _zero_bubble(stage: int, p: int, m: int) -> list[Action]:
    """1F1B with weight gradients delayed by ``stage`` micro-batches, which fill the idle time at the end.

    The stage before waits only for input gradients. Every stage holds as many micro-batches as the first stage of 1F1B.
    Source: Qi et al. 2023 (arXiv:2401.10241), schedule ZB-H1.
    """
    actions = []
    for action in _1f1b(stage, p, m):
        if action.kind is _F:
            actions.append(action)
            continue
        actions.append(Action(_I, action.micro_batch))
        if action.micro_batch >= stage:
            actions.append(Action(_W, action.micro_batch - stage))
    return actions + [Action(_W, index) for index in range(max(m - stage, 0), m)]


def _alternating(forwards: list[tuple[int, int]], backwards: list[tuple[int, int]], *, ahead: int) -> list[Action]:
    """Order ``ahead`` forward steps, then a forward and a backward in turn; a step is (micro-batch, chunk)."""
    actions = [Action(_F, *step) for step in forwards[:ahead]]
    for index, step in enumerate(backwards):
        if index + ahead < len(forwards):
            actions.append(Action(_F, *forwards[index + ahead]))
        actions.append(Action(_B, *step))
    return actions


def _interleaved(p: int, m: int, num_chunks: int, group_size: int) -> Schedule:
    """1F1B over chunks: a group of micro-batches runs through chunk 0, then through chunk 1, and so on.

    Source: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.
    """
    if p < 2 or num_chunks < 2:
        raise ConfigError(
            f"schedule 'interleaved' needs at least 2 stages and 2 chunks per stage; there are {p} of {num_chunks}"
        )
    if group_size < p or m % group_size != 0:
        raise ConfigError(
            f"schedule 'interleaved' takes micro-batches in groups of {group_size}, at least as many as the {p} "
            f"stages, and {m} micro-batches do not fit; give a multiple of {group_size}, or use '1f1b'"
        )
    forwards = [
        (micro_batch, chunk)
        for first in range(0, m, group_size)
        for chunk in range(num_chunks)
        for micro_batch in range(first, first + group_size)
    ]
    backwards = [(micro_batch, num_chunks - 1 - chunk) for micro_batch, chunk in forwards]
    rows = []
    for stage in range(p):
        ahead = 2 * (p - stage - 1) + (num_chunks - 1) * group_size
        rows.append(tuple(_alternating(forwards, backwards, ahead=ahead)))
    return Schedule("interleaved", p, m, num_chunks, tuple(rows))
