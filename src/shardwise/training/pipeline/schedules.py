"""The schedules, as tables: GPipe, 1F1B, interleaved 1F1B and a zero-bubble one.

With ``p`` stages and ``m`` micro-batches, forward 1 and backward 2 of a whole stage's time:

============ ================================= ================================= ====================
name         idle time per stage               micro-batches in flight, stage i  chunks
============ ================================= ================================= ====================
gpipe        3 (p - 1)                         m                                 1
1f1b         3 (p - 1)                         min(m, p - i)                     1
interleaved  3 (p - 1) / chunks                see ``Schedule.in_flight``        2 or more
zero-bubble  p - 1                             min(m, p)                         1
============ ================================= ================================= ====================
"""

from collections.abc import Callable
from typing import Literal, get_args

from shardwise.core.errors import ConfigError
from shardwise.training.pipeline.actions import Action, Kind, Schedule

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
SCHEDULE_NAMES: tuple[str, ...] = get_args(ScheduleName)

_F, _B, _I, _W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT


def make_schedule(
    name: str, num_stages: int, num_micro_batches: int, num_chunks: int = 1, *, group_size: int | None = None
) -> Schedule:
    """The schedule of that name.

    >>> print(*map(str, make_schedule("1f1b", 2, 3).actions[0]))
    F0 F1 B0 F2 B1 B2

    Args:
        name: one of ``SCHEDULE_NAMES``.
        num_stages: pipeline-parallel ranks.
        num_micro_batches: per step.
        num_chunks: parts of the model on each stage; over 1 with "interleaved" and only there.
        group_size: for "interleaved", the micro-batches that run through a chunk before the next chunk's turn;
            ``num_stages`` if None.

    Raises:
        ConfigError: an unknown name, or numbers that do not fit the schedule.
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
    """Forward steps alone, for evaluation: any number of micro-batches.

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
    """As many forward steps as it takes to reach the last stage, then one backward for each forward.

    Source: Narayanan et al. 2021 (arXiv:2006.09503), "PipeDream-Flush".
    """
    steps = [(index, 0) for index in range(m)]
    return _alternating(steps, steps, ahead=p - stage - 1)


def _zero_bubble(stage: int, p: int, m: int) -> list[Action]:
    """1F1B with weight gradients put off by ``stage`` micro-batches, which fills the waiting at the end.

    The stage before waits only for input gradients. Every stage holds as many micro-batches as the first one of 1F1B.
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
    """``ahead`` forward steps, or all if there are fewer, then a forward and a backward step in turn.

    Args:
        forwards: micro-batch and chunk of each forward step, in order.
        backwards: micro-batch and chunk of each backward step, as many, in order.
        ahead: the number of steps by which the forwards are ahead of the backwards.
    """
    actions = [Action(_F, *step) for step in forwards[:ahead]]
    for index, step in enumerate(backwards):
        if index + ahead < len(forwards):
            actions.append(Action(_F, *forwards[index + ahead]))
        actions.append(Action(_B, *step))
    return actions


def _interleaved(p: int, m: int, num_chunks: int, group_size: int) -> Schedule:
    """1F1B over chunks: groups of micro-batches run through chunk 0, then through chunk 1, and so on.

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
