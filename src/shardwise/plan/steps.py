"""A step of any length from its rehearsed parts: left-out layers, micro-batches and stages are put back."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache

from shardwise.plan.timeline import PhaseLabel, Segment, Transfer, joined
from shardwise.plan.workload import Mesh, Workload
from shardwise.training.pipeline.schedules import Action, Kind, make_schedule

FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weight gradients"
ACTIONS = {Kind.FORWARD: FORWARD, Kind.BACKWARD: BACKWARD, Kind.INPUT_GRADIENT: BACKWARD, Kind.WEIGHT_GRADIENT: WEIGHTS}
START = PhaseLabel("start")


def few_micro_batches(mesh: Mesh, workload: Workload, wanted: int) -> int:
    """The first, a middle and the last, or more where a schedule takes them in groups."""
    number = mesh.num_micro_batches(workload)
    if mesh.pp > 1 and mesh.schedule == "interleaved":
        return min(number, mesh.pp * math.ceil(wanted / mesh.pp))
    return min(number, wanted)


def as_stage(segments: Sequence[Segment], hidden: int, *, is_first: bool, is_last: bool) -> list[Segment]:
    """A step of a whole model as one of a pipeline stage: messages of ``hidden`` bytes instead of what it lacks."""
    last = max(segment.place.span or 0 for segment in segments)
    message = Counter({Transfer("pp", "send", hidden): 1})
    stands_for: dict[tuple[str, int], tuple[int, int, Counter[Transfer]]] = {}
    if not is_first:
        stands_for |= {(FORWARD, 0): (hidden, hidden, Counter()), (BACKWARD, last): (0, -hidden, message)}
    if not is_last:
        stands_for |= {(FORWARD, last): (0, 0, message), (BACKWARD, 0): (hidden, 0, Counter())}
    row = []
    for segment in segments:
        found = stands_for.get((segment.place.action, segment.place.span or 0))
        row.append(segment if found is None else Segment(segment.place, found[0], found[1], sent=found[2]))
    return row


# Each action as one segment.
Profiles = dict[PhaseLabel, Segment]


def profiles_of(segments: Sequence[Segment], repeats: Sequence[Sequence[tuple[int, int]]]) -> Profiles:
    """Each action as one segment, with every layer that was left out."""
    by_action: dict[PhaseLabel, dict[int, list[Segment]]] = {}
    for segment in segments:
        spans = by_action.setdefault(segment.place._replace(span=None), {})
        spans.setdefault(segment.place.span or 0, []).append(segment)
    profiles: Profiles = {}
    for action, spans in by_action.items():
        groups = list(repeats[action.chunk])
        if action.action == BACKWARD:
            groups.reverse()
        # The part before the first span, the spans, and the part after the last.
        order, last = [0], max(spans)
        for length, times in groups if last else ():
            order += [*range(order[-1] + 1, order[-1] + 1 + length)] * times
        order += range(order[-1] + 1, last + 1)
        row = []
        for number, place in enumerate(order):
            label = action._replace(span=number)
            row.append(dataclasses.replace(joined(spans.get(place, []), label), at=label))
        profiles[action] = dataclasses.replace(joined(row, action), parts=tuple(row))
    return profiles


_schedule = lru_cache(maxsize=64)(make_schedule)


def walk(
    profiles: Profiles, mesh: Mesh, workload: Workload, few: int, stage: int, num_sums: Callable[[int, int], int]
) -> tuple[list[Segment], int, int]:
    """All segments of a step of all micro-batches; the most bytes that forwards keep, and micro-batches in flight.

    ``num_sums`` is the method of the run's ``Gradients``: in exact runs the sums of gradients also take memory.
    """
    number = mesh.num_micro_batches(workload)

    def profile(name: str, micro_batch: int, chunk: int) -> Segment:
        # The first, the last, or one between them.
        like = 0 if micro_batch == 0 else max(1, few - 1) if micro_batch == number - 1 else 1
        found, place = profiles.get(PhaseLabel(name, like, chunk)), PhaseLabel(name, micro_batch, chunk)
        if found is None or found.at is None:
            return Segment(place)
        return dataclasses.replace(found, place=place, at=found.at._replace(micro_batch=micro_batch))

    if few == 1:
        profiles = profiles | {place._replace(micro_batch=1): each for place, each in profiles.items()}
    # A middle micro-batch leaves nothing: gradients are the first one's, and messages that are still on their way are
    # those of a few micro-batches.
    for chunk in range(mesh.virtual_stages):
        names = [name for name in (FORWARD, BACKWARD, WEIGHTS) if PhaseLabel(name, 1, chunk) in profiles]
        left = sum(profiles[PhaseLabel(name, 1, chunk)].net for name in names)
        if names:
            place = PhaseLabel(names[-1], 1, chunk)
            last = profiles[place]
            profiles = profiles | {place: dataclasses.replace(last, net=last.net - left)}
    row = [profiles.get(START, Segment(START))]
    # By chunk, the bytes of its gradients, and of their sums beyond the first.
    of_gradients, of_sums = Counter[int](), Counter[int]()
    for place, each in profiles.items():
        if place != START and place.micro_batch == 0:
            of_gradients[place.chunk] += each.net
    held = most = flight = most_in_flight = 0
    # Schedules repeat themselves once all stages are at work.
    shown = min(number, 4 * mesh.pp * mesh.virtual_stages) if mesh.pp > 1 else few
    if mesh.pp == 1:
        actions = [Action(kind, each) for each in range(shown) for kind in (Kind.FORWARD, Kind.BACKWARD)]
    else:
        actions = list(_schedule(mesh.schedule, mesh.pp, shown, mesh.virtual_stages).actions[stage])
    splits = any(action.kind is Kind.WEIGHT_GRADIENT for action in actions)
    for action in actions:
        micro_batch = number - 1 if action.micro_batch == shown - 1 else action.micro_batch
        segment = profile(ACTIONS[action.kind], micro_batch, action.chunk)
        row.append(segment)
        if action.kind is Kind.FORWARD:
            held, flight = held + segment.net, flight + 1
        elif action.kind is Kind.WEIGHT_GRADIENT or (action.kind is Kind.BACKWARD and not splits):
            held, flight = held - profile(FORWARD, micro_batch, action.chunk).net, flight - 1
            # A step with more micro-batches than are shown ends with the last of them.
            is_numbered = micro_batch in (0, number - 1) or mesh.schedule == "gpipe"
            done = 1 + (micro_batch if is_numbered else number - shown + micro_batch)
            more = (num_sums(done, number) - 1) * of_gradients[action.chunk]
            row[-1] = dataclasses.replace(segment, net=segment.net + more - of_sums[action.chunk])
            of_sums[action.chunk] = more
        most, most_in_flight = max(most, held), max(most_in_flight, flight)
    if left := number - shown:
        between = [
            profile(name, 1, chunk) for chunk in range(mesh.virtual_stages) for name in (FORWARD, BACKWARD, WEIGHTS)
        ]
        if mesh.pp > 1 and mesh.schedule == "gpipe":
            # All forwards come before the first backward.
            row[shown:shown] = [profile(FORWARD, 1, 0).times(left)]
            row += [profile(BACKWARD, 1, 0).times(left)]
            most, most_in_flight = most + left * profile(FORWARD, 1, 0).net, most_in_flight + left
        else:
            row.append(joined(between, PhaseLabel("micro-batches")).times(left))
    return row, most, most_in_flight
