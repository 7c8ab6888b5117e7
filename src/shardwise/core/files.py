"""Files that are complete or absent, and JSON from files of others, which are checked before they are read.

Python's reader takes NaN and Infinity, keeps the last of two equal keys in silence, and follows brackets until its
stack ends. ``read_json`` reads an object, nested at most ``MAX_DEPTH`` deep, with finite numbers and each key once,
from a regular file of a bounded size.
"""

import errno
import json
import math
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from shardwise.core.errors import UnwritableError
from shardwise.core.processes import clear_leftovers, temporary_prefix

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Create or replace a file, complete or not at all, also when several processes do it at once.

    Args:
        path: the file; its folder is made if missing.
        write: writes to the open binary file.

    Raises:
        UnwritableError: the folder cannot be made or written to.
    """
    temporary = path.with_name(f".{path.name}.{temporary_prefix('file')}{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        clear_leftovers([path.parent])
        try:
            with temporary.open("xb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise UnwritableError(
            f"cannot write {str(path)!r}: {reason}; choose a folder that can be written to"
        ) from error


@contextmanager
def open_regular(path: str | os.PathLike[str]) -> Iterator[int]:
    """A descriptor of a regular file, to read from within the block.

    Opening a named pipe would wait for a writer that never comes, and a device has no end; so the kind is checked
    first, and again when the file is open.

    Raises:
        OSError: there is no such file, it cannot be read, or it is no regular file.
    """
    try:
        _check_regular(os.stat(path), path)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError as error:
        # A NUL, or a character that no file name has.
        raise OSError(errno.EINVAL, str(error), repr(path)) from error
    try:
        _check_regular(os.fstat(descriptor), path)
        yield descriptor
    finally:
        os.close(descriptor)


def read_regular(path: str | os.PathLike[str], *, limit: int) -> bytes:
    """The content of a regular file of at most ``limit`` bytes.

    Raises:
        OSError: see ``open_regular``; or the file is larger.
    """
    with open_regular(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"it has {size} bytes, and such a file at most {limit}", os.fspath(path))
        with open(descriptor, "rb", closefd=False) as file:
            # One that grows meanwhile is read up to its size at the check.
            return file.read(size)


def can_be_a_name(text: str) -> bool:
    """True if a file can have this name: no NUL, and no lone surrogate."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _check_regular(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", os.fspath(path))


MAX_DEPTH = 64
"""Depth of objects and lists within each other; real files have about ten."""

MAX_CONFIG_BYTES = 8_000_000
"""Size of files such as ``config.json``; real ones have some kilobytes."""

MAX_TABLE_BYTES = 100_000_000
"""Size of lists of tensors; safetensors has the same limit for its headers."""

_TOO_DEEP = f"it is nested more than {MAX_DEPTH} deep"


def read_json(path: str | os.PathLike[str], *, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The object in the JSON file at ``path``.

    Args:
        path: the path of a regular file.
        limit: its largest size in bytes; a larger file is not read.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger.
        ValueError: its content is not such an object; see ``parse_json``.
    """
    return parse_json(read_regular(path, limit=limit))


def parse_json(content: bytes) -> dict[str, Any]:
    """The object of a JSON text in UTF-8.

    Raises:
        ValueError: it is no JSON or no object, has a number that is not finite or a key twice, or is nested deeper than
            ``MAX_DEPTH``. The message says which, without the file's name.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8: can't decode byte 0x{content[error.start]:02x} at {error.start}") from error
    try:
        value = json.loads(text, object_pairs_hook=_checked_object)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if not isinstance(value, dict):
        raise ValueError(f"it must hold a JSON object, not {type(value).__name__}")
    _check_depth(value, MAX_DEPTH)
    return value


def _check_depth(value: Any, depth: int) -> None:
    if isinstance(value, dict | list):
        if depth == 0:
            raise ValueError(_TOO_DEEP)
        for item in value.values() if isinstance(value, dict) else value:
            _check_depth(item, depth - 1)


def _checked_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise ValueError(f"it has {shown(key)} twice in one object")
        if not _is_finite(item):
            raise ValueError(f"its {shown(key)} is {shown(item)}, which is not finite")
        value[key] = item
    return value


def _is_finite(item: Any) -> bool:
    """True if a number, or each number of a list, is finite. Objects within were checked when they were made."""
    if isinstance(item, float):
        return math.isfinite(item)
    return not isinstance(item, list) or all(map(_is_finite, item))


def shown(value: object, longest: int = 80) -> str:
    """A value of a file in JSON, or its beginning, for a message."""
    try:
        text = json.dumps(value, default=str)
    except (ValueError, RecursionError):
        # Python does not convert integers of more than 4,300 digits.
        return "a value that cannot be shown"
    return text if len(text) <= longest else f"{text[:longest]}..."
