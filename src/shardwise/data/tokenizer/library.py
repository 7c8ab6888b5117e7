"""Limits of the tokenizer library: it gets long texts in parts, and its panics become errors.

It holds some 200 bytes per token while it encodes. A panic of its Rust code is no ``Exception``.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardwise.core.errors import DataError

MAX_PART_CHARS = 1 << 20
"""Longest part."""

_WINDOW_CHARS = 256
_MAX_LINES_TRIED = 64
_MAX_PLACES_TRIED = 256


def parts_of(text: str) -> Iterator[str]:
    """Consecutive parts of bounded length, cut before a line where there is one in the second half of a part."""
    start = 0
    while len(text) - start > MAX_PART_CHARS:
        limit = start + MAX_PART_CHARS
        newline = text.rfind("\n", start + MAX_PART_CHARS // 2, limit)
        stop = limit if newline < 0 else newline + 1
        yield text[start:stop]
        start = stop
    yield text[start:]


def encodable_parts(text: str, encode: Callable[[str], list[int]], *, longest_name: int = 0) -> Iterator[str]:
    """Consecutive parts of bounded length, whose ids one after the other are those of the whole text.

    A cut is tried out: the text around it must become the same ids with and without it. So none falls within a word
    that is one token, within the name of a special token, or among the blanks that such a token takes with it. Where no
    place in reach is good, such as in a word of a million letters, the part just ends.

    Args:
        text: a text of any length.
        encode: the ids of a text by themselves.
        longest_name: characters of the longest name of a token that is looked for in the text.
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
    """Where a part that begins at ``start`` may end: before a line of its second half, or else near its limit."""
    middle = start + MAX_PART_CHARS // 2
    newline = limit
    for _ in range(_MAX_LINES_TRIED):
        newline = text.rfind("\n", middle, newline)
        if newline < 0:
            break
        yield newline + 1
        # Some tokenizers join a line's end with the next line's indentation in one token, others with the blanks before
        # it.
        yield newline
    yield from range(limit, max(middle, limit - _MAX_PLACES_TRIED), -1)


def _is_seam(text: str, place: int, reach: int, encode: Callable[[str], list[int]]) -> bool:
    left, right = text[max(0, place - reach) : place], text[place : place + reach]
    # If one side is nothing but blanks, a token beyond the window may take them all.
    if left.isspace() or right.isspace():
        return False
    return encode(left + right) == encode(left) + encode(right)


_SHOWN_CHARS = 40


@contextmanager
def panics_as_errors(what: str) -> Iterator[None]:
    """Within, a panic of the tokenizer library is a DataError.

    Args:
        what: what the tokenizer does there, such as "encode a text".

    Raises:
        DataError: the library panics: most often a regular expression of a ``tokenizer.json`` gives up on a text.
    """
    try:
        yield
    except BaseException as error:
        # The library offers no other way to its class.
        if type(error).__name__ != "PanicException":
            raise
        raise DataError(
            f"the tokenizer cannot {what}: its library fails ({error!s:.200}). A regular expression in tokenizer.json "
            "takes too many steps for it, or the file is damaged; use the tokenizer.json that the model was published "
            "with, or leave the text out"
        ) from error


def shown(text: str) -> str:
    """A text by its beginning and its length, for a message."""
    dots = "..." if len(text) > _SHOWN_CHARS else ""
    return f"the text {text[:_SHOWN_CHARS]!r}{dots} of {len(text):,} characters"
