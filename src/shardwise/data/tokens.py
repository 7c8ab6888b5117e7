"""A corpus as one flat array of token ids, cached on disk."""

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

from shardwise.core.files import open_regular, write_atomically
from shardwise.core.json_files import read_json
from shardwise.data.corpus import Corpus
from shardwise.data.tokenizer import Tokenizer

_CACHE_FORMAT = 3

# Documents are encoded in groups of about this size, which bounds the tokenizer's memory.
_GROUP_CHARS = 1 << 20


@dataclass(frozen=True)
class TokenStream:
    """The token ids of a corpus, one document after the other, each followed by the end-of-text id.

    Attributes:
        name: the corpus's name.
        tokens: ``[num_tokens]`` of uint16, or uint32 for a vocabulary of more than 65,536; read-only, and mapped from
            disk where it was cached.
        eos_id: the id behind each document.
        num_bytes: size of the corpus's text in UTF-8, in bytes.
    """

    name: str
    tokens: NDArray[Any] = field(repr=False)
    eos_id: int
    num_bytes: int

    @property
    def num_tokens(self) -> int:
        """Number of ids, the end-of-text ids included."""
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
        """Encode a corpus, or map what an earlier call with the same contents wrote.

        Several processes may call this at once with one folder. Each that finds nothing there does the whole work, so
        let one go first.

        Args:
            corpus: the documents.
            tokenizer: encodes them.
            cache_dir: folder for arrays (``.npy``) and their descriptions (``.json``), made if missing; nothing is
                cached if None. An entry that is not as described is written anew.
            parse_special: read the names of special tokens in the documents as these tokens; see ``Tokenizer.encode``.

        Raises:
            ConfigError: ``cache_dir`` cannot be written to.
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
    arrays = [
        np.array([*tokenizer.beginning, *ids, tokenizer.eos_id], dtype=dtype)
        for group in _groups(corpus.documents)
        for ids in tokenizer.encode_batch(group, parse_special=parse_special)
    ]
    tokens = np.concatenate(arrays)
    tokens.setflags(write=False)
    return tokens


def _write_cache(path: Path, identity: dict[str, Any], tokens: NDArray[Any]) -> None:
    header = identity | {"dtype": tokens.dtype.name, "num_tokens": len(tokens)}
    # The description is written last, so that its array is complete wherever it exists.
    write_atomically(path, lambda file: np.save(file, tokens, allow_pickle=False))
    write_atomically(path.with_suffix(".json"), lambda file: file.write(json.dumps(header, indent=2).encode()))


def _map_cached(path: Path, identity: dict[str, Any], dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """The cached array; None if there is none, or it is not what its description and ours say."""
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
