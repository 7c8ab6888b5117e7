"""Megatron's null tokenizer, whose text is numbers, for programs without a vocabulary."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.core.errors import ConfigError

__all__ = ["MegatronTokenizer", "NullTokenizer"]


class NullTokenizer:
    """A tokenizer whose text is its ids: "3 14 15".

    Args:
        vocab_size: number of ids.
        eod_id: id of the end of a document; None means the last id.
        pad_id: id of padding; -1 means no padding.
        kwargs: no effect.
    """

    library = "null-text"

    def __init__(self, vocab_size: int, eod_id: int | None = None, pad_id: int = -1, **kwargs: Any) -> None:
        self.vocab_size = int(vocab_size)
        if self.vocab_size < 1:
            raise ConfigError(f"vocab_size is {vocab_size}; it must be at least 1")
        self.eod = self.vocab_size - 1 if eod_id is None else int(eod_id)
        self.pad = self.pad_id = int(pad_id)
        # These tokens do not exist.
        self.cls = self.sep = self.mask = -1

    def tokenize(self, text: str) -> list[int]:
        """Return the numbers in a text, which are separated by spaces."""
        try:
            return [int(number) for number in text.split()]
        except ValueError as error:
            raise ConfigError(f"the null tokenizer takes numbers divided by spaces: {error}") from error

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return " ".join(map(str, ids))

    text_to_ids = tokenize
    ids_to_text = detokenize

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        """The facts that distinguish this tokenizer from others."""
        kind = type(self).__name__
        return OrderedDict({"class": kind, "vocab_size": self.vocab_size, "eod_id": self.eod, "pad_id": self.pad})


class _NullTokenizer(NullTokenizer):
    """The older class: ``vocab_size`` does not count the end of a document."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(int(vocab_size) + 1)


class MegatronTokenizer:
    """Holder of ``from_pretrained``, which makes a tokenizer."""

    def __init__(self) -> None:
        raise ConfigError("MegatronTokenizer has no constructor; call MegatronTokenizer.from_pretrained(...)")

    @staticmethod
    def from_pretrained(
        tokenizer_path: str | None = None, metadata_path: str | Mapping[str, Any] | None = None, **kwargs: Any
    ) -> NullTokenizer:
        """Make the null tokenizer.

        Args:
            tokenizer_path: no effect; only other libraries need it.
            metadata_path: ``{"library": "null-text"}``.
            kwargs: arguments of ``NullTokenizer``; ``vocab_size`` is required.

        Raises:
            ConfigError: another library, or a missing argument.
        """
        library = metadata_path.get("library") if isinstance(metadata_path, Mapping) else None
        if library != "null-text":
            raise ConfigError(
                f"MegatronTokenizer.from_pretrained was given tokenizer_path={tokenizer_path!r}, metadata_path="
                f"{metadata_path!r} and {', '.join(kwargs) or 'nothing else'}; here it makes the null tokenizer, from "
                "metadata_path={'library': 'null-text'}. For a trained one use shardwise.data.tokenizer.Tokenizer"
            )
        if "vocab_size" not in kwargs:
            raise ConfigError("the null tokenizer needs vocab_size, the number of its ids; none was given")
        return NullTokenizer(**kwargs)
