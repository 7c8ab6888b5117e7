"""A corpus as a flat array of token ids, cached on disk; rows for training, and windows for evaluation.

Samples for training may start anywhere; windows for evaluation cover the text exactly once.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.core.atomic_files import open_regular, write_atomically
from shardwise.core.errors import ConfigError, DataError
from shardwise.core.json_text import read_json
from shardwise.core.slow_work import told_if_slow
from shardwise.data.batch import IGNORE_INDEX, Row
from shardwise.data.corpus import Corpus
from shardwise.data.loader import FOR_OFFSET, Rows, random_uint64
from shardwise.data.tokenizer import Tokenizer

_CACHE_FORMAT = 3

# Encode documents in groups of about this size, to limit the tokenizer's memory.
_GROUP_CHARS = 1 << 20


@dataclass(frozen=True)
class TokenStream:
    """Token ids of a corpus: its documents in order, each followed by the end-of-text id.

    ``tokens`` is uint16, or uint32 for more than 65,536 ids; read-only, and memory-mapped if cached. ``num_bytes`` is
    the size of the text in UTF-8.
    """

    name: str
    tokens: NDArray[Any] = field(repr=False)
    eos_id: int
    num_bytes: int

    @property
    def num_tokens(self) -> int:
        """Number of ids, including end-of-text ids."""
        return len(self.tokens)

    @classmethod
    def from_corpus(
        cls,
        corpus: Corpus,
        tokenizer: Tokenizer,
        cache_dir: str | os.PathLike[str] | None = None,
        *,
        parse_special: bool = False,
    ) -> TokenStream:
        """Encode a corpus, or map the cached array of an earlier call with the same contents.

        Several processes may use one folder at once. Each process that finds no entry does all the work, so run one
        first. An entry of ``cache_dir`` (``.npy``, with a ``.json``) that does not match its description is replaced.
        """
        dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
        if cache_dir is None:
            tokens = _encode(corpus, tokenizer, dtype, parse_special)
        else:
            identity = {
                "format": _CACHE_FORMAT,
                "corpus_sha256": corpus.sha256,
                "tokenizer_sha256": tokenizer.sha256,
                "parse_special": parse_special,
            }
            key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
            path = Path(cache_dir).expanduser() / f"tokens-{key[:32]}.npy"
            cached = _map_cached(path, identity, dtype)
            if cached is None:
                tokens = _encode(corpus, tokenizer, dtype, parse_special)
                _write_cache(path, identity, tokens)
                cached = _map_cached(path, identity, dtype)
            tokens = tokens if cached is None else cached
        return cls(corpus.name, tokens, tokenizer.eos_id, corpus.num_bytes)


def _groups(documents: tuple[str, ...]) -> Iterator[list[str]]:
    group: list[str] = []
    num_chars = 0
    for document in documents:
        group.append(document)
        num_chars += len(document)
        if num_chars >= _GROUP_CHARS:
            yield group
            group, num_chars = [], 0
    if group:
        yield group


def _encode(corpus: Corpus, tokenizer: Tokenizer, dtype: np.dtype[Any], parse_special: bool) -> NDArray[Any]:
    arrays: list[NDArray[Any]] = []
    encoded_chars, num_chars = 0, sum(map(len, corpus.documents))

    def count(number: int) -> None:
        nonlocal encoded_chars
        encoded_chars += number

    with told_if_slow(f"encoding {corpus.name}", lambda: f"{encoded_chars / max(1, num_chars):.0%}"):
        for group in _groups(corpus.documents):
            encoded = tokenizer.encode_batch(group, parse_special=parse_special, on_encoded=count)
            arrays += [np.array([*tokenizer.beginning, *ids, tokenizer.eos_id], dtype=dtype) for ids in encoded]
    tokens = np.concatenate(arrays)
    tokens.setflags(write=False)
    return tokens


def _write_cache(path: Path, identity: dict[str, Any], tokens: NDArray[Any]) -> None:
    header = identity | {"dtype": tokens.dtype.name, "num_tokens": len(tokens)}
    # Write the description last, so that the array is complete if it exists.
    write_atomically(path, lambda file: np.save(file, tokens, allow_pickle=False))
    write_atomically(path.with_suffix(".json"), lambda file: file.write(json.dumps(header, indent=2).encode()))


def _map_cached(path: Path, identity: dict[str, Any], dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """Return the cached array; None if there is none, or if it does not match its description and ours."""
    try:
        header = read_json(path.with_suffix(".json"))
        with open_regular(path):
            pass  # A named pipe would keep NumPy waiting.
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        expected = identity | {"dtype": dtype.name, "num_tokens": len(tokens)}
        is_as_described = header == expected and tokens.dtype == dtype and tokens.ndim == 1
        return tokens if is_as_described else None
    except (OSError, ValueError, TypeError, EOFError):  # missing, truncated, no JSON, no array
        return None


class _StreamRows(Rows):
    """Rows of a token stream, all of one length."""

    def __init__(self, stream: TokenStream, sequence_length: int) -> None:
        if sequence_length < 1:
            raise ConfigError(f"sequence_length {sequence_length} must be at least 1")
        self.stream, self.sequence_length, self.num_bytes = stream, sequence_length, stream.num_bytes

    def __len__(self) -> int:
        return len(self.labels)

    def width(self, indices: NDArray[np.int64]) -> int:
        return self.sequence_length

    def padding(self, length: int) -> Row:
        tokens = np.full(length, self.stream.eos_id, np.int64)
        return {"tokens": tokens, "labels": np.full_like(tokens, IGNORE_INDEX)}


class TokenRows(_StreamRows):
    """A token stream cut into rows of one length without overlap, for training.

    The stream is a ring: its end, which is the end of a document, is followed by its start. A row may therefore start
    anywhere, and rows that are shifted by an ``offset`` in tokens all keep their length. Each epoch has another offset,
    so that texts are cut at different places.
    """

    def __init__(self, stream: TokenStream, sequence_length: int, offset: int = 0) -> None:
        super().__init__(stream, sequence_length)
        if stream.num_tokens < sequence_length + 1:
            raise DataError(
                f"the corpus {stream.name!r} has {stream.num_tokens} tokens, fewer than one sample of sequence_length "
                f"{sequence_length} and 1; use a sequence_length of at most {stream.num_tokens - 1}, or more text"
            )
        self.offset = offset
        self.lengths = self.labels = np.broadcast_to(np.int64(sequence_length), stream.num_tokens // sequence_length)

    def row(self, index: int, length: int | None = None) -> Row:
        """Return ``tokens [s]``, and the token after each as ``labels [s]``."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is not one of {len(self)}")
        start = (index * self.sequence_length + self.offset) % self.stream.num_tokens
        window = self.stream.tokens[start : start + self.sequence_length + 1]
        missing = self.sequence_length + 1 - len(window)
        if missing:
            window = np.concatenate([window, self.stream.tokens[:missing]])
        return {"tokens": window[:-1].astype(np.int64), "labels": window[1:].astype(np.int64)}

    def in_epoch(self, seed: int, epoch: int) -> TokenRows:
        offset = int(random_uint64(seed, epoch, FOR_OFFSET, 1)[0]) % self.sequence_length
        return TokenRows(self.stream, self.sequence_length, offset)


class WindowRows(_StreamRows):
    """Windows of a token stream in which every token is a label exactly once, for evaluation.

    The first token is predicted from an end-of-text token before it. The last window is padded with ignored labels. The
    stream may be shorter than a window.
    """

    def __init__(self, stream: TokenStream, sequence_length: int) -> None:
        super().__init__(stream, sequence_length)
        starts = np.arange(0, stream.num_tokens, sequence_length)
        self.lengths = self.labels = np.minimum(sequence_length, stream.num_tokens - starts)

    def row(self, index: int, length: int | None = None) -> Row:
        """Return ``tokens [s]``, and the token after each as ``labels [s]``."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} is not one of {len(self)}")
        row, start = self.padding(self.sequence_length), index * self.sequence_length
        targets = self.stream.tokens[start : start + self.sequence_length]
        row["labels"][: len(targets)] = targets
        row["tokens"][1 : len(targets)] = targets[:-1]
        if index > 0:
            row["tokens"][0] = self.stream.tokens[start - 1]
        return row
