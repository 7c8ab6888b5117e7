"""``meta.json``: the tensors of a checkpoint, the positions of their pieces in files, and checksums."""

from __future__ import annotations

import json
import math
import os
import re
import stat
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, TypedDict

import torch

from shardwise.core.atomic_files import can_be_a_name, open_regular, read_regular
from shardwise.core.errors import CheckpointError
from shardwise.core.json_text import parse_json, shown
from shardwise.core.sharding import ParamShard
from shardwise.core.tensor_files import MAX_ELEMENTS, is_shape, some_tensors
from shardwise.core.typed_json import Count, problem

MANIFEST_NAME = "meta.json"
FORMAT = "shardwise checkpoint"
FORMAT_VERSION = 2

REMEDY = "use another copy of it, or remove the checkpoint to use an older one"
_ANOTHER_COPY = "another copy of it may help"

_READ_SIZE = 1 << 22

# Largest manifest; a piece of a tensor takes about 200 bytes.
_MAX_BYTES = 1 << 30

Box = tuple[Sequence[int], Sequence[int]]
"""First index and number of indices in each dimension."""


_Shape = Annotated[list[int], f"a list of sizes, of at most {MAX_ELEMENTS} elements", is_shape]
_Hex = Annotated[str, "sixteen hexadecimal digits", re.compile("[0-9a-f]{16}").fullmatch]


class _File(TypedDict):
    size: Count
    crc32: str


class _Chunk(TypedDict):
    offsets: _Shape
    sizes: _Shape
    file: str
    key: str
    checksum: _Hex


class _Tensor(TypedDict):
    shape: _Shape
    dtype: str
    layout: dict[str, Any]
    chunks: list[_Chunk]


class _Body(TypedDict):
    step: Count
    serial: Count
    meta: dict[str, Any]
    files: dict[str, _File]
    tensors: dict[str, _Tensor]


class _Head(TypedDict):
    version: Count


def _check(value: dict[str, Any], kind: Any) -> None:
    if (wrong := problem(value, kind)) is not None:
        raise CheckpointError(f"its {wrong.removeprefix('.')}")


def check_chunks(where: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Raise CheckpointError unless the boxes cover each index of a tensor once; ``where`` is the tensor's path."""
    for number, (offsets, sizes) in enumerate(boxes):
        fits = len(offsets) == len(sizes) == len(shape)
        if not fits or any(o + n > total for o, n, total in zip(offsets, sizes, shape, strict=True)):
            raise CheckpointError(
                f"its {where}.chunks[{number}] has offsets {list(offsets)} and sizes {list(sizes)}, which is "
                f"impossible in a tensor of shape {list(shape)}"
            )
    first: dict[tuple[int, ...], int] = {}
    places = enumerate(first.setdefault(tuple(offsets), number) for number, (offsets, _) in enumerate(boxes))
    same = next(((earlier, number) for number, earlier in places if earlier != number), None)
    if twice := same or overlap(boxes):
        raise CheckpointError(
            f"its {where}.chunks[{twice[1]}] has indices that chunks[{twice[0]}] has too: offsets "
            f"{list(boxes[twice[1]][0])} and sizes {list(boxes[twice[1]][1])}"
        )
    filled = sum(math.prod(sizes) for _, sizes in boxes)
    if filled != math.prod(shape) or not boxes:
        raise CheckpointError(f"{filled} elements are recorded of its {where}, which is of shape {list(shape)}")


def overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Return the numbers of two boxes that overlap, or None."""
    full = [number for number, (_, sizes) in enumerate(boxes) if math.prod(sizes)]
    if len(full) < 2:
        return None
    if not boxes[full[0]][0]:
        return full[0], full[1]
    # Sweep along the dimension with the most cuts: a box can overlap only boxes that began before it and have not
    # ended.
    dims = range(len(boxes[full[0]][0]))
    along = max(dims, key=lambda dim: len({boxes[number][0][dim] for number in full}))
    begun: list[int] = []
    for number in sorted(full, key=lambda number: boxes[number][0][along]):
        start = boxes[number][0][along]
        begun = [other for other in begun if boxes[other][0][along] + boxes[other][1][along] > start]
        for other in begun:
            if _have_common(boxes[number], boxes[other]):
                return min(number, other), max(number, other)
        begun.append(number)
    return None


def _have_common(one: Box, other: Box) -> bool:
    return all(
        max(o, other_o) < min(o + n, other_o + other_n) for o, n, other_o, other_n in zip(*one, *other, strict=True)
    )


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and CRC-32 (eight hexadecimal digits) of a file."""

    size: int
    crc32: str

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        """Make the record of the regular file at ``path``, which is read once."""
        size = checksum = 0
        with open_regular(path) as descriptor, open(descriptor, "rb", closefd=False) as file:
            while block := file.read(_READ_SIZE):
                size += len(block)
                checksum = zlib.crc32(block, checksum)
        return cls(size, f"{checksum:08x}")


@dataclass(frozen=True)
class ChunkRecord:
    """A box of a global tensor: a safetensors file, the box's name there, and its ``storage.slice_checksum``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str
    checksum: int

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values for ``from_json``."""
        return vars(self) | {"checksum": f"{self.checksum:016x}"}

    @classmethod
    def from_json(cls, facts: _Chunk) -> ChunkRecord:
        checksum = int(facts["checksum"], 16)
        return cls(tuple(facts["offsets"]), tuple(facts["sizes"]), facts["file"], facts["key"], checksum)


@dataclass(frozen=True)
class TensorRecord:
    """A global tensor, the chunks that fill it, and the layout at which it was saved, for readers of the file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Mapping[str, Any]
    chunks: tuple[ChunkRecord, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values for ``from_json``."""
        dtype = str(self.dtype).removeprefix("torch.")
        return vars(self) | {"dtype": dtype, "chunks": [chunk.to_json() for chunk in self.chunks]}

    @classmethod
    def from_json(cls, name: str, facts: _Tensor) -> TensorRecord:
        dtype = getattr(torch, facts["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"{facts['dtype']!r} is no dtype of this PyTorch")
        shape, chunks = tuple(facts["shape"]), tuple(map(ChunkRecord.from_json, facts["chunks"]))
        check_chunks(f"tensors.{name}", shape, [(chunk.offsets, chunk.sizes) for chunk in chunks])
        return cls(shape, dtype, facts["layout"], chunks)


@dataclass(frozen=True)
class Manifest:
    """Content of ``meta.json``.

    ``serial`` is the number of the checkpoint in the folder's order of publication. The order of steps may differ: a
    run may resume from an earlier step, or start again. ``meta`` has the user's values, and ``files`` all other files.
    """

    step: int
    serial: int
    meta: dict[str, Any]
    tensors: dict[str, TensorRecord]
    files: dict[str, FileRecord]

    def __post_init__(self) -> None:
        for name in self.files:
            if not _is_inside(name):
                raise CheckpointError(f"file name {shown(name)} cannot be")
        for name, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                if chunk.file not in self.files:
                    raise CheckpointError(
                        f"tensor {shown(name)} has a chunk in {shown(chunk.file)}, which is none of its files"
                    )
                if chunk.key != name and not chunk.key.startswith(f"{name}["):
                    raise CheckpointError(
                        f"tensor {shown(name)} has the chunk {shown(chunk.key)}, which is of another tensor"
                    )

    def to_text(self) -> str:
        """Return JSON text with a checksum; raise CheckpointError if it is too long to be read."""
        body = {
            "step": self.step,
            "serial": self.serial,
            "meta": self.meta,
            "files": {name: vars(file) for name, file in sorted(self.files.items())},
            "tensors": {name: tensor.to_json() for name, tensor in self.tensors.items()},
        }
        head = {"format": FORMAT, "version": FORMAT_VERSION, "crc32": _checksum(body)}
        text = _json_lines(head | body, depth=2) + "\n"
        if len(text) > _MAX_BYTES:
            pieces = sum(len(tensor.chunks) for tensor in self.tensors.values())
            raise CheckpointError(
                f"{MANIFEST_NAME} would have {len(text)} bytes for {pieces} pieces of tensors, and {_MAX_BYTES} "
                "is the most that is read; save from fewer ranks"
            )
        return text

    @classmethod
    def from_text(cls, text: str | bytes) -> Manifest:
        """Parse the text of ``to_text``; raise CheckpointError if it is damaged, of another format, or no manifest."""
        try:
            value = parse_json(text.encode() if isinstance(text, str) else text)
        except ValueError as error:
            raise CheckpointError(f"it cannot be read: {error}; {_ANOTHER_COPY}") from error
        if value.get("format") != FORMAT:
            raise CheckpointError(f"it is JSON, but not of the format {FORMAT!r}")
        _check(value, _Head)
        if (version := value["version"]) != FORMAT_VERSION:
            remedy = "upgrade shardwise" if version > FORMAT_VERSION else "use the one that wrote it"
            raise CheckpointError(
                f"it was written by another Shardwise (format version {version}, this one reads {FORMAT_VERSION}); "
                f"{remedy}"
            )
        if lacking := _Body.__required_keys__ - value.keys():
            raise CheckpointError(f"it lacks {min(lacking)}")
        if value.get("crc32") != _checksum({key: value[key] for key in _Body.__required_keys__}):
            raise CheckpointError(
                f"its checksum does not match: it was changed or damaged after it was written; {_ANOTHER_COPY}"
            )
        _check(value, _Body)
        return cls(
            step=value["step"],
            serial=value["serial"],
            meta=value["meta"],
            tensors={name: TensorRecord.from_json(name, facts) for name, facts in value["tensors"].items()},
            files={name: FileRecord(facts["size"], facts["crc32"]) for name, facts in value["files"].items()},
        )

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of the checkpoint at ``folder``; raise CheckpointError, which names it, on failure."""
        path = existing_manifest(folder)
        manifest = cls.from_file(path)
        published = re.fullmatch(r"\.?step-(\d{8,})(\.replaced)?", folder.name)
        if published and int(published[1]) != manifest.step:
            raise CheckpointError(f"{path} is of step {manifest.step}, which its folder's name is not of; rename it")
        return manifest

    @classmethod
    def from_file(cls, path: Path) -> Manifest:
        """Read the manifest in the file at ``path``; raise CheckpointError, which names it, on failure."""
        try:
            return cls.from_text(read_regular(path, limit=_MAX_BYTES))
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        except CheckpointError as error:
            raise CheckpointError(f"{path} is damaged or of another kind: {error}") from error

    def check_sizes(self, folder: Path) -> None:
        """Raise CheckpointError unless every recorded file has its recorded size."""
        for name, file in self.files.items():
            path = folder / name
            try:
                status = path.stat()
            except OSError as error:
                raise CheckpointError(
                    f"checkpoint {folder} is incomplete: {name} cannot be found ({error.strerror})"
                ) from error
            if not stat.S_ISREG(status.st_mode):
                raise damaged(folder, f"{name} is not a regular file")
            if status.st_size != file.size:
                raise damaged(folder, f"{name} has {status.st_size} bytes, expected {file.size}")

    def check_contents(self, folder: Path) -> None:
        """Raise CheckpointError unless every recorded file has its recorded checksum."""
        for name, file in self.files.items():
            try:
                found = FileRecord.of(folder / name)
            except OSError as error:
                raise damaged(folder, f"{name} cannot be read ({error})") from error
            if found != file:
                raise damaged(folder, f"{name} has CRC-32 {found.crc32}, expected {file.crc32}; {REMEDY}")


def check_state_fits(path: Path, manifest: Manifest, state: Mapping[str, ParamShard], *, convert: bool = False) -> None:
    """Raise CheckpointError unless the checkpoint has every tensor of ``state`` with a fitting shape and dtype."""
    for shard in state.values():
        saved = manifest.tensors.get(shard.key)
        if saved is None:
            continue
        if not shard.accepts(saved.shape):
            raise CheckpointError(
                f"checkpoint {path} is of another model: tensor {shard.key!r} has shape {list(saved.shape)} in it, "
                f"{list(shard.global_shape)} here"
            )
        both_floating = saved.dtype.is_floating_point and shard.data.dtype.is_floating_point
        if saved.dtype != shard.data.dtype and not (convert and both_floating):
            raise CheckpointError(
                f"checkpoint {path} has tensor {shard.key!r} as {saved.dtype}, here it is {shard.data.dtype}"
            )
    if missing := sorted({shard.key for shard in state.values()} - manifest.tensors.keys()):
        raise CheckpointError(f"checkpoint {path} is of another model or incomplete: it lacks {some_tensors(missing)}")


def damaged(folder: Path, what: str) -> CheckpointError:
    """Make the error of a checkpoint whose files differ from the saved ones."""
    return CheckpointError(f"checkpoint {folder} is damaged: {what}")


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return can_be_a_name(name) and path.parts != () and not path.is_absolute() and ".." not in path.parts


def existing_manifest(folder: Path) -> Path:
    """Return the path of ``folder``'s ``meta.json``; raise CheckpointError, which names what is there, if missing."""
    path = folder / MANIFEST_NAME
    # If the path exists and is not a regular file, reading it reports so.
    if os.path.lexists(path):
        return path
    if not folder.exists():
        raise CheckpointError(f"there is no checkpoint at {folder}: no such folder")
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; a checkpoint is a folder with a {MANIFEST_NAME}")
    inside = sorted(entry.name for entry in folder.glob("step-*"))
    hint = f"; it holds checkpoints: give one of them, such as {folder / inside[-1]}" if inside else ""
    raise CheckpointError(f"{folder} is not a checkpoint: it has no {MANIFEST_NAME}{hint}")


def json_copy(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``meta`` as a later read returns it; raise CheckpointError if it is not JSON."""
    try:
        # Nest the copy in another object, because its depth in the file counts.
        copy: dict[str, Any] = parse_json(json.dumps({"meta": dict(meta)}, allow_nan=False).encode())["meta"]
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the checkpoint's meta must be plain JSON values: {error}") from error
    return copy


def _json_lines(value: Any, depth: int, indent: str = "") -> str:
    """Format ``value`` as JSON, with a line for each entry of the outer ``depth`` objects, so one line per tensor."""
    if depth == 0 or not isinstance(value, dict) or not value:
        return json.dumps(value, allow_nan=False)
    inner = indent + "  "
    entries = [f"{inner}{json.dumps(key)}: {_json_lines(item, depth - 1, inner)}" for key, item in value.items()]
    return "{\n" + ",\n".join(entries) + f"\n{indent}}}"


def _checksum(body: dict[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"{zlib.crc32(canonical.encode()):08x}"
