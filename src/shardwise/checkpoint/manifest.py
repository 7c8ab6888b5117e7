"""``meta.json``: what a checkpoint holds, where in its files each piece lies, and how to tell that they are whole."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.sharding import ParamLayout

MANIFEST_NAME = "meta.json"
FORMAT = "shardwise checkpoint"
FORMAT_VERSION = 2

_READ_SIZE = 1 << 22


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and CRC-32 (eight hexadecimal digits) of one file."""

    size: int
    crc32: str

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        """Read the file at ``path`` once, from beginning to end."""
        size = checksum = 0
        with path.open("rb") as file:
            while block := file.read(_READ_SIZE):
                size += len(block)
                checksum = zlib.crc32(block, checksum)
        return cls(size, f"{checksum:08x}")


@dataclass(frozen=True)
class ChunkRecord:
    """A box of a global tensor, and where it is stored.

    Attributes:
        offsets: first index of the box in each dimension.
        sizes: number of indices in each dimension.
        file: name of a safetensors file of the checkpoint.
        key: name of the box in that file.
        checksum: of the box (see ``checksum.slice_checksum``).
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str
    checksum: int

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values; the inverse of ``from_json``."""
        return {
            "offsets": list(self.offsets),
            "sizes": list(self.sizes),
            "file": self.file,
            "key": self.key,
            "checksum": f"{self.checksum:016x}",
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ChunkRecord:
        """From ``to_json``'s values."""
        box = tuple(value["offsets"]), tuple(value["sizes"])
        return cls(*box, value["file"], value["key"], int(value["checksum"], 16))


@dataclass(frozen=True)
class TensorRecord:
    """A global tensor: its shape and dtype, the layout that it was saved from, and the chunks that fill it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: ParamLayout
    chunks: tuple[ChunkRecord, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values; the inverse of ``from_json``."""
        return {
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "layout": self.layout.to_json(),
            "chunks": [chunk.to_json() for chunk in self.chunks],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> TensorRecord:
        """From ``to_json``'s values."""
        dtype = getattr(torch, value["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"{value['dtype']!r} is no dtype of this PyTorch")
        chunks = tuple(ChunkRecord.from_json(chunk) for chunk in value["chunks"])
        return cls(tuple(value["shape"]), dtype, ParamLayout.from_json(value["layout"]), chunks)


@dataclass(frozen=True)
class Manifest:
    """The content of ``meta.json``.

    Attributes:
        step: training step of the checkpoint.
        serial: place in the order in which the checkpoints of a folder were published; the newest has the highest.
            The step does not tell: a run may go on from an earlier step, or begin anew, in a folder with later ones.
        meta: the user's own JSON values.
        tensors: the global tensors by name.
        files: every other file of the checkpoint, by path relative to its folder.
    """

    step: int
    serial: int
    meta: dict[str, Any]
    tensors: dict[str, TensorRecord]
    files: dict[str, FileRecord]

    def __post_init__(self) -> None:
        for name, file in self.files.items():
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or file.size < 0:
                raise CheckpointError(f"file name {name!r} or size {file.size} cannot be")
        for name, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                box = zip(chunk.offsets, chunk.sizes, tensor.shape, strict=True)
                if chunk.file not in self.files or not all(0 <= o <= o + n <= total for o, n, total in box):
                    raise CheckpointError(f"tensor {name!r} of shape {list(tensor.shape)} has an impossible {chunk}")
            filled = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
            if filled != math.prod(tensor.shape) or not tensor.chunks:
                raise CheckpointError(
                    f"{filled} elements are recorded of tensor {name!r}, of shape {list(tensor.shape)}"
                )

    @property
    def tensor_files(self) -> list[str]:
        """Names of the files that hold tensors, sorted."""
        return sorted({chunk.file for tensor in self.tensors.values() for chunk in tensor.chunks})

    def to_text(self) -> str:
        """As JSON text, with a checksum of its own."""
        body = {
            "step": self.step,
            "serial": self.serial,
            "meta": self.meta,
            "files": {name: {"size": file.size, "crc32": file.crc32} for name, file in sorted(self.files.items())},
            "tensors": {name: tensor.to_json() for name, tensor in self.tensors.items()},
        }
        head = {"format": FORMAT, "version": FORMAT_VERSION, "crc32": _checksum(body)}
        return _json_lines(head | body, depth=2) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Manifest:
        """From ``to_text``'s text.

        Raises:
            CheckpointError: the text is no manifest, one of a newer format, or was changed after it was written.
        """
        try:
            value = json.loads(text)
            if not isinstance(value, dict) or value.get("format") != FORMAT:
                raise CheckpointError(f"it is JSON, but not of the format {FORMAT!r}")
            if value["version"] != FORMAT_VERSION:
                remedy = "upgrade shardwise" if value["version"] > FORMAT_VERSION else "use the one that wrote it"
                raise CheckpointError(
                    f"it was written by another Shardwise (format version {value['version']}, this one reads "
                    f"{FORMAT_VERSION}); {remedy}"
                )
            body = {key: value[key] for key in ("step", "serial", "meta", "files", "tensors")}
            if value["crc32"] != _checksum(body):
                raise CheckpointError("its checksum does not match: it was changed or damaged after it was written")
            return cls(
                step=body["step"],
                serial=body["serial"],
                meta=body["meta"],
                tensors={name: TensorRecord.from_json(tensor) for name, tensor in body["tensors"].items()},
                files={name: FileRecord(file["size"], file["crc32"]) for name, file in body["files"].items()},
            )
        except ShardwiseError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise CheckpointError(f"it cannot be read ({type(error).__name__}: {error})") from error

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of the checkpoint at ``folder``.

        Raises:
            CheckpointError: there is no such folder, or no good ``meta.json`` in it; the message names the folder.
        """
        return cls.from_file(existing_manifest(folder))

    @classmethod
    def from_file(cls, path: Path) -> Manifest:
        """The manifest in the file at ``path``; CheckpointError, which names the file, if it is not a good one."""
        try:
            return cls.from_text(path.read_bytes().decode())
        except (CheckpointError, OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} is damaged or of no use: {error}") from error

    def check_sizes(self, folder: Path) -> None:
        """Raise CheckpointError unless every recorded file is there and has its recorded size."""
        for name, file in self.files.items():
            path = folder / name
            try:
                size = path.stat().st_size
            except OSError as error:
                raise CheckpointError(
                    f"checkpoint {folder} is incomplete: {name} cannot be found ({error.strerror})"
                ) from error
            if size != file.size:
                raise CheckpointError(f"checkpoint {folder} is damaged: {name} has {size} bytes, expected {file.size}")

    def check_contents(self, folder: Path, names: list[str]) -> None:
        """Read the files called ``names`` and raise CheckpointError unless their checksums are as recorded."""
        for name in names:
            try:
                found = FileRecord.of(folder / name)
            except OSError as error:
                raise CheckpointError(f"checkpoint {folder} is damaged: {name} cannot be read ({error})") from error
            if found != self.files[name]:
                raise CheckpointError(
                    f"checkpoint {folder} is damaged: {name} has CRC-32 {found.crc32}, expected "
                    f"{self.files[name].crc32}; use an older checkpoint or another copy"
                )


def existing_manifest(folder: Path) -> Path:
    """The path of ``folder``'s ``meta.json``; CheckpointError, which says what is there instead, if there is none."""
    path = folder / MANIFEST_NAME
    if path.is_file():
        return path
    if not folder.exists():
        raise CheckpointError(f"there is no checkpoint at {folder}: no such folder")
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; a checkpoint is a folder with a {MANIFEST_NAME}")
    inside = sorted(entry.name for entry in folder.glob("step-*"))
    hint = f"; it holds checkpoints: give one of them, such as {folder / inside[-1]}" if inside else ""
    raise CheckpointError(f"{folder} is not a checkpoint: it has no {MANIFEST_NAME}{hint}")


def json_copy(meta: Mapping[str, Any]) -> dict[str, Any]:
    """``meta`` as it will be read back; CheckpointError if it is not JSON."""
    try:
        copy: dict[str, Any] = json.loads(json.dumps(dict(meta), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint's meta must be plain JSON values: {error}") from error
    return copy


def _json_lines(value: Any, depth: int, indent: str = "") -> str:
    """``value`` as JSON text, the entries of its outer ``depth`` objects on lines of their own: one line per tensor."""
    if depth == 0 or not isinstance(value, dict) or not value:
        return json.dumps(value, allow_nan=False)
    inner = indent + "  "
    entries = [f"{inner}{json.dumps(key)}: {_json_lines(item, depth - 1, inner)}" for key, item in value.items()]
    return "{\n" + ",\n".join(entries) + f"\n{indent}}}"


def _checksum(body: dict[str, Any]) -> str:
    """CRC-32 of a value's JSON text in its one canonical form."""
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"{zlib.crc32(canonical.encode()):08x}"
