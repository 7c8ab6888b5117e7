"""Read documents and records from files and folders of text, JSON, Parquet or Arrow.

A file is one document, except that these are one document each: a line of JSON lines (``.jsonl``, ``.ndjson``), a
record of a ``.json`` file (an array of objects or strings, or JSON lines), and a row of a Parquet or Arrow file. In a
folder and all its subfolders, files with a suffix of ``TEXT_SUFFIXES``, ``JSONL_SUFFIXES`` or ``.parquet`` are read, in
the order of their paths; hidden names are skipped. A folder that the library ``datasets`` saved is read in its own
order. Of the splits of a dataset, one must be named. A file that is given by name may have any suffix except ``.csv``
and ``.tsv``, tables as text.
"""

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from shardwise.core.atomic_files import no_data, open_regular
from shardwise.core.errors import ConfigError, DataError
from shardwise.core.json_text import first_of
from shardwise.core.slow_work import told_if_slow
from shardwise.data.corpus import Corpus, text_size
from shardwise.data.json_records import (
    TABLE_SUFFIXES,
    Record,
    counted,
    files_of_dataset,
    records_of_json,
    records_of_lines,
    records_of_table,
    text_of,
)

AnyPath = str | os.PathLike[str]

JSONL_SUFFIXES = frozenset({".jsonl", ".ndjson"})
"""Suffixes of files whose lines are JSON objects with a text."""

JSON_SUFFIX = ".json"
"""Suffix of a file with a JSON array of records, or JSON lines."""

_PROSE_SUFFIXES = ".txt .text .md .markdown .rst .adoc .org .tex .html .htm .xml"
_SOURCE_SUFFIXES = (
    ".py .pyi .c .h .cc .cpp .cxx .hh .hpp .cu .cuh .java .kt .scala .cs .go .rs .swift .m .js .mjs .jsx .ts .tsx .rb "
    ".pl .php .lua .jl .r .hs .ml .ex .erl .clj .el .lisp .scm .f90 .sql .sh .bash .toml .yaml .yml .ini .cfg"
)
# .json files in a folder, such as config.json, are rarely training text, so they must be given by name.
TEXT_SUFFIXES = frozenset(_PROSE_SUFFIXES.split() + _SOURCE_SUFFIXES.split())
"""Suffixes, in either case, of files in a folder that are read as one document each."""

_RECORD_SUFFIXES = JSONL_SUFFIXES | {".parquet"}
_SPLIT = re.compile(r"(train|validation|valid|val|dev|test|eval)(?:[-_.]|$)")
_PACKED = re.compile(r"\.(?:jsonl|ndjson|parquet)\.(?:gz|bz2|xz|zst)$")

# A model would learn the commas and quotes of such tables, and there is no unique way to parse them.
_TEXT_TABLE_SUFFIXES = frozenset({".csv", ".tsv"})

# Examine this many bytes first: a binary file given by mistake may be as large as a disk.
_FIRST_LOOK_BYTES = 1 << 16


def read_corpus(paths: AnyPath | Iterable[AnyPath], *, text_key: str = "text") -> Corpus:
    """Read the documents of files and folders, in their order.

    The text must be UTF-8; a byte order mark is dropped, and line ends stay unchanged. A file that is reached twice,
    even through links, is read once. No file is skipped silently: a selected file that cannot be read is an error, also
    in a folder, with the file and the line or byte. Empty files, blank lines and empty texts of records are left out.
    """
    name, records = read_records(paths, has_text=lambda record: bool(text_of(record, text_key)))
    return corpus_of(name, records, text_key)


def corpus_of(name: str, records: Iterable[Record], text_key: str) -> Corpus:
    """Make a corpus of records that are texts. Its name is ``name`` with the size."""
    documents = tuple(text_of(record, text_key) for record in records)
    return Corpus(f"{name}, {text_size(documents)}", documents)


def read_records(
    paths: AnyPath | Iterable[AnyPath], *, has_text: Callable[[Record], bool] = lambda record: bool(record.value)
) -> tuple[str, list[Record]]:
    """Read the records of files and folders, found as by ``read_corpus``; a plain text file is one record.

    Each path needs a record that ``has_text``. The name that comes first does not depend on the location of the files.
    """
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    names: list[str] = []
    records: dict[str, list[Record]] = {}
    for given in paths:
        if not os.fspath(given):
            raise DataError("a data path is empty; name a file or folder of text")
        root = Path(given).expanduser()
        names.append(os.path.basename(os.path.abspath(root)) or "/")
        is_empty = True
        with told_if_slow(f"reading {names[-1]}", lambda: counted(sum(map(len, [*records.values()])), "record")):
            for file in files_of(root):
                place = os.path.realpath(file)
                if place not in records:
                    records[place] = []
                    records[place].extend(records_of(file))
                is_empty = is_empty and not any(map(has_text, records[place]))
        if is_empty:
            raise DataError(f"data path {str(root)!r} has no text: all that it holds is empty; give a path with text")
    if not names:
        raise ConfigError("no data given; name at least one file or folder of text")
    return f"{first_of(names)}, {len(records)} file{'s' if len(records) > 1 else ''}", [
        record for of_file in records.values() for record in of_file
    ]


def _status(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(no_data(path)) from None
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> DataError:
    reason = getattr(error, "strerror", None) or error
    return DataError(f"cannot read {str(path)!r}: {reason}; check the path and its permissions")


def files_of(root: Path) -> list[Path]:
    """Return the file itself, or the files of a folder with a known suffix, in order."""
    mode = _status(root).st_mode
    if stat.S_ISREG(mode):
        return [root]
    if not stat.S_ISDIR(mode):
        raise DataError(f"data path {str(root)!r} is neither a file nor a folder; give a file or folder of text")
    if (tables := files_of_dataset(root)) is not None:
        return tables
    num_files = 0
    picked = []
    for file in _walk(root):
        num_files += 1
        if _PACKED.search(file.name.lower()):
            raise DataError(f"{str(file)!r} is packed, which is not read; unpack it, or move it out of the data folder")
        if file.suffix.lower() in TEXT_SUFFIXES | JSONL_SUFFIXES | {".parquet"}:
            if not stat.S_ISREG(_status(file).st_mode):
                raise DataError(f"{str(file)!r} is no regular file; move it out of the data folder")
            picked.append(file)
    if not picked:
        raise DataError(
            f"folder {str(root)!r} has no text: none of its {num_files} file(s) has a suffix such as .txt, .md, .py or "
            f".jsonl; name files with other suffixes themselves"
        )
    _check_one_split(root, picked)
    return sorted(picked, key=lambda file: file.relative_to(root).parts)


def _check_one_split(root: Path, files: Iterable[Path]) -> None:
    """Raise DataError if a folder has records to train on and to test on, as published data sets have."""
    splits: dict[str, Path] = {}
    for file in files:
        for part in file.relative_to(root).parts if file.suffix.lower() in _RECORD_SUFFIXES else ():
            if found := _SPLIT.match(part.lower()):
                splits.setdefault(found[1], file)
    if "train" in splits and len(splits) > 1:
        examples = " and ".join(repr(str(file)) for file in [*splits.values()][:2])
        raise DataError(
            f"{str(root)!r} holds the splits of a dataset ({', '.join(splits)}), such as {examples}; name the files or "
            "the folder of one of them"
        )


def _walk(root: Path) -> Iterator[Path]:
    """Yield all files below a folder, without hidden names. Each folder is entered once, so that link loops end."""

    def fail(error: OSError) -> None:
        raise _unreadable(Path(error.filename), error) from error

    entered = set()
    for folder, folders, files in os.walk(root, onerror=fail, followlinks=True):
        status = _status(Path(folder))
        if (status.st_dev, status.st_ino) in entered:
            folders.clear()
            continue
        entered.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(folder, name) for name in files if not name.startswith("."))


def records_of(file: Path) -> Iterator[Record]:
    """Yield the records of a file. Of JSON lines and tables, only a part is in memory."""
    suffix = file.suffix.lower()
    if suffix in TABLE_SUFFIXES:
        yield from records_of_table(file)
        return
    if suffix in _TEXT_TABLE_SUFFIXES:
        raise DataError(
            f"data file {str(file)!r} is a table ({suffix}), which is not read; convert it to JSON lines (an object "
            "for each row) or Parquet, or name it .txt if its characters are the text"
        )
    try:
        with open_regular(file) as descriptor, open(descriptor, "rb", closefd=False) as opened:
            content = opened.read(_FIRST_LOOK_BYTES)
            if suffix in JSONL_SUFFIXES and b"\0" not in content:
                opened.seek(0)
                yield from records_of_lines(_decoded_lines(opened, file), file)
                return
            if b"\0" not in content:
                content += opened.read()
    except OSError as error:
        raise _unreadable(file, error) from error
    text = _decode(content, file)
    if suffix == JSON_SUFFIX:
        yield from records_of_json(text, file)
    else:
        yield Record(str(file), text, may_be_text=True)


def _decoded_lines(opened: Iterable[bytes], file: Path) -> Iterator[str]:
    offset = 0
    for number, line in enumerate(opened, 1):
        yield _decode(line, file, number, offset).removesuffix("\n")
        offset += len(line)


def _decode(content: bytes, file: Path, first_line: int = 1, begin: int = 0) -> str:
    """Decode a file, or its part from byte ``begin``, at the start of ``first_line``."""
    offset = content.find(b"\0")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        # The bytes examined first may end within a character; then the reason is a NUL before it.
        offset = error.start if offset < 0 else min(offset, error.start)
    if offset < 0:
        return text if begin else text.removeprefix("\ufeff")
    line = content.count(b"\n", 0, offset) + first_line
    kind = "UTF-16" if content.startswith((b"\xff\xfe", b"\xfe\xff")) else "binary"
    raise DataError(
        f"data file {str(file)!r} is not UTF-8 text but {kind}: byte 0x{content[offset]:02x} at offset "
        f"{begin + offset} (line {line}); convert or unpack it, or leave it out"
    )
