"""The tokenizer: train, load, cache and save.

A trained tokenizer is a byte-level BPE of the ``tokenizers`` library. Every byte is a token, so every text survives a
round trip exactly, and no text is out of vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from shardwise.core.atomic_files import read_regular, write_atomically
from shardwise.core.errors import ConfigError, DataError, VocabularyError
from shardwise.core.json_text import read_json
from shardwise.core.slow_work import told_if_slow
from shardwise.data.tokenizer import library
from shardwise.data.tokenizer.growth import check_growth
from shardwise.data.tokenizer.library import CONFIG_NAME, DeclaredTokens, panics_as_errors, shown

END_OF_TEXT = "<|endoftext|>"

# Names to try in order if no file states the end-of-text token.
_USUAL_END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]")

# The longest spans of a token, chosen for source code. An identifier is one piece, with at most one blank and one sign
# before it (" self", ".join", "(_name"). A line's end is one piece with the signs before it and the next line's
# indentation ("):\n        "). Every run is bounded, because merges within a piece of a megabyte would take hours.
_SIGN = r"[^\s\p{L}\p{M}\p{N}_]"
_PIECE_PATTERN = "|".join(
    (
        rf" ?{_SIGN}?[\p{{L}}\p{{M}}_][\p{{L}}\p{{M}}\p{{N}}_]{{0,63}}",
        r"\p{N}{1,3}",
        rf" ?{_SIGN}{{1,64}}(?:[\r\n]{{1,64}}[ \t]{{0,64}})?",
        r"\s{0,64}[\r\n]{1,64}[ \t]{0,64}",
        r"\s{1,64}",
    )
)

# Maximum size of a tokenizer.json; the largest published vocabularies have 35 MB.
_MAX_BYTES = 200_000_000

_CACHE_FORMAT = 1
# Parts of a long text that are encoded at once; a part takes about a second.
_LONG_PARTS = 4


class TextSource(Protocol):
    """The members of a corpus that ``Tokenizer.train_cached`` reads."""

    @property
    def documents(self) -> Sequence[str]:
        """The texts."""

    @property
    def sha256(self) -> str:
        """Hex digest of the contents."""


def _write_text(path: Path, text: str) -> None:
    write_atomically(path, lambda file: file.write(text.encode()))


def _use_one_thread() -> None:
    """Limit the library to one thread, unless ``TOKENIZERS_PARALLELISM`` is set.

    Its threads do not survive a fork: a forked child warns or hangs, depending on the version. Also, ranks share cores.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _check_special_tokens(special_tokens: Sequence[str], vocab_size: int) -> None:
    if isinstance(special_tokens, str) or not special_tokens or not all(special_tokens):
        raise ConfigError(f"special_tokens must be non-empty strings (the first one ends a text): {special_tokens!r}")
    if len(set(special_tokens)) < len(special_tokens):
        raise ConfigError(f"special_tokens must differ from each other: {list(special_tokens)}")
    minimum = 256 + len(special_tokens)
    if vocab_size < minimum:
        raise ConfigError(
            f"vocab_size {vocab_size} is too small: every byte and each of {len(special_tokens)} special token(s) "
            f"needs an id; use at least {minimum}"
        )


class Tokenizer:
    """A tokenizer of the ``tokenizers`` library with an end-of-text token.

    Unless ``parse_special`` is set, the name of a special token in a text is encoded like any other characters, so that
    a document cannot end itself.

    The library runs on one thread, at about 6 MB of text per second, unless the environment has
    ``TOKENIZERS_PARALLELISM=true``. If that is not set, it becomes ``false``, because threads do not survive a fork.

    Args:
        backend: tokenizer of the library; its padding, truncation and handling of special tokens are changed.
        eos_token: special token that ends a text.

    Raises:
        DataError: the tokenizer does not have that token.
    """

    def __init__(self, backend: tokenizers.Tokenizer, eos_token: str = END_OF_TEXT) -> None:
        eos_id = backend.token_to_id(eos_token)
        if eos_id is None:
            raise DataError(f"the tokenizer has no end-of-text token {eos_token!r}; name the one that it has")
        _use_one_thread()
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True
        self._backend = backend
        self.eos_token = eos_token
        self.eos_id: int = eos_id

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        # The library's own pickle loses encode_special_tokens.
        return Tokenizer._from_json, (self._backend.to_str(), self.eos_token)

    @classmethod
    def _from_json(cls, text: str, eos_token: str) -> Tokenizer:
        return cls(tokenizers.Tokenizer.from_str(text), eos_token)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = (END_OF_TEXT,)) -> Tokenizer:
        """Train a byte-level BPE. The same texts give the same tokenizer, on any number of threads.

        Args:
            texts: training texts; long texts are read in parts.
            vocab_size: maximum number of ids, including special tokens; texts with few merges give fewer.
            special_tokens: names of special tokens, which get the first ids; the first one ends a text.

        Raises:
            ConfigError: ``vocab_size`` is less than 256 plus the number of special tokens, or names are not distinct.
        """
        _check_special_tokens(special_tokens, vocab_size)
        _use_one_thread()
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_PIECE_PATTERN), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(special_tokens),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        read = 0

        def parts() -> Iterator[str]:
            nonlocal read
            for text in texts:
                for part in library.parts_of(text):
                    read += len(part)
                    yield part

        with told_if_slow(f"training a tokenizer of {vocab_size:,} tokens", lambda: f"{read / 1e6:,.1f} M characters"):
            backend.train_from_iterator(parts(), trainer)
        return cls(backend, special_tokens[0])

    @classmethod
    def train_cached(
        cls,
        corpus: TextSource,
        vocab_size: int,
        cache_dir: str | os.PathLike[str],
        special_tokens: Sequence[str] = (END_OF_TEXT,),
    ) -> Tokenizer:
        """Train on a corpus, or load the cached tokenizer of an earlier call with the same contents and settings.

        A damaged entry of ``cache_dir`` is replaced; a folder that cannot be written to is a ConfigError.
        """
        _check_special_tokens(special_tokens, vocab_size)
        settings = [_CACHE_FORMAT, corpus.sha256, vocab_size, list(special_tokens), _PIECE_PATTERN]
        key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
        path = Path(cache_dir).expanduser() / f"tokenizer-{key[:32]}.json"
        tokenizer = cls._from_cache(path, special_tokens[0])
        if tokenizer is None:
            tokenizer = cls.train(corpus.documents, vocab_size, special_tokens)
            entry = {"sha256": tokenizer.sha256, "tokenizer": tokenizer._backend.to_str()}
            _write_text(path, json.dumps(entry))
        return tokenizer

    @classmethod
    def _from_cache(cls, path: Path, eos_token: str) -> Tokenizer | None:
        """Return the cached tokenizer; None if it is missing or damaged."""
        try:
            entry = read_json(path, limit=_MAX_BYTES)
            tokenizer = cls._from_json(entry["tokenizer"], eos_token)
            return tokenizer if tokenizer.sha256 == entry["sha256"] else None
        except Exception:  # the library raises bare Exception; after any error, train again
            return None

    @classmethod
    def load(cls, path: str | os.PathLike[str], eos_token: str | None = None) -> Tokenizer:
        """Load a ``tokenizer.json`` in the Hugging Face format.

        The files next to it (``tokenizer_config.json``, ``special_tokens_map.json``, ``added_tokens.json``) may declare
        further special tokens; see ``library.DeclaredTokens``.

        Args:
            path: the file, or its folder.
            eos_token: token that ends a text. None for the one that the files next to it declare, or else the first
                usual name that the tokenizer has.

        Raises:
            DataError: the file is missing, is not a tokenizer, makes a text many times longer or has no known
                end-of-text token; or a file next to it is damaged.
        """
        file = Path(path).expanduser()
        if file.is_dir():
            file = file / "tokenizer.json"
        try:
            with panics_as_errors(f"be read from {str(file)!r}"):
                backend = tokenizers.Tokenizer.from_str(read_regular(file, limit=_MAX_BYTES).decode())
        except FileNotFoundError:
            raise DataError(
                f"no tokenizer at {str(file)!r}; give a tokenizer.json or the folder that holds it"
            ) from None
        except OSError as error:
            raise DataError(f"cannot read the tokenizer {str(file)!r}: {error.strerror or error}") from error
        except DataError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise DataError(
                f"{str(file)!r} is not a tokenizer.json of the Hugging Face format: {error}; use another copy"
            ) from error
        check_growth(backend, str(file))
        declared = DeclaredTokens(file.parent)
        if eos_token is None:
            eos_token = declared.eos_token
        if eos_token is None:
            eos_token = next((name for name in _USUAL_END_NAMES if backend.token_to_id(name) is not None), None)
        if eos_token is None:
            raise DataError(f"the tokenizer {str(file)!r} does not say which token ends a text; pass its eos_token")
        # Look up the end-of-text token before declaring others: the model does not know a token that is only added now,
        # so it would never end a text.
        tokenizer = cls(backend, eos_token)
        with panics_as_errors(f"be read from {str(file)!r}"):
            declared.declare_(backend)
        return tokenizer

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save ``tokenizer.json`` and ``tokenizer_config.json``, which ``transformers`` can load.

        Args:
            folder: destination, created if missing.

        Raises:
            ConfigError: the folder cannot be written to.
        """
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            # As in GPT-2, the end-of-text token also begins a text.
            "bos_token": self.eos_token,
            "eos_token": self.eos_token,
            # By default, decoding drops blanks before punctuation.
            "clean_up_tokenization_spaces": False,
        }
        folder = Path(folder).expanduser()
        for name, text in (
            ("tokenizer.json", self._backend.to_str(pretty=True)),
            (CONFIG_NAME, json.dumps(config, indent=2)),
        ):
            _write_text(folder / name, f"{text}\n")

    @cached_property
    def vocab_size(self) -> int:
        """The largest id plus 1, which is the number of rows that an embedding needs."""
        return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def tokens(self) -> dict[int, str]:
        """Entry of each id in the tokenizer's file."""
        return {number: name for name, number in self._backend.get_vocab(with_added_tokens=True).items()}

    @cached_property
    def sha256(self) -> str:
        """Hex digest of everything that affects the ids of a text."""
        return hashlib.sha256(f"{self.eos_token}\n{self._backend.to_str()}".encode()).hexdigest()

    @cached_property
    def beginning(self) -> tuple[int, ...]:
        """Tokens that the tokenizer's file adds before each text, such as ``<s>``; most add none.

        ``encode`` does not add them, because its text may be a part of a document.
        """
        with panics_as_errors(f"encode {shown('x')}"):
            encoding = self._backend.encode("x", add_special_tokens=True)
        is_text = [not special for special in encoding.special_tokens_mask]
        return tuple(encoding.ids[: is_text.index(True)] if True in is_text else ())

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Return the token ids of a text, without adding tokens before or after it.

        Args:
            text: any text without lone surrogates.
            parse_special: whether to parse the names of special tokens in the text, as ``transformers`` does. Use it
                for prompts in a chat format, but not for untrusted text.

        Raises:
            DataError: the text has a lone surrogate, or a regular expression of the tokenizer fails.
        """
        return self.encode_batch([text], parse_special=parse_special)[0]

    def encode_batch(
        self, texts: Sequence[str], *, parse_special: bool = False, on_encoded: Callable[[int], object] = abs
    ) -> list[list[int]]:
        """Encode each text, on several threads if ``TOKENIZERS_PARALLELISM=true`` is set.

        ``on_encoded`` is called with the number of characters that were encoded since its last call.
        """
        backend = self._parsing_backend if parse_special else self._backend

        def encode(texts: Sequence[str]) -> list[list[int]]:
            try:
                with panics_as_errors(f"encode {shown(texts[0]) if texts else 'nothing'}"):
                    return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
            except DataError:
                for text in texts if len(texts) > 1 else ():
                    encode([text])
                raise

        pieces: list[str] = []
        counts: list[int] = []
        try:
            for text in texts:
                pieces.extend(
                    library.encodable_parts(text, lambda part: encode([part])[0], longest_name=self._longest_name)
                    if len(text) > library.MAX_PART_CHARS and self._encodes_locally
                    else (text,)
                )
                counts.append(len(pieces))
            encoded = []
            at_once = _LONG_PARTS if len(pieces) > len(texts) else max(1, len(pieces))
            for first in range(0, len(pieces), at_once):
                encoded += encode(pieces[first : first + at_once])
                on_encoded(sum(map(len, pieces[first : first + at_once])))
        except TypeError as error:
            for number, text in enumerate(texts):
                if text.encode(errors="ignore").decode() != text:
                    raise DataError(
                        f"text {number} cannot be encoded: it has a lone surrogate, which is no character; remove it"
                    ) from error
            raise
        starts = (0, *counts[:-1])
        return [
            encoded[start] if stop - start == 1 else [token for ids in encoded[start:stop] for token in ids]
            for start, stop in zip(starts, counts, strict=False)
        ]

    def encode_with_spans(self, text: str, *, parse_special: bool = False) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode a text; return the ids, and each token's start and end in the text, in characters."""
        backend = self._parsing_backend if parse_special else self._backend
        try:
            with panics_as_errors(f"encode {shown(text)}"):
                encoding = backend.encode(text, add_special_tokens=False)
        except TypeError as error:
            raise DataError("the text has a lone surrogate, which is no character; remove it") from error
        return encoding.ids, encoding.offsets

    def id_of(self, name: str) -> int | None:
        """Return the id of the token with that name, or None."""
        number: int | None = self._backend.token_to_id(name)
        return number

    @cached_property
    def added_names(self) -> dict[int, str]:
        """Names, by id, of all tokens, special or not, that are found in a text before it is split."""
        return {number: str(token.content) for number, token in self._backend.get_added_tokens_decoder().items()}

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the added tokens that the tokenizer's file marks as special."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def special_names(self) -> tuple[str, ...]:
        """Names of special tokens."""
        return tuple(self.added_names[token_id] for token_id in sorted(self.special_ids))

    @cached_property
    def _parsing_backend(self) -> tokenizers.Tokenizer:
        """A separate copy that parses special tokens, so that no call changes the state of another."""
        return tokenizers.Tokenizer.from_str(self._backend.to_str())

    @cached_property
    def _longest_name(self) -> int:
        return max((len(token.content) for token in self._backend.get_added_tokens_decoder().values()), default=0)

    @cached_property
    def _encodes_locally(self) -> bool:
        """Whether a text may be encoded in parts: False if a blank is added before each part, as in SentencePiece."""
        ids = self.encode("x")
        return self.decode(ids + ids) == "xx"

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, with special tokens as their names.

        ``decode(encode(text)) == text``. An incomplete character at the end becomes U+FFFD.

        Args:
            ids: token ids.

        Raises:
            VocabularyError: an id is outside the vocabulary.
            DataError: a regular expression of the tokenizer fails on the text.
        """
        numbers = [int(token) for token in ids]
        for position, token in enumerate(numbers):
            if not 0 <= token < self.vocab_size:
                raise VocabularyError(
                    f"token id {token} at position {position} is outside the vocabulary of {self.vocab_size} ids"
                )
        with panics_as_errors(f"decode {len(numbers):,} token ids"):
            return self._backend.decode(numbers, skip_special_tokens=False)


class PaddedTokenizer(Tokenizer):
    """The tokenizer of a model with a padded vocabulary, which is common in published models."""

    def decode(self, ids: Sequence[int]) -> str:
        """Decode as ``Tokenizer.decode`` does, but skip ids that only the model has."""
        return super().decode([token for token in ids if token < self.vocab_size])
