"""Recordings of all ranks, read from a folder."""

from __future__ import annotations

import dataclasses
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardwise.core.errors import DataError
from shardwise.core.files import parse_json, read_regular
from shardwise.run.doctor.places import Key
from shardwise.run.doctor.recorder import VERSION
from shardwise.run.doctor.sketches import Sketch

# The facts of a rank; a recording of 10,000 modules has about 20 MB.
_MOST_FACTS = 1 << 30


class Entry(NamedTuple):
    """A recorded tensor of one rank.

    Attributes:
        number: position in the order of the rank's recording.
        sketch: the tensor.
        layouts: for each axis, how the ranks hold it, as far as the model states it.
    """

    number: int
    sketch: Sketch
    layouts: dict[str, list[Any]]


class _OfRank:
    """The recording of one rank."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.facts = parse_json(read_regular(path, limit=_MOST_FACTS))
            if self.facts.get("version") != VERSION:
                raise DataError(f"{path} has version {self.facts.get('version')}; this Shardwise reads {VERSION}")
            self.keys = {_key_of(each): number for number, each in enumerate(self.facts["tensors"])}
            self._file = safe_open(path.with_suffix(".safetensors"), "pt")
            self._names: dict[int, list[str]] = {}
            for name in self._file.keys():  # noqa: SIM118  # The file is not a mapping.
                self._names.setdefault(int(name.partition(".")[0]), []).append(name)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise DataError(f"{path} is no complete recording: {error}; record the run again") from error

    def entry(self, key: Key) -> Entry | None:
        number = self.keys.get(key)
        if number is None:
            return None
        facts = self.facts["tensors"][number]
        try:
            views: dict[str, Tensor] = {
                name.partition(".")[2]: self._file.get_tensor(name) for name in self._names[number]
            }
        except (KeyError, SafetensorError) as error:
            raise DataError(f"{self.path.with_suffix('.safetensors')} is damaged: {error}; record again") from error
        dtype = getattr(torch, facts["dtype"])
        sketch = Sketch(tuple(facts["shape"]), dtype, tuple(facts["strides"]), views)
        return Entry(number, sketch, facts.get("layouts", {}))


def _key_of(facts: dict[str, Any]) -> Key:
    return Key(**{field.name: facts[field.name] for field in dataclasses.fields(Key)})


class Recording:
    """A recording of all ranks.

    Attributes:
        folder: the folder.
        world_size: number of ranks.
        axes: names and sizes of the axes of parallelism, the slowest first.
        places: for each rank, its place on each axis.
        steps: number of recorded steps.
        facts: facts of the first rank, as the recorder wrote them.

    Raises:
        DataError: the folder has no complete recording, or ranks of several recordings.
    """

    def __init__(self, folder: str | PathLike[str]) -> None:
        self.folder = Path(folder)
        paths = sorted(self.folder.glob("rank*.json"))
        if not paths:
            raise DataError(f"{self.folder} has no recording; shardwise.doctor.record writes one")
        self._ranks = [_OfRank(path) for path in paths]
        self.facts = self._ranks[0].facts
        self.world_size = int(self.facts["world_size"])
        found = [rank.facts["rank"] for rank in self._ranks]
        if found != list(range(self.world_size)):
            missing = sorted(set(range(self.world_size)) - set(found))
            raise DataError(
                f"{self.folder} has recordings of ranks {found} of {self.world_size}"
                + (f"; those of ranks {missing} are missing" if missing else "")
            )
        self.axes = {name: size for name, (_, size) in self.facts["axes"].items()}
        self.places = [{name: place[0] for name, place in rank.facts["axes"].items()} for rank in self._ranks]
        steps = {rank.facts["steps"] for rank in self._ranks}
        if len(steps) > 1:
            raise DataError(f"{self.folder}: ranks recorded {sorted(steps)} steps; record them together")
        self.steps = steps.pop()

    @property
    def recorded(self) -> list[Key]:
        """Return what was recorded, in order: rank by rank, each key once."""
        return list(dict.fromkeys(key for rank in self._ranks for key in rank.keys))

    def entries(self, key: Key) -> dict[int, Entry]:
        """Return a tensor on each rank that recorded it."""
        found = {number: rank.entry(key) for number, rank in enumerate(self._ranks)}
        return {number: entry for number, entry in found.items() if entry is not None}

    def of_ranks(self, name: str) -> list[Any]:
        """Return one of the facts of each rank."""
        return [rank.facts[name] for rank in self._ranks]

    def num_micro_batches(self, step: int) -> int:
        """Return the number of micro-batches of a step on the first rank."""
        return 1 + max((call["micro_batch"] for call in self.facts["calls"] if call["step"] == step), default=-1)

    @property
    def names(self) -> set[str]:
        """Names of all recorded modules and parameters."""
        return {name for rank in self._ranks for name in (*rank.facts["modules"], *rank.facts["parameters"])}
