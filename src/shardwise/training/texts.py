"""From ``--data`` to tokens: the corpus, its split, its tokenizer, its token streams."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from shardwise.communication.agreement import agree, check_same
from shardwise.data import Corpus, TokenStream, read_corpus, stdlib_corpus
from shardwise.errors import ConfigError, UnwritableError
from shardwise.folder_lock import check_folder
from shardwise.tokenizer import Tokenizer
from shardwise.training.ranks import Ranks
from shardwise.training.settings import CorpusSettings, Settings

STDLIB = "stdlib"

_T = TypeVar("_T")


@dataclass(frozen=True)
class Texts:
    """What a run trains and measures on.

    Attributes:
        corpus: all of the text.
        held_out: the part that is measured on.
        tokenizer: trained on the rest.
        train_tokens: the rest.
        held_out_tokens: ``held_out`` as tokens.
        note: what could not be kept for the next run, and why; None if all could.
    """

    corpus: Corpus
    held_out: Corpus
    tokenizer: Tokenizer
    train_tokens: TokenStream
    held_out_tokens: TokenStream
    note: str | None = None


def cache_folder() -> Path:
    """Where tokenizers and token streams are kept between runs.

    ``$SHARDWISE_CACHE``, or ``shardwise`` in ``$XDG_CACHE_HOME``, or in ``~/.cache``.

    Raises:
        UnwritableError: this user has no home folder.
    """
    own = os.environ.get("SHARDWISE_CACHE")
    if own:
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwise"
    except RuntimeError as error:
        raise UnwritableError(str(error)) from error


def _with_cache(make: Callable[[Path | None], _T]) -> tuple[_T, str | None]:
    """``make(folder)`` of the cache, or ``make(None)`` where it cannot be written; and a note if so."""
    try:
        folder = cache_folder()
        # Before the work is done, and its result cannot be kept.
        check_folder(folder, flag="SHARDWISE_CACHE")
        return make(folder), None
    except UnwritableError as error:
        return make(None), f"nothing is kept for the next run: {error}"


def prepare_texts(settings: Settings) -> Texts:
    """Read, split, train the tokenizer and encode, or take from the cache what an earlier run left.

    Raises:
        DataError: the data cannot be read.
        ConfigError: the vocabulary is larger than the text has use for.
    """
    corpus = read_data(settings.data, settings.corpus)
    train, _ = corpus.split(held_out_fraction=settings.corpus.held_out_fraction)
    vocab_size = settings.model.vocab_size
    tokenizer, _ = _with_cache(
        lambda cache: (
            Tokenizer.train(train.documents, vocab_size)
            if cache is None
            else Tokenizer.train_cached(train, vocab_size, cache)
        )
    )
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
    """
    train, held_out = corpus.split(held_out_fraction=settings.held_out_fraction)
    streams, note = _with_cache(
        lambda cache: [
            TokenStream.from_corpus(part, tokenizer, cache, parse_special=parse_special) for part in (train, held_out)
        ]
    )
    return Texts(corpus, held_out, tokenizer, streams[0], streams[1], note)


def share_texts(prepare: Callable[[], Texts], ranks: Ranks) -> Texts:
    """``prepare()`` on every rank; the first of each machine does the work and the others find it in the cache.

    Raises:
        ShardwiseError: what went wrong on any rank, on every rank.
        DesyncError: the ranks read different texts.
    """
    with ranks.phase("reading the text"):
        texts = agree(lambda: prepare() if ranks.local_rank == 0 else None, group=ranks.control)
        texts = agree(lambda: texts or prepare(), group=ranks.control)
    assert texts is not None
    if texts.note is not None and ranks.is_first:
        print(f"note   {texts.note}", flush=True)
    check_same(texts.corpus.sha256, "the text (its SHA-256)", group=ranks.control)
    check_same(texts.tokenizer.sha256, "the tokenizer (its SHA-256)", group=ranks.control)
    return texts
