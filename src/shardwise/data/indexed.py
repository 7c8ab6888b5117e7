"""Megatron's indexed data: sequences of token ids in NAME.bin, described by NAME.idx, read by memory map and written.

``NAME.idx`` has ``MMIDIDX\\0\\0``, the version 1, the code of the dtype, the numbers of sequences and of document
boundaries, and three arrays: the length of each sequence (int32), its first byte in ``NAME.bin`` (int64), and the
number of sequences before each document and after the last one (int64).
"""

from __future__ import annotations

import array
import hashlib
import math
import mmap
import os
import shutil
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from shardwise.core.atomic_files import open_regular, write_atomically
from shardwise.core.errors import ConfigError, DataError, UnwritableError

DTYPES: dict[int, type[np.number[Any]]] = dict(
    enumerate((np.uint8, np.int8, np.int16, np.int32, np.int64, np.float64, np.float32, np.uint16), start=1)
)
"""dtypes by their codes."""

_MAGIC, _VERSION = b"MMIDIDX\0\0", 1
_HEADER = struct.Struct("<9sQBQQ")
_CHECKED_AT_ONCE = 1 << 20
# A page fault maps 16 pages at once. Mapped pages count as memory of the process until they are released.
_FAULT_BYTES, _MAPPED_BYTES = 1 << 16, 1 << 26
_PAGE, _NUM_PAGES = 1 << 12, 1 << 12


def prefix_of(path: str | os.PathLike[str]) -> Path:
    """Return the common part of the names of both files from the name of one of them."""
    name = os.fspath(path)
    return Path(name[:-4] if name.endswith((".idx", ".bin")) else name).expanduser()


class IndexedTokens:
    """Sequences of tokens in a pair of files, memory-mapped: a file may be larger than memory.

    Args:
        prefix: name of both files, without ``.bin`` and ``.idx``.

    Attributes:
        dtype: dtype of the tokens.
        sequence_lengths: ``[sequences]``, int32: number of tokens of each.
        sequence_pointers: ``[sequences]``, int64: first byte of each in the ``.bin`` file.
        document_indices: ``[documents + 1]``, int64: number of sequences before each document, and of all.

    Raises:
        DataError: a file cannot be read, is no such file, is torn, or belongs to another one.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = prefix_of(prefix)
        self.idx_path, self.bin_path = (Path(f"{self.prefix}{suffix}") for suffix in (".idx", ".bin"))
        self._index, self._bin = _mapped(self.idx_path), _mapped(self.bin_path)
        self._num_mapped = 0
        self.dtype, num_sequences, num_documents = self._header()
        arrays, offset = [], _HEADER.size
        for count, dtype in ((num_sequences, "<i4"), (num_sequences, "<i8"), (num_documents, "<i8")):
            arrays.append(np.frombuffer(self._index, dtype, count, offset))
            offset += arrays[-1].nbytes
        self.sequence_lengths, self.sequence_pointers, self.document_indices = arrays
        self._check()

    def _header(self) -> tuple[np.dtype[Any], int, int]:
        size = len(self._index)
        if size < _HEADER.size or self._index[: len(_MAGIC)] != _MAGIC:
            raise self._wrong("it does not begin as an index of Megatron's data (MMIDIDX)")
        _, version, code, num_sequences, num_documents = _HEADER.unpack_from(self._index)
        if version != _VERSION:
            raise self._wrong(f"its version is {version}, and {_VERSION} is read")
        if code not in DTYPES:
            raise self._wrong(f"its dtype has the code {code}, and the codes are 1 to {len(DTYPES)}")
        expected = _HEADER.size + 12 * num_sequences + 8 * num_documents
        if size == expected + num_sequences > expected:
            raise self._wrong("it is multimodal: it has the mode of each sequence, which is not read here")
        if size != expected:
            raise self._wrong(
                f"it lists {num_sequences} sequences and {num_documents} document boundaries, which take {expected} "
                f"bytes, and it has {size}"
            )
        return np.dtype(DTYPES[code]), num_sequences, num_documents

    def _check(self) -> None:
        lengths, pointers, documents = self.sequence_lengths, self.sequence_pointers, self.document_indices
        size, last = len(self._bin), 0
        for first in range(0, len(lengths), _CHECKED_AT_ONCE):
            part = slice(first, first + _CHECKED_AT_ONCE)
            begins, counts = pointers[part], lengths[part].astype(np.int64)
            room = size - counts * self.dtype.itemsize
            wrong = np.flatnonzero((counts < 0) | (begins < 0) | (begins > room))
            if len(wrong):
                number = first + int(wrong[0])
                raise self._wrong(
                    f"sequence {number} has {lengths[number]} tokens from byte {pointers[number]}, and "
                    f"{str(self.bin_path)!r} has {size} bytes"
                )
            last = max(last, int((begins + counts * self.dtype.itemsize).max()))
        if last != size:
            raise self._wrong(f"its sequences end at byte {last}, and {str(self.bin_path)!r} has {size} bytes")
        if not len(documents) or documents[0] != 0 or documents[-1] != len(lengths) or (np.diff(documents) < 0).any():
            raise self._wrong(f"its document boundaries do not rise from 0 to its {len(lengths)} sequences")

    def _wrong(self, what: str) -> DataError:
        return DataError(
            f"{str(self.idx_path)!r} cannot be read: {what}; the file is torn, or belongs to another .bin file: make "
            "both again"
        )

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.sequence_lengths)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sequences."""
        return int(self.sequence_lengths.sum(dtype=np.int64))

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Return at most ``length`` tokens of a sequence from ``offset``, or all from there; a view of the file."""
        whole = int(self.sequence_lengths[index])
        count = max(0, whole - offset if length is None else min(length, whole - offset))
        if not count:
            return np.empty(0, self.dtype)
        begin = int(self.sequence_pointers[index]) + offset * self.dtype.itemsize
        self._num_mapped += max(_FAULT_BYTES, count * self.dtype.itemsize)
        if self._num_mapped > _MAPPED_BYTES:
            self._bin.madvise(mmap.MADV_DONTNEED)
            self._num_mapped = 0
        return np.frombuffer(self._bin, self.dtype, count, begin)

    @cached_property
    def sha256(self) -> str:
        """Hex digest of the index, and of the data: of 4,096 pages of it, evenly spread, if it has more."""
        digest = hashlib.sha256(str(len(self._bin)).encode())
        with open_regular(self.idx_path) as descriptor, open(descriptor, "rb", closefd=False) as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
        pages = -(-len(self._bin) // _PAGE)
        for number in range(min(pages, _NUM_PAGES)):
            begin = number * pages // min(pages, _NUM_PAGES) * _PAGE
            digest.update(self._bin[begin : begin + _PAGE])
        return digest.hexdigest()


def _mapped(path: Path) -> mmap.mmap:
    try:
        with open_regular(path) as descriptor:
            if not os.fstat(descriptor).st_size:
                raise DataError(f"{str(path)!r} is empty; it holds no tokens: leave it out, or make it again")
            return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise DataError(
            f"cannot read {str(path)!r}: {error.strerror or error}; token files are a pair, NAME.idx and NAME.bin"
        ) from error


def cached_arrays(
    folder: str | os.PathLike[str] | None,
    names: Sequence[str],
    identity: bytes,
    shapes: Sequence[tuple[int, ...]],
    make: Callable[[], Sequence[NDArray[Any]]],
) -> list[NDArray[Any]]:
    """Make arrays of integers, or map those that an earlier call with the same identity left in a folder.

    Several processes may use one folder at once; each that finds no arrays of these shapes makes them. A folder that
    cannot be written to, or None, is not used.
    """
    if folder is None:
        return list(make())
    key = hashlib.sha256(identity).hexdigest()[:32]
    paths = [Path(folder).expanduser() / f"{key}-{name}.npy" for name in names]
    found = [_cached(path, shape) for path, shape in zip(paths, shapes, strict=True)]
    if None not in [each if each is None else True for each in found]:
        return [each for each in found if each is not None]
    made = list(make())
    with suppress(UnwritableError):
        for path, each in zip(paths, made, strict=True):
            write_atomically(path, partial(np.save, arr=each, allow_pickle=False))
    return made


def _cached(path: Path, shape: tuple[int, ...]) -> NDArray[Any] | None:
    try:
        with open_regular(path):
            pass  # A named pipe would keep NumPy waiting.
        found = np.load(path, mmap_mode="r" if math.prod(shape) else None, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return found if found.shape == shape and found.dtype.kind in "iu" else None


class IndexedWriter:
    """Writes a pair of files, which Megatron reads too; the bytes are those of its builder.

    As a context manager it closes the ``.bin`` file. Without ``finish`` there is no index, and so no pair.

    Args:
        bin_path: the ``.bin`` file, which is replaced.
        dtype: dtype of the tokens.
    """

    def __init__(self, bin_path: str | os.PathLike[str], dtype: DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        codes = [code for code, each in DTYPES.items() if self.dtype == each]
        if not codes:
            names = ", ".join(each.__name__ for each in DTYPES.values())
            raise ConfigError(f"indexed data has no code for dtype {self.dtype}; use one of {names}")
        self._code = codes[0]
        self._file: BinaryIO = open(bin_path, "wb")  # noqa: SIM115  # until `finish`
        self._lengths, self._documents = array.array("i"), array.array("q", [0])

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, tokens: ArrayLike) -> None:
        """Add a sequence. Raises DataError if a token does not fit the dtype."""
        self._write(tokens)
        self._lengths.append(np.size(tokens))

    def add_document(self, tokens: ArrayLike, lengths: ArrayLike) -> None:
        """Add a document of sequences of these lengths, whose tokens follow one another."""
        self._write(tokens)
        self._lengths.extend(np.asarray(lengths).tolist())
        self.end_document()

    def add_documents(self, tokens: ArrayLike, lengths: Sequence[int]) -> None:
        """Add a document of one sequence for each length, whose tokens follow one another."""
        first = len(self._lengths) + 1
        self._write(tokens)
        self._lengths.extend(lengths)
        self._documents.extend(range(first, first + len(lengths)))

    @property
    def num_documents(self) -> int:
        """Number of documents so far."""
        return len(self._documents) - 1

    def _write(self, tokens: ArrayLike) -> None:
        given = np.asarray(tokens)
        stored = given.astype(self.dtype)
        if self.dtype.kind in "iu" and not np.array_equal(given, stored):
            raise DataError(f"tokens from {given.min()} to {given.max()} do not fit {self.dtype}; use a wider dtype")
        self._file.write(stored.tobytes())

    def end_document(self) -> None:
        """End the document of the sequences that were added since the last end."""
        self._documents.append(len(self._lengths))

    def append(self, prefix: str | os.PathLike[str]) -> None:
        """Add all documents of another pair of files. Raises ConfigError if it has another dtype."""
        other = IndexedTokens(prefix)
        if other.dtype != self.dtype:
            raise ConfigError(f"{str(other.prefix)!r} has tokens in {other.dtype}, and these files are in {self.dtype}")
        self._documents.extend((other.document_indices[1:] + len(self._lengths)).tolist())
        self._lengths.extend(other.sequence_lengths.tolist())
        with open(other.bin_path, "rb") as file:
            shutil.copyfileobj(file, self._file, 1 << 24)

    def finish(self, idx_path: str | os.PathLike[str]) -> None:
        """Close the ``.bin`` file and write the index, without which the pair cannot be read."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        lengths = np.frombuffer(self._lengths, np.int32)
        sizes = lengths.astype(np.int64) * self.dtype.itemsize

        def write(file: BinaryIO) -> None:
            file.write(_HEADER.pack(_MAGIC, _VERSION, self._code, len(lengths), len(self._documents)))
            for each in (lengths, np.cumsum(sizes) - sizes, np.frombuffer(self._documents, np.int64)):
                file.write(each.tobytes())

        write_atomically(Path(idx_path), write)
