"""Recordings of all ranks, read from a folder."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardwise.core.atomic_files import read_regular
from shardwise.core.errors import CheckpointError, ConfigError, DataError
from shardwise.core.json_text import first_of, parse_json, shown
from shardwise.core.tensor_files import DTYPES, StoredTensor, is_shape, read_box, read_header
from shardwise.core.typed_json import problem
from shardwise.doctor.facts import MOST_AXES, VERSION, Intervals, RankFacts
from shardwise.doctor.places import Key
from shardwise.doctor.sketches import Sketch

# The facts of a rank; a recording of 10,000 modules has about 20 MB.
_MOST_FACTS = 1 << 30
_OF_RANK = re.compile(r"rank\d{5,}\.(json|safetensors)")
# A temporary name of ``files.write_atomically``.
_UNFINISHED = re.compile(r"\.rank\d{5,}\.(json|safetensors)\.shardwise-file-.+\.tmp")
# The position of a tensor, and a view of ``Sketch``.
_VIEW = re.compile(r"(0|[1-9]\d{0,9})\.(slice|0|[1-9]\d?)")
_TOGETHER = "record all ranks together"


class Entry(NamedTuple):
    """A recorded tensor of one rank: its position in the recording, and the stated layouts by axis."""

    number: int
    sketch: Sketch
    layouts: dict[str, list[Any]]


class _OfRank:
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.facts = _read_facts(path)
            self._views = _views_of(path.with_suffix(".safetensors"))
            _check_together(self.facts, self._views)
        except (OSError, ValueError, CheckpointError) as error:
            raise DataError(f"{path} is no complete recording: {error}; record the run again") from error
        self.keys = {_key_of(each): number for number, each in enumerate(self.facts["tensors"])}

    def entry(self, key: Key) -> Entry | None:
        number = self.keys.get(key)
        if number is None:
            return None
        facts = self.facts["tensors"][number]
        try:
            views = {
                name: read_box(stored, [0] * len(stored.shape), stored.shape)
                for name, stored in self._views[number].items()
            }
        except CheckpointError as error:
            raise DataError(f"{error}; record the run again") from error
        dtype = getattr(torch, facts["dtype"])
        sketch = Sketch(tuple(facts["shape"]), dtype, tuple(facts["strides"]), views)
        return Entry(number, sketch, facts.get("layouts", {}))


def _read_facts(path: Path) -> dict[str, Any]:
    """Read the facts of a rank, each of its type; raise OSError or ValueError."""
    facts = parse_json(read_regular(path, limit=_MOST_FACTS))
    version = facts.get("version")
    if type(version) is not int or version != VERSION:
        raise ValueError(f"it has version {shown(version)}, and this Shardwise reads {VERSION}")
    if (wrong := problem(facts, RankFacts)) is not None:
        raise ValueError(f"its {wrong.removeprefix('.')}")
    return facts


def _views_of(path: Path) -> dict[int, dict[str, StoredTensor]]:
    """Return the views of each sketch in a file of tensors; raise CheckpointError or ValueError."""
    found: dict[int, dict[str, StoredTensor]] = {}
    for name, stored in read_header(path).items():
        if not _VIEW.fullmatch(name):
            raise ValueError(f"{path.name} has a tensor {shown(name)}, which no recorder writes")
        number, _, view = name.partition(".")
        found.setdefault(int(number), {})[view] = stored
    return found


def _check_together(facts: dict[str, Any], views: Mapping[int, Mapping[str, StoredTensor]]) -> None:
    """Raise ValueError if facts of a rank contradict each other or its tensors."""
    steps, tensors = facts["steps"], facts["tensors"]
    if facts["rank"] >= facts["world_size"]:
        raise ValueError(f"its rank is {facts['rank']}, and its world_size {facts['world_size']}")
    if len(facts["axes"]) > MOST_AXES:
        raise ValueError(f"its axes are {len(facts['axes'])}, and at most {MOST_AXES} are compared")
    for name, (place, size) in facts["axes"].items():
        if place >= size:
            raise ValueError(f"its axes.{name} is {[place, size]}: the place must be less than the number of ranks")
    if views.keys() != set(range(len(tensors))):
        raise ValueError(f"it has facts of {len(tensors)} tensors, and the file of tensors has {len(views)}")
    for number, each in enumerate(tensors):
        if (wrong := _contradiction(each, views[number])) is not None:
            raise ValueError(f"its tensors[{number}]{wrong}")
    if len({_key_of(each) for each in tensors}) < len(tensors):
        raise ValueError("two of its tensors have the same what, name, step, micro_batch, call and leaf")
    for name in ("tensors", "calls", "inputs", "updates"):
        for number, each in enumerate(facts[name]):
            # A step that was begun and not ended has no tensors.
            if each["step"] > steps - (name == "tensors"):
                raise ValueError(f"its {name}[{number}].step is {each['step']}, and its steps are {steps}")
    for number, call in enumerate(facts["calls"]):
        for name in ("inputs", "outputs"):
            if max(call[name], default=-1) >= len(tensors):
                raise ValueError(f"its calls[{number}].{name} has {max(call[name])}, and it has {len(tensors)} tensors")


def _contradiction(facts: dict[str, Any], views: Mapping[str, StoredTensor]) -> str | None:
    """Return how the facts of a tensor contradict each other or its views; None if they do not."""
    shape, strides, dtype = facts["shape"], facts["strides"], getattr(torch, facts["dtype"], None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return f".dtype is {shown(facts['dtype'])}; it must be a floating-point dtype of PyTorch"
    if not is_shape(shape):
        return f".shape is {shown(shape)}; it must be that of a tensor"
    pairs = list(zip(shape, strides, strict=False))
    # A stride is a power of two.
    if len(strides) != len(shape) or any(size % stride or stride & (stride - 1) for size, stride in pairs):
        return f".strides are {shown(strides)}; they must be powers of two that divide the shape {shown(shape)}"
    for axis, kind in facts.get("layouts", {}).items():
        if not _is_kind(kind, len(shape)):
            return f".layouts.{axis[:80]} is {shown(kind)}, which is no layout of a tensor of {len(shape)} dimensions"
    wanted = {"slice": (dtype, [size // stride for size, stride in pairs])}
    if views.keys() != {"slice"} or any(stride > 1 for stride in strides):
        alone = [[size if at == dim else 1 for at, size in enumerate(shape)] for dim in range(len(shape))]
        wanted |= {str(dim): (torch.float64, sizes) for dim, sizes in enumerate(alone)}
    if not wanted.keys() - {"slice"} <= views.keys() <= wanted.keys():
        return f" has {' and '.join(sorted(views))} stored, and should have {' and '.join(sorted(wanted))}"
    for name, stored in views.items():
        if (DTYPES.get(stored.dtype), list(stored.shape)) != wanted[name]:
            return (
                f".shape is {shown(shape)} and its dtype {facts['dtype']}, and {shown(stored.name)} is stored as "
                f"{stored.dtype} of shape {shown(list(stored.shape))}"
            )
    return None


def _is_kind(kind: list[Any], ndim: int) -> bool:
    """True if the layout of a tensor on an axis can be: see ``places.Declared``."""
    letter, *rest = kind or [None]
    if letter in ("I", "R", "P") and not rest:
        return True
    if letter not in ("V", "placed", "placed sums") or not rest or type(rest[0]) is not int:
        return False
    intervals = rest[1:]
    if not -ndim <= rest[0] < ndim or len(intervals) != (letter != "V"):
        return False
    return problem(intervals, list[Intervals]) is None and all(
        start <= stop for ranks in intervals for own in ranks for start, stop in own
    )


def _key_of(facts: dict[str, Any]) -> Key:
    return Key(**{field.name: facts[field.name] for field in dataclasses.fields(Key)})


def check_replaceable(folder: Path) -> None:
    """Raise ConfigError unless a folder is missing, or has nothing but a recording of this version, complete or not."""

    def refusal(path: Path, reason: str) -> ConfigError:
        return ConfigError(f"{path} {reason}; it is not deleted: move it away, or choose another folder")

    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or not folder.is_dir():
        raise refusal(folder, "is no folder of a recording")
    for path in sorted(folder.iterdir()):
        if _UNFINISHED.fullmatch(path.name):
            continue
        if path.is_symlink() or not _OF_RANK.fullmatch(path.name):
            raise refusal(path, "is not of a recording")
        try:
            _read_facts(path) if path.suffix == ".json" else _views_of(path)
        except (OSError, ValueError, CheckpointError) as error:
            raise refusal(path, f"is not of a recording that this Shardwise makes: {error}") from error


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
        self.world_size: int = self.facts["world_size"]
        found = [rank.facts["rank"] for rank in self._ranks]
        if len(found) != self.world_size or found != list(range(len(found))):
            missing = list(itertools.islice((rank for rank in range(self.world_size) if rank not in found), 4))
            raise DataError(
                f"{self.folder} has recordings of ranks {first_of(list(map(str, found)), 8)} of {self.world_size}"
                + (f"; those of ranks {missing} are missing" if missing else f"; {_TOGETHER}")
            )
        self.axes = {name: size for name, (_, size) in self.facts["axes"].items()}
        self.places = [{name: place[0] for name, place in rank.facts["axes"].items()} for rank in self._ranks]
        for rank in self._ranks:
            for name, own in (("world_size", self.world_size), ("steps", self.facts["steps"])):
                if rank.facts[name] != own:
                    raise DataError(f"{self.folder}: the {name} of ranks are {own} and {rank.facts[name]}; {_TOGETHER}")
            axes = {name: size for name, (_, size) in rank.facts["axes"].items()}
            if axes != self.axes:
                raise DataError(f"{self.folder}: the axes of ranks are {self.axes} and {axes}; {_TOGETHER}")
        self.steps: int = self.facts["steps"]
        names = ("tensors", "calls", "inputs", "updates")
        last = max((each["step"] for rank in self._ranks for name in names for each in rank.facts[name]), default=-1)
        if self.steps > last + 1:
            raise DataError(f"{self.folder}: steps is {self.steps}, and {last + 1} have a record; {_TOGETHER}")

    @property
    def recorded(self) -> list[Key]:
        """Return what was recorded, in order: rank by rank, each key once."""
        return list(dict.fromkeys(key for rank in self._ranks for key in rank.keys))

    def entries(self, key: Key) -> dict[int, Entry]:
        """Return a tensor on each rank that recorded it."""
        found = {number: rank.entry(key) for number, rank in enumerate(self._ranks)}
        return {number: entry for number, entry in found.items() if entry is not None}

    def accumulated(self, name: str, step: int) -> list[dict[int, Entry]]:
        """Return a parameter's gradient after each micro-batch of a step, on each rank that recorded it."""
        keys = (Key("accumulated", name, step, micro_batch) for micro_batch in itertools.count())
        return list(itertools.takewhile(bool, map(self.entries, keys)))

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
