"""Which message goes when: a schedule's table with the sends and receives between its actions.

Messages are put in the order in which they would travel if every action took its time and messages took none, and each
stage takes part in its own in that order. So even where a send waits until it is received, no stage ever waits for one
that waits for it: of all that is not done yet, what comes first in this order can be done.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.distributed import ProcessGroup

from shardwise.core.sharding import balanced_sizes, divide
from shardwise.training.pipeline.actions import Action, Kind, Schedule, Slot


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
        IndivisibleError: the context-parallel ranks do not divide the sequence.
    """
    length = local_length(seq_length, cp_group)
    if config.sequence_parallel and tp_group is not None:
        length = balanced_sizes(length, tp_group.size())[tp_group.rank()]
    return length, micro_batch_size, config.hidden_size


def local_length(seq_length: int, cp_group: ProcessGroup | None) -> int:
    """Of the sequence's part that the ranks of a tensor-parallel group have together."""
    return seq_length if cp_group is None else divide(seq_length, cp_group.size())
