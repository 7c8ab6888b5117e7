"""Records from tables: Parquet files, and Arrow files, as the library ``datasets`` saves them.

Read with ``pyarrow``, which is imported only where there is such a file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.core.errors import ConfigError, DataError
from shardwise.core.json_files import read_json, shown
from shardwise.data.json_records import Record

TABLE_SUFFIXES = frozenset({".parquet", ".arrow"})
"""Files of which each row is a record."""

_STATE, _SPLITS = "state.json", "dataset_dict.json"
_ROWS = 1024


def files_of_dataset(folder: Path) -> list[Path] | None:
    """The Arrow files of a folder that ``datasets`` saved, in the order that it says; None of any other folder.

    Raises:
        DataError: it holds several splits, or says what cannot be.
    """
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
            raise DataError(f"{str(folder / _STATE)!r}: _data_files is {shown(listed)}, which names no files beside it")
    return [folder / str(name) for name in files]


def records_of_table(file: Path) -> Iterator[Record]:
    """The rows of a Parquet or Arrow file, as objects by the names of columns.

    Raises:
        DataError: the file cannot be read, or is no such file.
        ConfigError: ``pyarrow`` is not installed.
    """
    arrow = _pyarrow(file)
    number = 0
    try:
        with open(file, "rb") as opened:
            for batch in _batches(arrow, opened, file.suffix.lower() == ".parquet"):
                for row in batch.to_pylist():
                    number += 1
                    yield Record(f"{str(file)!r}, row {number}", row)
    except OSError as error:
        if error.strerror is None:
            raise _broken(file, number, error) from error
        raise DataError(f"cannot read {str(file)!r}: {error.strerror}; check the path and its permissions") from error
    except (arrow.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise _broken(file, number, error) from error


def _broken(file: Path, number: int, error: Exception) -> DataError:
    kind = "Parquet" if file.suffix.lower() == ".parquet" else "Arrow"
    after = f" after row {number}" if number else ""
    return DataError(f"{str(file)!r} is no {kind} file, or a damaged one{after}: {error}; repair it or leave it out")


def _batches(arrow: Any, opened: Any, is_parquet: bool) -> Iterator[Any]:
    if is_parquet:
        import pyarrow.parquet

        yield from pyarrow.parquet.ParquetFile(opened).iter_batches(batch_size=_ROWS)
        return
    # A dataset's files are streams; others write the random-access form, which begins with a word of its own.
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
