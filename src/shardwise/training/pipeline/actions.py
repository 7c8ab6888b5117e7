"""What a pipeline stage does, one micro-batch at a time, and when each stage gets to it.

A model of ``num_stages * num_chunks`` parts runs through part 0, part 1 and so on; stage ``p`` holds, as its chunk
``c``, part ``c * num_stages + p``. A schedule is a table: for every stage the order of its actions.

====== ===================================================================
letter action on one micro-batch and chunk
====== ===================================================================
F      forward
B      backward: the gradients of the chunk's input and of its weights
I      the first half of a backward: the input's gradient
W      the second half: the gradients of the weights of linear layers
====== ===================================================================

Which message goes when: a schedule's table with the sends and receives between its actions.

Messages are put in the order in which they would travel if every action took its time and messages took none, and each
stage takes part in its own in that order. So even where a send waits until it is received, no stage ever waits for one
that waits for it: of all that is not done yet, what comes first in this order can be done.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from torch.distributed import ProcessGroup

from shardwise.core.errors import ConfigError
from shardwise.core.sequence_view import SequenceView
from shardwise.core.sharding import divide


class Kind(Enum):
    """What is done with a micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"

    @property
    def returns_gradient(self) -> bool:
        """Whether it yields the gradient that the part before waits for."""
        return self in (Kind.BACKWARD, Kind.INPUT_GRADIENT)


class Action(NamedTuple):
    """One step of one stage.

    >>> str(Action(Kind.FORWARD, 3)), str(Action(Kind.BACKWARD, 0, chunk=1))
    ('F3', 'B0.1')
    """

    kind: Kind
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


class Slot(NamedTuple):
    """An action with the times between which its stage is busy with it."""

    action: Action
    start: float
    finish: float


DURATIONS: Mapping[Kind, float] = {
    Kind.FORWARD: 1.0,
    Kind.BACKWARD: 2.0,
    Kind.INPUT_GRADIENT: 1.0,
    Kind.WEIGHT_GRADIENT: 1.0,
}
"""How long actions take, in forward steps of a part: a backward multiplies twice as much."""


@dataclass(frozen=True)
class Schedule:
    """A table of actions, checked when made; printed, the time that each takes is seen.

    Attributes:
        name: name of the schedule.
        num_stages: pipeline-parallel ranks.
        num_micro_batches: per step.
        num_chunks: parts of the model on each stage.
        actions: ``[stage]``, what it does, in order.

    Raises:
        ConfigError: several chunks on one stage alone, a stage that would wait for ever, or an action that is missing,
            twice or too much.
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
        """Every micro-batch goes once through every part, and once back if any does."""
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
        """Parts of the model, over all stages."""
        return self.num_stages * self.num_chunks

    def part(self, stage: int, chunk: int) -> int:
        """The place in the model of ``chunk`` of ``stage``, from 0."""
        return chunk * self.num_stages + stage

    def place(self, part: int) -> tuple[int, int]:
        """``(stage, chunk)`` of a part."""
        return part % self.num_stages, part // self.num_stages

    def in_flight(self, stage: int) -> int:
        """The most micro-batches, counted once per chunk, whose activations ``stage`` holds at one time."""
        held = most = 0
        splits = any(action.kind is Kind.WEIGHT_GRADIENT for action in self.actions[stage])
        last = Kind.WEIGHT_GRADIENT if splits else Kind.BACKWARD
        for action in self.actions[stage]:
            held += (action.kind is Kind.FORWARD) - (action.kind is last)
            most = max(most, held)
        return most

    def timeline(self, durations: Mapping[Kind, float] = DURATIONS) -> tuple[tuple[Slot, ...], ...]:
        """``[stage]``, when each action runs if each takes its time and messages take none.

        Args:
            durations: the duration of one action of each kind.

        Raises:
            ConfigError: a stage would wait for ever.
        """
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
        """What must be finished before, as ``(kind, micro-batch, part)``; BACKWARD stands for either way of it."""
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
    """The timeline as text: one line per stage, one column per forward step's time, dots while it waits.

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
    """The hidden states that ``part`` passes to the next one, or the gradient that it returns to the one before.

    Attributes:
        micro_batch: the micro-batch that it belongs to.
        part: the part of the model that made it.
        is_gradient: it is a gradient rather than hidden states.
        source: stage that sends.
        target: stage that receives.
    """

    micro_batch: int
    part: int
    is_gradient: bool
    source: int
    target: int


class Exchange(NamedTuple):
    """Messages that a stage sends and receives at one time."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


Program = tuple[Action | Exchange, ...]
"""What a stage does, in order."""


def programs(schedule: Schedule) -> tuple[Program, ...]:
    """``[stage]``, its actions with its messages between them: sent right after they are made, received in time.

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
    """The message that takes along what ``action`` of ``stage`` makes; None if no other part waits for it."""
    part = schedule.part(stage, action.chunk)
    if action.kind is Kind.FORWARD and part < schedule.num_parts - 1:
        return Message(action.micro_batch, part, False, stage, schedule.place(part + 1)[0])
    if action.kind.returns_gradient and part > 0:
        return Message(action.micro_batch, part, True, stage, schedule.place(part - 1)[0])
    return None


def needed_by(schedule: Schedule, stage: int, action: Action) -> Message | None:
    """The message that ``action`` of ``stage`` waits for, or None."""
    for kind, micro_batch, part in schedule.needs(stage, action):
        if part != schedule.part(stage, action.chunk):
            return Message(micro_batch, part, kind is not Kind.FORWARD, schedule.place(part)[0], stage)
    return None


def _merged(stage: int, slots: Sequence[Slot], messages: Sequence[tuple[float, Message]]) -> Program:
    """A stage's actions, each after the messages of the time at which it starts, among which may be its own."""
    steps: list[tuple[float, int, Action | Exchange]] = [(slot.start, 1, slot.action) for slot in slots]
    for time, group in itertools.groupby(messages, key=lambda item: item[0]):
        together = [message for _, message in group]
        sends = tuple(message for message in together if message.source == stage)
        receives = tuple(message for message in together if message.target == stage)
        steps.append((time, 0, Exchange(sends, receives)))
    return tuple(step for _, _, step in sorted(steps, key=lambda step: step[:2]))


def hidden_shape(
    config: Any,
    seq_length: int,
    micro_batch_size: int,
    *,
    tp_group: ProcessGroup | None,
    cp_group: ProcessGroup | None = None,
) -> tuple[int, int, int]:
    """``[s, b, h]`` of what this rank's stage gives to the next one's, or of its shard.

    Args:
        config: any config with ``hidden_size`` and ``sequence_parallel``.
        seq_length: length of the whole sequence.
        micro_batch_size: ``b``.
        tp_group: tensor-parallel; it shares the sequence with sequence parallelism, by the balanced rule.
        cp_group: context-parallel; it always shares the sequence.

    Raises:
        ShardingError: the context-parallel ranks do not divide the sequence.
    """
    sequence = SequenceView(local_length(seq_length, cp_group), tp_group if config.sequence_parallel else None)
    return sequence.size, micro_batch_size, config.hidden_size


def local_length(seq_length: int, cp_group: ProcessGroup | None) -> int:
    """Of the sequence's part that the ranks of a tensor-parallel group have together."""
    return seq_length if cp_group is None else divide(seq_length, cp_group.size())
