"""Panics of the tokenizer library's Rust code, which are no ``Exception``, as errors."""

from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.core.errors import DataError

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
