"""Limits of the tokenizer library: long texts are split into parts, and its panics become errors.

The library uses about 200 bytes per token while it encodes. A panic of its Rust code is not an ``Exception``.

The files next to a ``tokenizer.json`` declare further tokens, and which tokens are special.

They are read as in ``transformers``: ``added_tokens_decoder`` of ``tokenizer_config.json`` overrides the tokens of
``tokenizer.json``. If it is missing, ``special_tokens_map.json`` and ``added_tokens.json`` are used. Every token with a
role (``eos_token``, ``image_token``, ``extra_special_tokens``) that has not been added becomes a special token.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from shardwise.core.errors import DataError
from shardwise.core.json_text import read_json

MAX_PART_CHARS = 1 << 20
"""Maximum length of a part, in characters."""

_WINDOW_CHARS = 256
_MAX_LINES_TRIED = 64
_MAX_PLACES_TRIED = 256


def parts_of(text: str) -> Iterator[str]:
    """Yield consecutive parts of limited length, cut before a line if one begins in the second half of a part."""
    start = 0
    while len(text) - start > MAX_PART_CHARS:
        limit = start + MAX_PART_CHARS
        newline = text.rfind("\n", start + MAX_PART_CHARS // 2, limit)
        stop = limit if newline < 0 else newline + 1
        yield text[start:stop]
        start = stop
    yield text[start:]


def encodable_parts(text: str, encode: Callable[[str], list[int]], *, longest_name: int = 0) -> Iterator[str]:
    """Yield consecutive parts of limited length, whose concatenated ids are the ids of the whole text.

    Each cut is tested: the text around it must have the same ids with and without the cut. A cut is therefore not
    within a token, within the name of a special token (of at most ``longest_name``), or among the blanks that belong to
    such a token. If there is no such place in reach, as in a word of a million letters, the part ends at its limit.
    """
    reach = max(2 * longest_name, min(_WINDOW_CHARS, MAX_PART_CHARS // 4))
    start = 0
    while len(text) - start > MAX_PART_CHARS:
        limit = start + MAX_PART_CHARS
        stop = next((place for place in _places(text, start, limit) if _is_seam(text, place, reach, encode)), limit)
        yield text[start:stop]
        start = stop
    yield text[start:]


def _places(text: str, start: int, limit: int) -> Iterator[int]:
    """Yield places at which a part may end: before a line of its second half, or else near its limit."""
    middle = start + MAX_PART_CHARS // 2
    newline = limit
    for _ in range(_MAX_LINES_TRIED):
        newline = text.rfind("\n", middle, newline)
        if newline < 0:
            break
        yield newline + 1
        # A token may join a line's end with the next line's indentation, or with the blanks before it.
        yield newline
    yield from range(limit, max(middle, limit - _MAX_PLACES_TRIED), -1)


def _is_seam(text: str, place: int, reach: int, encode: Callable[[str], list[int]]) -> bool:
    left, right = text[max(0, place - reach) : place], text[place : place + reach]
    # If one side has only blanks, a token beyond the window may include them all.
    if left.isspace() or right.isspace():
        return False
    return encode(left + right) == encode(left) + encode(right)


_SHOWN_CHARS = 40


@contextmanager
def panics_as_errors(what: str) -> Iterator[None]:
    """Convert a panic of the tokenizer library to a DataError; ``what`` is an action, such as "encode a text".

    Usually a regular expression of a ``tokenizer.json`` fails on a text. What the library prints then is discarded.
    """
    try:
        with _library_output() as discard:
            try:
                yield
            except BaseException as error:
                discard(type(error).__name__ == "PanicException")
                raise
    except BaseException as error:
        # The library does not export the class.
        if type(error).__name__ != "PanicException":
            raise
        raise DataError(
            f"the tokenizer cannot {what}: its library fails ({error!s:.200}). A regular expression in tokenizer.json "
            "takes too many steps for it, or the file is damaged; use the tokenizer.json that the model was published "
            "with, or leave the text out"
        ) from error


_CAPTURE_LOCK = threading.RLock()


@contextmanager
def _library_output() -> Iterator[Callable[[bool], None]]:
    """Hold back what is written to descriptor 2 in the block, and write it afterwards unless told to discard it.

    A panic of Rust prints a message, and with ``RUST_BACKTRACE`` a long trace, before Python learns of it. Meanwhile
    lines of Python's ``sys.stderr``, such as those of other threads about slow work, reach the old descriptor at once.
    """
    with _CAPTURE_LOCK, contextlib.ExitStack() as stack:
        discarded = False

        def discard(is_panic: bool) -> None:
            nonlocal discarded
            discarded = is_panic

        try:
            before, held = os.dup(2), os.memfd_create("tokenizers")
        except (OSError, AttributeError):  # Descriptor 2 is closed, or the system is not Linux.
            yield discard
            return
        stack.callback(os.close, before)
        stack.callback(os.close, held)
        if _is_descriptor_2(sys.stderr):
            sys.stderr.flush()
            lines = os.fdopen(os.dup(before), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
            stack.enter_context(lines)
            stack.enter_context(contextlib.redirect_stderr(lines))
        os.dup2(held, 2)
        try:
            yield discard
        finally:
            os.dup2(before, 2)
            if not discarded and (size := os.lseek(held, 0, os.SEEK_CUR)):
                os.write(2, os.pread(held, size, 0))


def _is_descriptor_2(stream: object) -> bool:
    try:
        return stream.fileno() == 2  # type: ignore[attr-defined, no-any-return]
    except (AttributeError, OSError, ValueError):  # A replaced stream, such as a StringIO.
        return False


def shown(text: str) -> str:
    """Describe a text by its beginning and its length, for a message."""
    dots = "..." if len(text) > _SHOWN_CHARS else ""
    return f"the text {text[:_SHOWN_CHARS]!r}{dots} of {len(text):,} characters"


CONFIG_NAME = "tokenizer_config.json"

_DECODER = "added_tokens_decoder"
_EXTRA = ("extra_special_tokens", "additional_special_tokens")
# Names that the vocabulary lacks get new ids in this order, followed by other roles.
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FIELDS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class DeclaredTokens:
    """Tokens that the files in a tokenizer's folder declare; any of the files may be missing."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / CONFIG_NAME
        self._config = _read_object(self._path)
        self._named: dict[str, AddedToken] = {}
        self._extra: list[AddedToken] = []
        self._added: dict[str, int] = {}
        self._take_roles(self._config, self._path)
        if _DECODER not in self._config:
            path = folder / "special_tokens_map.json"
            self._take_roles(_read_object(path), path)
            path = folder / "added_tokens.json"
            for name, token_id in _read_object(path).items():
                if not isinstance(token_id, int):
                    raise _bad_token(path, name, token_id)
                self._added[name] = token_id

    @property
    def eos_token(self) -> str | None:
        """Name of the token that ends a text; None if no file declares it."""
        token = self._named.get("eos_token")
        return None if token is None else str(token.content)

    @property
    def names(self) -> dict[str, str]:
        """Name of each token with a role, such as ``bos_token``."""
        return {role: str(token.content) for role, token in self._named.items()}

    def declare_(self, backend: tokenizers.Tokenizer) -> None:
        """Add the tokens to the library's tokenizer in place; names outside its vocabulary get new ids at the end."""
        known: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        roles = {str(token.content) for token in self._named.values()}
        special = roles | {str(token.content) for token in self._extra}
        if _DECODER in self._config:
            decoder = dict(self._decoder())
        else:
            decoder = {
                token_id: AddedToken(name, normalized=name not in special, special=name in special)
                for name, token_id in self._added.items()
            } | known
        tokens = [decoder[token_id] for token_id in sorted(decoder)]
        names = {str(token.content) for token in [*known.values(), *tokens]}
        named = [self._named[role] for role in _ROLES if role in self._named]
        named += [token for role, token in self._named.items() if role not in _ROLES]
        for token in (*named, *self._extra):
            if token.content not in names:
                names.add(str(token.content))
                tokens.append(token)
        for token in tokens:
            if token.content in roles:
                token.special = True
        backend.add_tokens(tokens)

    def _take_roles(self, values: Mapping[str, Any], path: Path) -> None:
        for role, value in values.items():
            if role in _EXTRA:
                if isinstance(value, Mapping):
                    self._named |= {name: _token_of(token, path, name) for name, token in value.items()}
                elif isinstance(value, list):
                    self._extra += [_token_of(token, path, role) for token in value]
                elif value is not None:
                    raise _bad_token(path, role, value)
            elif role.endswith("_token") and isinstance(value, str | Mapping) and value:
                self._named[role] = _token_of(value, path, role)

    def _decoder(self) -> Iterator[tuple[int, AddedToken]]:
        values = self._config[_DECODER]
        if not isinstance(values, Mapping):
            raise _bad_token(self._path, _DECODER, values)
        for token_id, value in values.items():
            if not (token_id.isdecimal() and isinstance(value, Mapping)):
                raise _bad_token(self._path, f"{_DECODER} {token_id!r}", value)
            yield int(token_id[:20]), _token_of(value, self._path, f"{_DECODER} {token_id!r}", special=False)


def _token_of(value: object, path: Path, role: str, *, special: bool = True) -> AddedToken:
    """Make a token from its name, or from an object with the name as ``content`` and other options."""
    fields = value if isinstance(value, Mapping) else {"content": value}
    content = fields.get("content")
    options = {name: fields[name] for name in _FIELDS if name in fields}
    if not (isinstance(content, str) and content and all(isinstance(option, bool) for option in options.values())):
        raise _bad_token(path, role, value)
    try:
        return AddedToken(content, **({"special": special} | options))
    except (TypeError, ValueError) as error:
        # The library rejects lone surrogates.
        raise _bad_token(path, role, value) from error


def _bad_token(path: Path, role: str, value: object) -> DataError:
    return DataError(f"{str(path)!r}: {role} is {str(value)[:80]!r}, which is no token; repair or remove the entry")


def _read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file; an empty one if the file is missing."""
    try:
        return read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read {str(path)!r}: {reason}; repair or remove it") from error
