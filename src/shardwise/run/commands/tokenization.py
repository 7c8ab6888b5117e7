"""Token files from texts, in several processes: parts that are joined at the end, so that an ended command goes on."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing.connection import wait
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.core.atomic_files import write_atomically
from shardwise.core.errors import ConfigError, DataError, LaunchError
from shardwise.core.folder_lock import FolderLock
from shardwise.core.json_text import read_json
from shardwise.data.indexed import IndexedTokens, IndexedWriter, prefix_of
from shardwise.data.json_records import digest_of, text_of
from shardwise.data.reading import files_of, records_of
from shardwise.data.tokenizer import Tokenizer

# Texts of about this many characters go to a process at once.
_GROUP_CHARS = 1 << 20
# A part is written after this many tokens: what an ended command loses.
_PART_TOKENS = 1 << 26
# Megatron's limit of uint16, below which all ids of a vocabulary are.
_UINT16_IDS = 65_500
# File that identifies the call that wrote the parts.
_JOB = "job.json"

_tokenizer: Tokenizer | None = None
_Encoded = tuple[NDArray[Any], list[int]]


@dataclass(frozen=True)
class Tokenized:
    """Result of ``tokenize``.

    Attributes:
        index: the ``.idx`` file.
        num_documents, num_tokens: numbers of documents and tokens in it.
        num_resumed: documents of an earlier call that was ended.
    """

    index: Path
    num_documents: int
    num_tokens: int
    num_resumed: int


@dataclass
class _Group:
    """Texts for a process, and the bytes of all files up to their end."""

    texts: list[str]
    position: int


def tokenize(
    data: str | PathLike[str] | Sequence[str | PathLike[str]],
    tokenizer: str | PathLike[str],
    *,
    out: str | PathLike[str],
    text_key: str = "text",
    special_tokens: bool = False,
    workers: int | None = None,
    on_progress: Callable[[int, int, int], None] | None = None,
) -> Tokenized:
    """Write the documents of files and folders as a pair of token files, each with the end-of-text token after it.

    The files are read by ``shardwise train --data OUT.idx`` and by Megatron. A call that was ended goes on where it
    was if it is repeated. With several workers, a script needs ``if __name__ == "__main__"`` around the call.

    Args:
        data: files and folders of text, JSON lines, JSON arrays, Parquet or Arrow.
        tokenizer: tokenizer.json, or its folder.
        out: name of both files, without ``.bin`` and ``.idx``.
        text_key: field of a JSON record that holds the text.
        special_tokens: parse the names of special tokens in the text as these tokens.
        workers: number of processes; None for one on each processor.
        on_progress: callback, given the bytes of the files that are done, those of all files, and the tokens.

    Returns:
        Numbers of documents and tokens.

    Raises:
        ConfigError: the files exist, or parts of another call are in their place.
        DataError: a file cannot be read, or there is no text.
        LaunchError: a process ended.
    """
    paths = [data] if isinstance(data, str | PathLike) else list(data)
    prefix = prefix_of(out).absolute()
    bin_path, idx_path, folder = (prefix.with_name(prefix.name + end) for end in (".bin", ".idx", ".parts"))
    # A call that is ended at its last moment leaves its parts too.
    if (found := next((path for path in (idx_path, bin_path) if path.exists()), None)) and not (folder / _JOB).exists():
        raise ConfigError(f"{str(found)!r} exists; remove it, or choose another --out")
    files = list(dict.fromkeys(file for each in paths for file in files_of(Path(each).expanduser())))
    loaded = Tokenizer.load(tokenizer)
    dtype = np.dtype(np.uint16 if loaded.vocab_size < _UINT16_IDS else np.int32)
    with FolderLock(folder):
        _check_job(folder, _job(files, loaded, text_key, special_tokens))
        parts = sorted(path.with_suffix("") for path in folder.glob("part-*.idx"))
        resumed = sum(len(IndexedTokens(part)) for part in parts)
        groups = _groups(islice(_texts(files, text_key), resumed, None))
        with _Encoders(loaded, special_tokens, dtype, workers or len(os.sched_getaffinity(0))) as encoders:
            parts += _write_parts(folder, len(parts), dtype, encoders.encoded(groups), files, on_progress)
        if not parts:
            raise DataError(f"there is no text in {', '.join(map(str, paths))}; give files with text")
        documents = _join(parts, bin_path, idx_path, dtype)
        num_tokens = sum(IndexedTokens(part).num_tokens for part in parts)
        for path in (folder / _JOB, *folder.glob("part-*.bin"), *folder.glob("part-*.idx")):
            path.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()
    return Tokenized(idx_path, documents, num_tokens, resumed)


def _write_parts(
    folder: Path,
    number: int,
    dtype: np.dtype[Any],
    encoded: Iterator[tuple[_Group, _Encoded]],
    files: Sequence[Path],
    on_progress: Callable[[int, int, int], None] | None,
) -> list[Path]:
    """Write encoded texts as parts, from part ``number``."""
    total, tokens = sum(file.stat().st_size for file in files), 0
    parts: list[Path] = []
    groups = iter(encoded)
    for first in groups:
        part, written = folder / f"part-{number + len(parts):06}", 0
        with IndexedWriter(f"{part}.bin", dtype) as writer:
            for group, (ids, lengths) in chain([first], groups):
                writer.add_documents(ids, lengths)
                written, tokens = written + len(ids), tokens + len(ids)
                if on_progress is not None:
                    on_progress(group.position, total, tokens)
                if written >= _PART_TOKENS:
                    break
            writer.finish(f"{part}.idx")
        parts.append(part)
    return parts


def _job(files: Sequence[Path], tokenizer: Tokenizer, text_key: str, special_tokens: bool) -> dict[str, Any]:
    """Return what the content of the result depends on."""
    stats = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    return {
        "files": digest_of(stats),
        "tokenizer": tokenizer.sha256,
        "text_key": text_key,
        "special_tokens": special_tokens,
    }


def _check_job(folder: Path, job: dict[str, Any]) -> None:
    path = folder / _JOB
    try:
        found = read_json(path)
    except FileNotFoundError:
        # The lock's file begins with a dot, and so do files of killed calls.
        if foreign := sorted(each.name for each in folder.iterdir() if each.name[0] != "."):
            raise ConfigError(
                f"{str(folder)!r} is for the parts of this call, and has {foreign[0]!r}, which no call put there; move "
                "it away, or choose another --out"
            ) from None
        write_atomically(path, lambda file: file.write(json.dumps(job).encode()))
        return
    except (OSError, ValueError):
        found = {}
    changed = [name for name, value in job.items() if found.get(name) != value]
    if changed:
        raise ConfigError(
            f"{str(folder)!r} has parts of a call with other {' and '.join(changed)}; remove it to start anew, or "
            "choose another --out"
        )


def _texts(files: Sequence[Path], text_key: str) -> Iterator[tuple[str, int]]:
    """Yield each text that is not empty, and the bytes of all files up to it; of a table, estimated from its texts."""
    before = 0
    for file in files:
        size, done = file.stat().st_size, 0
        for record in records_of(file):
            if text := text_of(record, text_key):
                done += len(text)
                yield text, before + min(done, size)
        before += size


def _groups(texts: Iterator[tuple[str, int]]) -> Iterator[_Group]:
    group, chars = _Group([], 0), 0
    for text, position in texts:
        group.texts.append(text)
        group.position, chars = position, chars + len(text)
        if chars >= _GROUP_CHARS:
            yield group
            group, chars = _Group([], 0), 0
    if group.texts:
        yield group


class _Encoders:
    """Processes that encode texts; with one worker, this process."""

    def __init__(self, tokenizer: Tokenizer, special_tokens: bool, dtype: np.dtype[Any], count: int) -> None:
        self._arguments, self._count = (special_tokens, dtype), count
        self._pool = None
        if count == 1:
            _begin(tokenizer)
        else:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(count, context, initializer=_begin_process, initargs=(tokenizer,))

    def __enter__(self) -> _Encoders:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def encoded(self, groups: Iterator[_Group]) -> Iterator[tuple[_Group, _Encoded]]:
        """Yield each group with its tokens and the length of each text, in order."""
        if self._pool is None:
            yield from ((group, _encode(group.texts, *self._arguments)) for group in groups)
            return
        waiting: deque[tuple[_Group, Future[_Encoded]]] = deque()
        try:
            for group in groups:
                waiting.append((group, self._pool.submit(_encode, group.texts, *self._arguments)))
                if len(waiting) > 2 * self._count:
                    first, future = waiting.popleft()
                    yield first, future.result()
            for first, future in waiting:
                yield first, future.result()
        except BrokenProcessPool as error:
            raise LaunchError(
                "a process that encodes texts ended, perhaps for lack of memory; run the same command again to go on, "
                "with fewer --workers"
            ) from error


def _begin_process(tokenizer: Tokenizer) -> None:
    # The first process ends on the signal, and this one with it, even if that is killed.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    _begin(tokenizer)


def _begin(tokenizer: Tokenizer) -> None:
    global _tokenizer
    _tokenizer = tokenizer


def _encode(texts: list[str], special_tokens: bool, dtype: np.dtype[Any]) -> _Encoded:
    assert _tokenizer is not None
    own, end = [*_tokenizer.beginning], [_tokenizer.eos_id]
    documents = [own + ids + end for ids in _tokenizer.encode_batch(texts, parse_special=special_tokens)]
    return np.concatenate([np.array(ids, dtype) for ids in documents]), [len(ids) for ids in documents]


def _join(parts: Sequence[Path], bin_path: Path, idx_path: Path, dtype: np.dtype[Any]) -> int:
    """Join finished parts as one pair of files, and return the number of documents."""
    partial = parts[0].with_name("all.bin")
    with IndexedWriter(partial, dtype) as writer:
        for part in parts:
            writer.append(part)
        documents = writer.num_documents
        # The index comes last: without it there is no pair.
        os.replace(partial, bin_path)
        writer.finish(idx_path)
    return documents
