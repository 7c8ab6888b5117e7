"""Read records from JSON (JSON lines or one array), Parquet and Arrow, and get the text of a record.

A record of JSON lines is an object with its text under a key; a record of an array may also be the text itself.

Arrow files are read in the format in which the library ``datasets`` saves them.

Parquet and Arrow need ``pyarrow``, which is imported only for such a file.
"""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from shardwise.core.atomic_files import open_regular
from shardwise.core.errors import ConfigError, DataError
from shardwise.core.json_text import read_json, shown

_BLANK = re.compile(r"[ \t\n\r]*")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object; Python itself would silently keep the last of two equal keys."""
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise ValueError(f"it has {shown(key)} twice in one object")
        value[key] = item
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


@dataclass(frozen=True, slots=True)
class Record:
    """A record of a file, or a whole file as one record.

    ``value`` is usually an object with a text under a key, or the text itself if ``may_be_text``.
    """

    where: str
    value: Any
    may_be_text: bool = False


def records_of_lines(lines: Iterable[str], file: Path) -> Iterator[Record]:
    """Yield the records of JSON lines; blank lines are skipped."""
    # Only \n ends a line of JSON lines; str.splitlines would also split at U+2028, which JSON strings may contain.
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{str(file)!r}, line {number}"
            yield Record(where, value_of_line(line, where))


def records_of_json(content: str, file: Path) -> list[Record]:
    """Read the records of a ``.json`` file, which has an array of records, or JSON lines, or is blank."""
    start = _skip_blank(content, 0)
    if content[start : start + 1] == "[":
        return list(_records_of_array(content, start, file))
    if content[start : start + 1] in ("{", ""):
        try:
            return list(records_of_lines(content.split("\n"), file))
        except DataError:
            if not _begins_object_of_lines(content, start):
                raise
            raise DataError(
                f"{str(file)!r}, {_position(content, start)}: a JSON object over several lines, which is neither an "
                f"array of records nor JSON lines; put its records in an array: [...]"
            ) from None
    raise DataError(
        f"{str(file)!r}, {_position(content, start)}: {content[start]!r} begins neither a JSON array of records nor "
        f"JSON lines; make it one of the two, or name the file .txt if its characters are the text"
    )


def text_of(record: Record, text_key: str) -> str:
    """Return the text of a record, which is under ``text_key`` in an object."""
    if record.may_be_text and isinstance(record.value, str):
        return check_text(record.value, record.where, "the text")
    where, value = record.where, record.value
    if not isinstance(value, dict):
        example = f'{{{json.dumps(text_key)}: "..."}}'
        problem = "neither a JSON object nor a string" if record.may_be_text else "not a JSON object"
        raise DataError(f"{where}: {problem} but {kind_of(value)}; each record must be like {example}")
    if text_key not in value:
        raise DataError(
            f"{where}: no key {text_key!r} (its keys: {keys_of(value)}); name the key of the text (--corpus.text-key) "
            f"or repair the record"
        )
    text = value[text_key]
    if not isinstance(text, str):
        raise DataError(
            f"{where}: {text_key!r} is not a string but {kind_of(text)}; make it a string or remove the record"
        )
    return check_text(text, where, repr(text_key))


def _records_of_array(content: str, start: int, file: Path) -> Iterator[Record]:
    at = _skip_blank(content, start + 1)
    line, done = 1, 0
    number = 0
    while content[at : at + 1] != "]" or number:
        number += 1
        line, done = line + content.count("\n", done, at), at
        where = f"{str(file)!r}, record {number} (line {line})"
        try:
            value, at = _DECODER.raw_decode(content, at)
        except json.JSONDecodeError as error:
            if error.msg.startswith("Unterminated string") or _skip_blank(content, error.pos) == len(content):
                raise DataError(f"{where}: the file ends within it; it is cut off, or a quote is missing") from error
            raise DataError(
                f"{where}: broken JSON: {_problem(error)} at {_position(content, error.pos)}; repair the file"
            ) from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: JSON that cannot be read: {error}; repair or remove the record") from error
        yield Record(where, value, may_be_text=True)
        at = _skip_blank(content, at)
        sign = content[at : at + 1]
        if sign == "]":
            break
        if sign != ",":
            if not sign:
                raise DataError(f"{where}: the file ends after it, within the array; it is cut off")
            raise DataError(
                f"{where}: {sign!r} after it, at {_position(content, at)}, where ',' or ']' belongs; repair the file"
            )
        at = _skip_blank(content, at + 1)
    after = _skip_blank(content, at + 1)
    if after < len(content):
        raise DataError(
            f"{str(file)!r}, {_position(content, after)}: {content[after]!r} after the end of the array; a .json file "
            f"is one array of records or JSON lines, not both"
        )


def _problem(error: json.JSONDecodeError) -> str:
    """Return the message without its position: "Invalid control character", not "Invalid control character at"."""
    return error.msg.removesuffix(" at")


def _begins_object_of_lines(content: str, start: int) -> bool:
    """True if a complete JSON object of several lines starts at ``start``."""
    try:
        _, end = _DECODER.raw_decode(content, start)
    except (ValueError, RecursionError):
        return False
    return "\n" in content[start:end]


def _skip_blank(content: str, start: int) -> int:
    blank = _BLANK.match(content, start)
    assert blank is not None
    return blank.end()


def _position(content: str, offset: int) -> str:
    line = content.count("\n", 0, offset) + 1
    return f"line {line}, column {offset - content.rfind(chr(10), 0, offset)}"


def value_of_line(line: str, where: str) -> Any:
    """Parse a line of JSON lines; raise DataError, which begins with ``where``."""
    try:
        return _DECODER.decode(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: broken JSON: {_problem(error)} at column {error.colno}; repair or remove the line"
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: JSON that cannot be read: {error}; repair or remove the line") from error


def check_text(text: str, where: str, what: str) -> str:
    """Return the text, after checking that it has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: a lone surrogate \\u{ord(text[error.start]):04x} in {what}, which is no character; remove it"
        ) from error
    return text


def kind_of(value: object) -> str:
    """Return the JSON name of a value's type, with its article; of other values in tables, their type."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def keys_of(value: Mapping[str, Any]) -> str:
    """Return the first keys of an object, for messages."""
    return ", ".join(map(repr, list(value)[:5])) or "none"


def counted(count: int, noun: str) -> str:
    """Format a count, for example ``"1 word"`` or ``"2,000 words"``."""
    return f"{count} {noun}" if count == 1 else f"{count:,} {noun}s"


def digest_of(value: object) -> str:
    """Return the hex SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


TABLE_SUFFIXES = frozenset({".parquet", ".arrow"})
"""Suffixes of files whose rows are records."""

_STATE, _SPLITS = "state.json", "dataset_dict.json"
_ROWS = 64
# A value that is stored once may stand in all rows, so a small file may have more text than there is memory.
_MOST_TIMES, _ALWAYS_READ = 300, 1 << 28


def files_of_dataset(folder: Path) -> list[Path] | None:
    """List the Arrow files of a folder saved by ``datasets``, in its order; None for any other folder."""
    if (folder / _SPLITS).is_file():
        splits = _read(folder / _SPLITS).get("splits")
        names = [name for name in splits if isinstance(name, str)] if isinstance(splits, list) else []
        raise DataError(
            f"{str(folder)!r} holds the splits of a dataset; name one of them, such as "
            f"{os.path.join(folder, names[0] if names else 'train')!r} (its splits: {', '.join(names) or 'none'})"
        )
    if not (folder / _STATE).is_file():
        return None
    listed = _read(folder / _STATE).get("_data_files")
    files = [each.get("filename") for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    for name in files or [None]:
        if not isinstance(name, str) or name in (".", "..", "") or os.path.basename(name) != name:
            raise DataError(f"{str(folder / _STATE)!r}: _data_files is {shown(listed)}, which names no files there")
    return [folder / str(name) for name in files]


def records_of_table(file: Path) -> Iterator[Record]:
    """Yield the rows of a Parquet or Arrow file as objects with the column names as keys.

    Arrow gives every struct the fields of all rows. Null fields are dropped, except columns and fields of messages.
    Maps are objects, and columns of JSON (``datasets.Json``) are parsed.
    """
    arrow = _pyarrow(file)
    number = 0
    try:
        with open_regular(file) as descriptor, open(descriptor, "rb", closefd=False) as opened:
            most, num_bytes = max(_ALWAYS_READ, _MOST_TIMES * os.fstat(descriptor).st_size), 0
            converters: dict[str, _Converter] | None = None
            shared: list[str] = []
            for batch in _batches(arrow, opened, file.suffix.lower() == ".parquet"):
                # A damaged offset would be read outside the file's memory.
                batch.validate(full=True)
                num_bytes += batch.nbytes
                if converters is None:
                    # All batches of a file have one schema.
                    converters = _converters(arrow, batch.schema, file)
                    shared = [each.name for each in batch.schema if arrow.types.is_dictionary(each.type)]
                for row in chain.from_iterable(
                    batch.slice(first, _ROWS).to_pylist() for first in range(0, batch.num_rows, _ROWS)
                ):
                    number += 1
                    num_bytes += sum(len(row[name]) for name in shared if isinstance(row[name], str))
                    if num_bytes > most:
                        raise DataError(
                            f"{str(file)!r}, row {number}: the rows so far have more than {most:,} bytes, over "
                            f"{_MOST_TIMES:,} times as many as the file; leave it out, or write it as JSON lines"
                        )
                    where = f"{str(file)!r}, row {number}"
                    for name, convert in converters.items():
                        if row[name] is not None:
                            row[name] = convert(row[name], where)
                    yield Record(where, row)
    except DataError:
        raise
    except OSError as error:
        if error.strerror is None:
            raise _broken(file, number, error) from error
        raise DataError(f"cannot read {str(file)!r}: {error.strerror}; check the path and its permissions") from error
    except (arrow.ArrowException, MemoryError, ValueError, TypeError, OverflowError) as error:
        raise _broken(file, number, error) from error


_Converter = Callable[[Any, str], Any]


def _converters(arrow: Any, schema: Any, file: Path) -> dict[str, _Converter]:
    """Return for each column what makes its values those of JSON, without columns whose values are."""
    if twice := sorted(name for name, count in Counter(schema.names).items() if count > 1):
        raise DataError(f"{str(file)!r}: two columns are named {twice[0]!r}; leave one of them out")
    # Tools are structs without nulls; see _converter.
    found = {each.name: _converter(arrow, each.type, each.name, int(each.name == "tools")) for each in schema}
    return {name: convert for name, convert in found.items() if convert is not None}


def _converter(arrow: Any, kind: Any, name: str, depth: int) -> _Converter | None:
    """Return what makes values of a type those of JSON: maps objects, texts of JSON parsed, no null fields of structs.

    None stands for values that are. Nulls in lists and in texts of JSON stay. So do those of a message, a struct in the
    list of a column at ``depth`` 0, because a content of null is not a missing one. Values are not null.
    """
    if arrow.types.is_dictionary(kind):
        kind = kind.value_type
    if getattr(kind, "extension_name", "") == "arrow.json":
        return lambda value, where: value_of_line(value, f"{where}, {name!r}")
    if arrow.types.is_struct(kind):
        inner = {field.name: _converter(arrow, field.type, name, depth + 2) for field in kind}
        if depth == 1 and not any(inner.values()):
            return None

        def of_struct(value: dict[str, Any], where: str) -> dict[str, Any]:
            return {
                key: item if item is None or (convert := inner[key]) is None else convert(item, where)
                for key, item in value.items()
                if item is not None or depth == 1
            }

        return of_struct
    if arrow.types.is_map(kind):
        of_item = _converter(arrow, kind.item_type, name, depth + 2)
        return lambda value, where: {
            str(key): item if item is None or of_item is None else of_item(item, where) for key, item in value
        }
    if hasattr(kind, "value_field") and (of_each := _converter(arrow, kind.value_type, name, depth + 1)) is not None:
        return lambda value, where: [each if each is None else of_each(each, where) for each in value]
    return None


def _broken(file: Path, number: int, error: Exception) -> DataError:
    kind = "Parquet" if file.suffix.lower() == ".parquet" else "Arrow"
    after = f" after row {number}" if number else ""
    return DataError(f"{str(file)!r} is no {kind} file, or a damaged one{after}: {error}; repair it or leave it out")


def _batches(arrow: Any, opened: Any, is_parquet: bool) -> Iterator[Any]:
    if is_parquet:
        import pyarrow.parquet

        yield from pyarrow.parquet.ParquetFile(opened).iter_batches(batch_size=_ROWS)
        return
    # ``datasets`` writes the streaming format; other programs write the file format, which starts with a magic string.
    is_file = opened.peek(6)[:6] == b"ARROW1"
    with arrow.ipc.open_file(opened) if is_file else arrow.ipc.open_stream(opened) as reader:
        if is_file:
            yield from (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            yield from reader


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}") from error


def _pyarrow(file: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        raise ConfigError(
            f"{str(file)!r} is read with pyarrow, which is not installed; pip install 'shardwise[data]', or give JSON "
            "lines"
        ) from error
    return pyarrow
