"""Decode a stream of tokens to text."""

from collections.abc import Sequence

from shardwise.data.tokenizer.tokenizer import Tokenizer

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"

# Decode only a window, because decoding all tokens for each new one takes quadratic time.
_MAX_WINDOW = 64
_KEPT = 8
_LONGEST_CHARACTER = 4


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
        self._window = self._last_of(list(prompt_ids[-_MAX_WINDOW:]))
        self._num_given = len(tokenizer.decode(self._window))

    def push(self, token: int) -> str:
        """Add a token; return the new characters that are complete, often none or several."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        certain = text.rstrip(_UNFINISHED)
        piece = certain[self._num_given :]
        self._num_given = max(self._num_given, len(certain))
        if len(self._window) > _MAX_WINDOW and certain == text:
            self._window = self._last_of(self._window)
            self._num_given = len(self._tokenizer.decode(self._window))
        return piece

    def _last_of(self, tokens: list[int]) -> list[int]:
        """Return the last tokens, from the beginning of a character.

        A tokenizer whose tokens are bytes decodes a run of them to U+FFFD, all of it, if its first character lacks a
        byte. The last character may lack some, too, which the next tokens bring.
        """
        first = max(len(tokens) - _KEPT, 0)
        for stop in range(len(tokens), max(len(tokens) - _LONGEST_CHARACTER, 0), -1):
            for start in range(first, -1, -1):
                if not self._tokenizer.decode(tokens[start:stop]).startswith(_UNFINISHED):
                    return tokens[start:]
        return tokens[first:]

    def finish(self) -> str:
        """Return the remaining text, with U+FFFD for an incomplete character."""
        piece = self._tokenizer.decode(self._window)[self._num_given :]
        self._num_given += len(piece)
        return piece


class StoppableText:
    """Decodes tokens one by one, up to the first of some stop strings, which is cut off.

    Text that may begin a stop string is held back, so the pieces never contain a part of one that comes.

    Args:
        tokenizer, prompt_ids: see ``TextStream``.
        stops: strings that end the text; none of them is empty.

    Attributes:
        text: all pieces so far.
        is_stopped: True after a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), stops: Sequence[str] = ()) -> None:
        self._stream, self._stops, self._held = TextStream(tokenizer, prompt_ids), stops, ""
        self.text, self.is_stopped = "", False

    def push(self, token: int) -> str:
        """Add a token; return the new piece, which may be empty."""
        return self._piece(self._stream.push(token), is_last=False)

    def finish(self) -> str:
        """Return the remaining text, with U+FFFD for an incomplete character."""
        return self._piece(self._stream.finish(), is_last=True)

    def _piece(self, added: str, *, is_last: bool) -> str:
        if self.is_stopped:
            return ""
        known = self._held + added
        places = [place for stop in self._stops if (place := known.find(stop)) >= 0]
        self.is_stopped = bool(places)
        size = min(places, default=len(known))
        if not places and not is_last:
            # The longest end that begins a stop string.
            size = min(
                (start for start in range(len(known)) if any(stop.startswith(known[start:]) for stop in self._stops)),
                default=size,
            )
        piece, self._held = known[:size], known[size:]
        self.text += piece
        return piece
