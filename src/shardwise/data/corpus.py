"""A corpus of text documents, with size and hash, which can be split into a training part and a held-out part.

The Python standard library serves as a corpus of real text on every machine, with no download.
"""

from __future__ import annotations

import hashlib
import io
import platform
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.core.errors import ConfigError, DataError


def text_size(texts: Iterable[str]) -> str:
    """Return the human-readable size of texts in UTF-8.

    >>> text_size(["x" * 12_108_092]), text_size(["x" * 1000, "y" * 500]), text_size(["1234567"])
    ('12.1 MB', '1.5 kB', '7 B')
    """
    num_bytes = sum(len(text.encode()) for text in texts)
    for size, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"


# A cut moves back to the start of a line, by at most this many bytes or the length of the tail.
_MAX_LINE_BYTES = 1000


@dataclass(frozen=True)
class Corpus:
    """Text documents in memory, without empty documents.

    ``num_bytes`` is their size in UTF-8, ``sha256`` the digest of the documents and their order. The name has the size,
    and does not depend on the location of the files.
    """

    name: str
    documents: tuple[str, ...] = field(repr=False)
    num_bytes: int = field(init=False)
    sha256: str = field(init=False)

    def __post_init__(self) -> None:
        documents = tuple(document for document in self.documents if document)
        if not documents:
            raise DataError(f"the corpus {self.name!r} has no text; give at least one document that is not empty")
        digest = hashlib.sha256()
        num_bytes = 0
        for number, document in enumerate(documents):
            try:
                content = document.encode()
            except UnicodeEncodeError as error:
                raise DataError(
                    f"document {number} of the corpus {self.name!r} has a lone surrogate at character {error.start}, "
                    f"which is no text; remove it"
                ) from error
            # Hashing the length first distinguishes ("ab", "c") from ("a", "bc").
            digest.update(len(content).to_bytes(8, "little"))
            digest.update(content)
            num_bytes += len(content)
        object.__setattr__(self, "documents", documents)
        object.__setattr__(self, "num_bytes", num_bytes)
        object.__setattr__(self, "sha256", digest.hexdigest())

    @property
    def digests(self) -> Iterator[str]:
        """Hex SHA-256 of each document."""
        return (hashlib.sha256(document.encode()).hexdigest() for document in self.documents)

    def to_bytes(self) -> bytes:
        """Concatenate all documents in UTF-8 without separators, as input for a compressor."""
        return b"".join(document.encode() for document in self.documents)

    def split(
        self, *, held_out_fraction: float | None = None, held_out_bytes: int | None = None, seed: int = 0
    ) -> tuple[Corpus, Corpus]:
        """Split the corpus into a training part and a held-out part.

        Whole documents are held out in the order of a hash of the seed and their text. The split is therefore
        independent of their names and order, and equal documents stay in one part. The last document is cut if it is
        too large: its tail is held out, from the start of a line, or of a word in very long lines. So one file can be
        split.

        Args:
            held_out_fraction: fraction of the bytes to hold out, between 0 and 1. Give this or ``held_out_bytes``.
            held_out_bytes: minimum number of bytes to hold out; slightly more are held out to cut between lines.
            seed: seed of the hash that orders the documents.

        Returns:
            The training part and the held-out part, both not empty, with the documents in their original order.

        Raises:
            ConfigError: not exactly one of the two sizes is given, or the fraction is not between 0 and 1.
            DataError: the corpus is too small to be split.
        """
        target = self._held_out_target(held_out_fraction, held_out_bytes)
        kept = list(self.documents)
        held_out = [""] * len(kept)
        remaining = target
        for same in self._equal_documents(seed):
            if remaining <= 0:
                break
            document = self.documents[same[0]]
            size = len(document.encode())
            head, tail = "", document
            if size * len(same) > remaining:
                head, tail = _cut_tail(document, -(-remaining // len(same)))
            for index in same:
                kept[index], held_out[index] = head, tail
            remaining -= len(tail.encode()) * len(same)
        if not any(kept):
            if len(set(self.documents)) == 1 < len(self.documents):
                raise DataError(
                    f"all {len(self.documents)} documents of the corpus {self.name!r} are equal, and equal documents "
                    "are held out together; give different texts"
                )
            raise DataError(
                f"the corpus {self.name!r} of {self.num_bytes} bytes is too small to hold out {target} bytes and to "
                f"keep some to learn from; give more text or hold out less"
            )
        return self._part("training", kept), self._part("held out", held_out)

    def _held_out_target(self, fraction: float | None, num_bytes: int | None) -> int:
        if (fraction is None) == (num_bytes is None):
            raise ConfigError(
                f"give either held_out_fraction or held_out_bytes, not {fraction!r} and {num_bytes!r}: one of them"
            )
        if fraction is not None:
            if not 0 < fraction < 1:
                raise ConfigError(f"held_out_fraction {fraction} must be more than 0 and less than 1")
            return max(1, round(fraction * self.num_bytes))
        assert num_bytes is not None
        if num_bytes < 1:
            raise ConfigError(f"held_out_bytes {num_bytes} must be at least 1")
        return num_bytes

    def _equal_documents(self, seed: int) -> list[list[int]]:
        """Group the indices of equal documents, in the order in which they are held out."""
        groups: dict[bytes, list[int]] = {}
        for index, document in enumerate(self.documents):
            groups.setdefault(hashlib.sha256(f"{seed}:{document}".encode()).digest(), []).append(index)
        return [groups[digest] for digest in sorted(groups)]

    def _part(self, what: str, documents: Iterable[str]) -> Corpus:
        texts = tuple(document for document in documents if document)
        return Corpus(f"{self.name} ({what}: {text_size(texts)})", texts)


def _cut_tail(document: str, num_bytes: int) -> tuple[str, str]:
    """Split off a tail of at least ``num_bytes``, at the start of a line, or else a word, if one is near."""
    content = document.encode()
    latest = len(content) - num_bytes
    earliest = max(1, latest - max(num_bytes, _MAX_LINE_BYTES))
    for separator in (b"\n", b" "):
        # The separator belongs to the head.
        found = content.rfind(separator, earliest - 1, latest)
        if found >= 0:
            return content[: found + 1].decode(), content[found + 1 :].decode()
    # No boundary is near: cut at the start of a character.
    while content[latest] & 0xC0 == 0x80:
        latest -= 1
    return content[:latest].decode(), content[latest:].decode()


# Tests are mostly data. The other folders are not part of the standard library (installed packages, pip's wheels) or
# were generated by the build and have paths of the build machine (config-3.x).
_LEFT_OUT_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "ensurepip", "lib-dynload"}
)
_LEFT_OUT_PREFIXES = ("config-", "_sysconfigdata")

# A complete standard library has about 700 files. Far fewer mean a stripped, zipped or partial installation.
_MIN_FILES = 100


def stdlib_corpus(folder: Path | None = None) -> Corpus:
    """The source files of the standard library, one document each, in the order of their paths: about 12 MB.

    A file that cannot be decoded with its declared encoding is skipped; CPython has such files only in its tests.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    documents = []
    for file in sorted(root.rglob("*.py"), key=lambda file: file.relative_to(root).parts):
        parts = file.relative_to(root).parts
        if not _LEFT_OUT_FOLDERS.isdisjoint(parts) or any(part.startswith(_LEFT_OUT_PREFIXES) for part in parts):
            continue
        try:
            content = file.read_bytes()
        except OSError as error:
            raise DataError(
                f"cannot read the standard library's {str(file)!r}: {error.strerror or error}; name other data"
            ) from error
        text = _decode_source(content)
        if text:
            documents.append(text)
    python = f"{platform.python_implementation()} {platform.python_version()}"
    if len(documents) < _MIN_FILES:
        raise DataError(
            f"the sources of {python}'s standard library are not in {str(root)!r}: {len(documents)} files, fewer than "
            f"{_MIN_FILES}; use a Python that has them, or name other data"
        )
    size = text_size(documents)
    return Corpus(f"{python} standard library, {len(documents)} files, {size}", tuple(documents))


def _decode_source(content: bytes) -> str | None:
    """Decode a source with its declared encoding (default UTF-8), line ends unchanged; None if this fails."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return content.decode(encoding)
    except (SyntaxError, UnicodeDecodeError):
        return None
