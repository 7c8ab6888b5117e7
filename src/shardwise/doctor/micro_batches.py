"""The samples that ranks read, by the hashes of their rows."""

from __future__ import annotations

from collections import Counter
from typing import Any

from shardwise.doctor.recording import Recording


def match_micro_batches(
    reference: Recording, suspect: Recording
) -> dict[tuple[int, int], list[tuple[int, int]]] | None:
    """Match the suspect's micro-batches with the reference's of the same samples; None if they are not the same."""
    matched: dict[tuple[int, int], list[tuple[int, int]]] = {}
    if reference.world_size > 1:
        return None
    for step in range(min(reference.steps, suspect.steps)):
        expected, found = samples_of(reference, step), samples_of(suspect, step)
        if not expected or not found:
            return None
        by_rows = {rows_of(each): micro_batch for (_, micro_batch), each in expected.items()}
        for (rank, micro_batch), each in found.items():
            if rows_of(each) not in by_rows:
                return None
            matched.setdefault((step, by_rows[rows_of(each)]), []).append((rank, micro_batch))
    # Ranks without the model's inputs, such as later stages, have the micro-batches of the first.
    known = {rank for pairs in matched.values() for rank, _ in pairs}
    if len(known) < suspect.world_size:
        return None
    return matched


def samples_of(recording: Recording, step: int) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the ids of each rank and micro-batch."""
    return {
        (rank, each["micro_batch"]): each
        for rank, inputs in enumerate(recording.of_ranks("inputs"))
        for each in inputs
        if each["step"] == step and "micro_batch" in each and each["rows"]
    }


def rows_of(sample: dict[str, Any]) -> tuple[str, ...]:
    return tuple(sample["rows"][name_of_ids(sample["rows"])])


def name_of_ids(rows: dict[str, Any]) -> str:
    """Return which integers tell the samples apart: the ids, or else those with the most different rows."""
    return "ids" if "ids" in rows else max(rows, key=lambda name: len(set(rows[name])))


def rows_read(recording: Recording, samples: dict[tuple[int, int], dict[str, Any]], ids: str) -> Counter[str]:
    """Count the samples of a step, once for all ranks that read the same ones."""
    axes, seen = data_axes(recording, samples, ids), Counter[str]()
    for (rank, _), each in samples.items():
        if all(place == 0 for axis, place in recording.places[rank].items() if axis not in axes):
            seen.update(each["rows"][ids])
    return seen


def data_axes(recording: Recording, samples: dict[tuple[int, int], dict[str, Any]], ids: str) -> set[str]:
    """Return the axes whose ranks read different samples."""
    found = set()
    for axis in recording.axes:
        groups: dict[Any, set[tuple[str, ...]]] = {}
        for (rank, micro_batch), each in samples.items():
            place = tuple((name, at) for name, at in recording.places[rank].items() if name != axis)
            groups.setdefault((place, micro_batch), set()).add(tuple(each["rows"][ids]))
        if any(len(rows) > 1 for rows in groups.values()) or axis == "dp":
            found.add(axis)
    return found
