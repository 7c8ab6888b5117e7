"""Decode a stream of tokens to text."""

from collections.abc import Sequence

from shardwise.data.tokenizer.tokenizer import Tokenizer

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"

# Decode only a window, because decoding all tokens for each new one takes quadratic time. The window is so long that
# its start, which may lie within a character, does not matter.
_MAX_WINDOW = 64
_KEPT = 8


class TextStream:
    """Decodes tokens one by one, and returns each character when all of its bytes have arrived.

    A character may consist of several tokens. Bytes that no further token can complete become U+FFFD, as when all
    tokens are decoded at once: the pieces always join to the same text.

    Args:
        tokenizer: tokenizer that decodes.
        prompt_ids: tokens before the first new token, whose text may depend on them.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt_ids[-_KEPT:])
        self._num_given = len(tokenizer.decode(self._window))

    def push(self, token: int) -> str:
        """Add a token.

        Returns:
            The new characters that are complete; often none or several.
        """
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        certain = text.rstrip(_UNFINISHED)
        piece = certain[self._num_given :]
        self._num_given = max(self._num_given, len(certain))
        if len(self._window) > _MAX_WINDOW and certain == text:
            self._window = self._window[-_KEPT:]
            self._num_given = len(self._tokenizer.decode(self._window))
        return piece

    def finish(self) -> str:
        """Return the remaining text, with U+FFFD for an incomplete character."""
        piece = self._tokenizer.decode(self._window)[self._num_given :]
        self._num_given += len(piece)
        return piece
