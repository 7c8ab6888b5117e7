"""Text from tokens as they come."""

from collections.abc import Sequence

from shardwise.data.tokenizer.tokenizer import Tokenizer

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"

# A window long enough that its start, which may lie within a character, does not matter; decoding every token again
# for each new one would take time that grows with the square of the text.
_MAX_WINDOW = 64
_KEPT = 8


class TextStream:
    """Decodes tokens one by one, and gives each character when all of its bytes are there.

    A character may be spread over several tokens. Bytes that no further token can complete come out as U+FFFD, as when
    all tokens are decoded at once: the pieces always join to the same text.

    Args:
        tokenizer: decodes.
        prompt_ids: tokens before the first new one, on which a tokenizer may let the text of it depend.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt_ids[-_KEPT:])
        self._num_given = len(tokenizer.decode(self._window))

    def push(self, token: int) -> str:
        """Add a token.

        Returns:
            The characters that are now certain; often none or several.
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
        """The remaining text, with U+FFFD for a character that stays unfinished."""
        piece = self._tokenizer.decode(self._window)[self._num_given :]
        self._num_given += len(piece)
        return piece
