"""The tables: every step once, what it needs before it, what is in flight, how long stages wait, no deadlock."""

from __future__ import annotations

import doctest
import itertools
import re

import pytest

from shardwise.core.errors import ConfigError
from shardwise.training.pipeline import (
    SCHEDULE_NAMES,
    Action,
    Kind,
    Schedule,
    forward_only,
    make_schedule,
    schedules as schedules_module,
)
from shardwise.training.pipeline.schedules import DURATIONS, Exchange, made_by, needed_by, programs


def all_schedules():
    for p, m in itertools.product([1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 8, 10]):
        for name in ("gpipe", "1f1b", "zero-bubble"):
            yield make_schedule(name, p, m)
        for chunks in (2, 3):
            if p > 1:
                yield forward_only(p, m, chunks)
            if p > 1 and m % p == 0:
                yield make_schedule("interleaved", p, m, chunks)
        if p > 1 and m % (2 * p) == 0:
            yield make_schedule("interleaved", p, m, 2, group_size=2 * p)


def test_examples():
    result = doctest.testmod(schedules_module)
    assert result.failed == 0
    assert result.attempted


def test_every_step_is_taken_once_and_after_what_it_needs():
    names = set()
    for schedule in all_schedules():
        names.add(schedule.name)
        splits = schedule.name == "zero-bubble"
        kinds = [Kind.FORWARD]
        if schedule.name != "forward-only":
            kinds += [Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT] if splits else [Kind.BACKWARD]
        wanted = {
            Action(kind, micro_batch, chunk)
            for kind in kinds
            for micro_batch in range(schedule.num_micro_batches)
            for chunk in range(schedule.num_chunks)
        }
        for row in schedule.actions:
            assert len(row) == len(wanted)
            assert set(row) == wanted
            # Gradients are summed in the order of the micro-batches, as without a pipeline.
            for kind, chunk in itertools.product(kinds, range(schedule.num_chunks)):
                order = [action.micro_batch for action in row if action.kind is kind and action.chunk == chunk]
                assert order == sorted(order)
    assert names == {*SCHEDULE_NAMES, "forward-only"}


def test_micro_batches_in_flight():
    for p, m in itertools.product([1, 2, 3, 4, 5], [1, 2, 4, 7, 10]):
        stages = range(p)
        assert [make_schedule("gpipe", p, m).in_flight(i) for i in stages] == [m] * p
        assert [make_schedule("1f1b", p, m).in_flight(i) for i in stages] == [min(m, p - i) for i in stages]
        assert [make_schedule("zero-bubble", p, m).in_flight(i) for i in stages] == [min(m, p)] * p
        for chunks in (2, 3):
            if p > 1:
                interleaved = make_schedule("interleaved", p, p * m, chunks)
                ahead = [2 * (p - i - 1) + (chunks - 1) * p + 1 for i in stages]
                assert [interleaved.in_flight(i) for i in stages] == [min(p * m * chunks, most) for most in ahead]


def test_how_long_stages_wait():
    for p, m in itertools.product([2, 3, 4, 5], [8, 12, 20]):

        def end(schedule, durations=DURATIONS):
            return max(row[-1].finish for row in schedule.timeline(durations))

        assert end(make_schedule("gpipe", p, m)) == 3 * (m + p - 1)
        assert end(make_schedule("1f1b", p, m)) == 3 * (m + p - 1)
        assert end(make_schedule("zero-bubble", p, m)) == 3 * m + p - 1
        if m % p == 0:
            halves = {kind: time / 2 for kind, time in DURATIONS.items()}
            assert end(make_schedule("interleaved", p, m, 2), halves) == 3 * (m + (p - 1) / 2)
    timeline = make_schedule("1f1b", 4, 8).timeline()
    busy = sum(slot.finish - slot.start for row in timeline for slot in row)
    assert 1 - busy / (4 * max(row[-1].finish for row in timeline)) == pytest.approx(9 / 33)


def rendezvous(schedule):
    """Run the programs with sends that wait until they are received, one exchange at a time on each stage."""
    left = [list(program) for program in programs(schedule)]
    open_messages = [
        list(step.sends + step.receives) if isinstance(step, Exchange) else [] for step in map(first, left)
    ]
    done = 0
    while any(left):
        moved = False
        for stage, program in enumerate(left):
            if not program:
                continue
            if isinstance(program[0], Exchange):
                for message in list(open_messages[stage]):
                    other = message.source + message.target - stage
                    if message in open_messages[other]:
                        open_messages[stage].remove(message)
                        open_messages[other].remove(message)
                        done += 1
                        moved = True
                if open_messages[stage]:
                    continue
            program.pop(0)
            moved = True
            if program and isinstance(program[0], Exchange):
                open_messages[stage] = list(program[0].sends + program[0].receives)
        assert moved, f"{schedule.name} p={schedule.num_stages} m={schedule.num_micro_batches} is stuck"
    return done


def first(program):
    return program[0] if program else None


def test_messages_cannot_deadlock_even_where_a_send_waits_for_its_receiver():
    for schedule in all_schedules():
        there_and_back = 1 if schedule.name == "forward-only" else 2
        hops = (schedule.num_parts - 1) if schedule.num_stages > 1 else 0
        if schedule.num_stages > 1:
            assert rendezvous(schedule) == there_and_back * hops * schedule.num_micro_batches


def test_messages_go_right_after_they_are_made_and_come_before_they_are_needed():
    for schedule in all_schedules():
        if schedule.num_stages == 1:
            continue
        for stage, program in enumerate(programs(schedule)):
            assert [step for step in program if isinstance(step, Action)] == list(schedule.actions[stage])
            received, made = set(), set()
            for step in program:
                if isinstance(step, Exchange):
                    assert set(step.sends) <= made
                    made -= set(step.sends)
                    received |= set(step.receives)
                    continue
                assert not made, "a message waits for the next action"
                needed, own = needed_by(schedule, stage, step), made_by(schedule, stage, step)
                if needed is not None:
                    received.remove(needed)
                if own is not None:
                    made.add(own)
            assert not received
            assert not made


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("2f2b", 2, 4), "schedule is '2f2b'; it must be one of gpipe, 1f1b, interleaved, zero-bubble"),
        (("1f1b", 0, 4), "0 pipeline stages"),
        (("gpipe", 2, 0), "0 micro-batches"),
        (("1f1b", 2, 4, 2), "'1f1b' takes one chunk per stage, and there are 2"),
        (("interleaved", 2, 4, 1), "at least 2 stages and 2 chunks per stage; there are 2 of 1"),
        (("interleaved", 1, 4, 2), "at least 2 stages and 2 chunks per stage; there are 1 of 2"),
        (
            ("interleaved", 3, 7, 2),
            "groups of 3, .* and 7 micro-batches do not fit; give a multiple of 3, or use '1f1b'",
        ),
    ],
)
def test_what_does_not_fit_a_schedule(arguments, words):
    with pytest.raises(ConfigError, match=words):
        make_schedule(*arguments)


def test_chunks_on_one_stage_are_refused():
    with pytest.raises(ConfigError, match="one pipeline stage with 2 chunks has nothing to interleave"):
        forward_only(1, 4, 2)


def test_a_group_smaller_than_the_pipeline_is_refused():
    with pytest.raises(ConfigError, match="groups of 2, at least as many as the 4 stages"):
        make_schedule("interleaved", 4, 8, 2, group_size=2)


def test_a_table_that_waits_for_ever_is_refused():
    forward, backward = Action(Kind.FORWARD, 0), Action(Kind.BACKWARD, 0)
    with pytest.raises(ConfigError, match="schedule 'mine': stage 0 would wait for ever before B0"):
        Schedule("mine", 2, 1, 1, ((backward, forward), (forward, backward)))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("F0 B0", "stage 1 does nothing with micro-batch 1"),
        ("F0 F1 B0", "stage 1 does F with micro-batch 1 of chunk 0; it must be FB or FIW"),
        ("F0 F1 B0 B1 B0", "stage 1 does FBB with micro-batch 0"),
        ("F0 F1 B0 I1", "stage 1 does FI with micro-batch 1"),
        ("F0 F1 B0 B1 F2", "stage 1 does F2, and there are 2 micro-batches and 1 chunks"),
    ],
)
def test_a_table_that_leaves_something_out_or_does_it_twice_is_refused(row, message):
    def table(text):
        return tuple(Action(Kind(word[0]), int(word[1])) for word in text.split())

    Schedule("mine", 2, 2, 1, (table("F0 F1 B0 B1"), table("F0 F1 I0 B1 W0")))
    with pytest.raises(ConfigError, match=re.escape(f"schedule 'mine': {message}")):
        Schedule("mine", 2, 2, 1, (table("F0 F1 B0 B1"), table(row)))
