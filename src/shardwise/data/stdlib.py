"""The machine's own Python standard library as a corpus: real text on every machine, with no download."""

import io
import platform
import sysconfig
import tokenize
from pathlib import Path

from shardwise.core.errors import DataError
from shardwise.data.corpus import Corpus, text_size

# Tests are left out as data about data. The others are not the standard library (installed packages, pip's wheels), or
# were written when this Python was built and name its machine's folders (config-3.x).
_LEFT_OUT_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "ensurepip", "lib-dynload"}
)
_LEFT_OUT_PREFIXES = ("config-", "_sysconfigdata")

# A whole standard library has about 700 files. Far fewer means that it was stripped, zipped or is installed in parts.
_MIN_FILES = 100


def stdlib_corpus(folder: Path | None = None) -> Corpus:
    """The source files of the standard library, one document each, in the order of their paths.

    A file that cannot be decoded as its own header says is no Python source and is left out; CPython has none but in
    its tests.

    Args:
        folder: the library's folder; that of this Python if None.

    Returns:
        About 700 documents and 12 MB, named for instance "CPython 3.11.7 standard library, 728 files, 12.0 MB".

    Raises:
        DataError: the sources are not there (a zipped or stripped Python), or cannot be read.
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
    """The text by the encoding that the source declares (UTF-8 if none), line ends as they are; None if undecodable."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return content.decode(encoding)
    except (SyntaxError, UnicodeDecodeError):
        return None
