"""From ``--data`` to tokens: the corpus, its split, its tokenizer, its token streams."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.data import Corpus, TokenStream, read_corpus, stdlib_corpus
from shardwise.errors import ConfigError
from shardwise.tokenizer import Tokenizer
from shardwise.training.settings import CorpusSettings, Settings

STDLIB = "stdlib"


@dataclass(frozen=True)
class Texts:
    """What a run trains and measures on.

    Attributes:
        corpus: all of the text.
        held_out: the part that is measured on.
        tokenizer: trained on the rest.
        train_tokens: the rest.
        held_out_tokens: ``held_out`` as tokens.
    """

    corpus: Corpus
    held_out: Corpus
    tokenizer: Tokenizer
    train_tokens: TokenStream
    held_out_tokens: TokenStream


def cache_folder() -> Path:
    """Where tokenizers and token streams are kept between runs.

    ``$SHARDWISE_CACHE``, or ``shardwise`` in ``$XDG_CACHE_HOME``, or in ``~/.cache``.
    """
    own = os.environ.get("SHARDWISE_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwise"


def prepare_texts(settings: Settings) -> Texts:
    """Read, split, train the tokenizer and encode, or take from the cache what an earlier run left.

    Raises:
        DataError: the data cannot be read.
        ConfigError: the vocabulary is larger than the text has use for, or the cache cannot be written.
    """
    corpus = read_data(settings.data, settings.corpus)
    train, _ = corpus.split(held_out_fraction=settings.corpus.held_out_fraction)
    tokenizer = Tokenizer.train_cached(train, settings.model.vocab_size, cache_folder())
    if tokenizer.vocab_size < settings.parallel.tp:
        raise ConfigError(f"{tokenizer.vocab_size} token ids cannot be split over tp {settings.parallel.tp}")
    return encode_texts(corpus, tokenizer, settings.corpus, parse_special=settings.special_tokens)


def read_data(data: Sequence[str], settings: CorpusSettings) -> Corpus:
    """The documents that ``--data`` names.

    Raises:
        DataError: the data cannot be read.
        ConfigError: "stdlib" beside something else.
    """
    if STDLIB not in data:
        return read_corpus(data, text_key=settings.text_key)
    if len(data) > 1:
        raise ConfigError(f"data is {list(data)}; {STDLIB!r} stands alone (a folder of that name: ./{STDLIB})")
    return stdlib_corpus()


def encode_texts(
    corpus: Corpus, tokenizer: Tokenizer, settings: CorpusSettings, *, parse_special: bool = False
) -> Texts:
    """Split and encode, or take from the cache what an earlier run left.

    Args:
        corpus: all of the text.
        tokenizer: encodes it.
        settings: how it is split.
        parse_special: whether the names of special tokens in it are these tokens.

    Raises:
        DataError: the text is too short to be split.
        ConfigError: the cache cannot be written.
    """
    train, held_out = corpus.split(held_out_fraction=settings.held_out_fraction)
    cache = cache_folder()
    return Texts(
        corpus,
        held_out,
        tokenizer,
        TokenStream.from_corpus(train, tokenizer, cache, parse_special=parse_special),
        TokenStream.from_corpus(held_out, tokenizer, cache, parse_special=parse_special),
    )
