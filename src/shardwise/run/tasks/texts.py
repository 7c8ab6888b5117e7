"""From ``--data`` to tokens: the corpus, its split, its tokenizer, its token streams."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from shardwise.core.communication.agreement import agree, check_same
from shardwise.core.errors import ConfigError, UnwritableError
from shardwise.core.folder_lock import check_folder
from shardwise.data import (
    Corpus,
    DataLoader,
    HeldOut,
    TokenRows,
    TokenStream,
    WindowRows,
    read_corpus,
    stdlib_corpus,
)
from shardwise.data.tokenizer import Tokenizer
from shardwise.run.processes.ranks import Ranks
from shardwise.run.settings import CorpusSettings, RunSettings, Settings

STDLIB = "stdlib"

_T = TypeVar("_T")


class TrainingData(Protocol):
    """What a run trains and measures on, as tokens.

    Attributes:
        name: what people call it.
        sha256: hex digest of all of it.
        tokenizer: of the tokens.
        notes: what the user should know, one line each.
        identity: of how it became tokens, as checkpoints record it.
        held_out_bytes: the held-out text for compressors to be compared with; nothing where they have none in common.
    """

    @property
    def name(self) -> str: ...
    @property
    def sha256(self) -> str: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def notes(self) -> Sequence[str]: ...
    @property
    def identity(self) -> Mapping[str, Any]: ...
    @property
    def held_out_bytes(self) -> bytes: ...
    @property
    def bits_per_nat(self) -> float:
        """Bits per byte of the training text that a loss of one nat per token is."""

    def loader(self, settings: RunSettings) -> DataLoader:
        """The training batches."""

    def held_out_rows(self, settings: RunSettings) -> HeldOut:
        """What is measured on."""


_D = TypeVar("_D", bound=TrainingData)


@dataclass(frozen=True)
class Texts:
    """Plain text that a run trains and measures on.

    Attributes:
        corpus: all of the text.
        held_out: the part that is measured on.
        tokenizer: trained on the rest.
        train_tokens: the rest.
        held_out_tokens: ``held_out`` as tokens.
        notes: what could not be kept for the next run, and why.
        identity: nothing; how texts become tokens is said by the tokenizer.
    """

    corpus: Corpus
    held_out: Corpus
    tokenizer: Tokenizer
    train_tokens: TokenStream
    held_out_tokens: TokenStream
    notes: tuple[str, ...] = ()
    identity: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the corpus."""
        return self.corpus.name

    @property
    def sha256(self) -> str:
        """Of the corpus."""
        return self.corpus.sha256

    @property
    def held_out_bytes(self) -> bytes:
        """The held-out documents in UTF-8."""
        return self.held_out.to_bytes()

    @property
    def bits_per_nat(self) -> float:
        """Bits per byte of the training text that a loss of one nat per token is."""
        return self.train_tokens.num_tokens / self.train_tokens.num_bytes / math.log(2)

    def loader(self, settings: RunSettings) -> DataLoader:
        """The training batches; DataError if the text is too short for one sample."""
        dataset = TokenRows(self.train_tokens, settings.sequence_length)
        return DataLoader(dataset, settings.training.global_batch_size, settings.training.seed)

    def held_out_rows(self, settings: RunSettings) -> HeldOut:
        """Windows that cover the held-out text once."""
        return HeldOut(WindowRows(self.held_out_tokens, settings.sequence_length))


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


def with_cache(make: Callable[[Path | None], _T]) -> tuple[_T, tuple[str, ...]]:
    """``make(folder)`` of the cache, or ``make(None)`` where it cannot be written; and notes if so."""
    try:
        folder = cache_folder()
        # Before the work is done, and its result cannot be kept.
        check_folder(folder, flag="SHARDWISE_CACHE")
        return make(folder), ()
    except UnwritableError as error:
        return make(None), (f"nothing is kept for the next run: {error}",)


def prepare_texts(settings: Settings) -> Texts:
    """Read, split, train the tokenizer and encode, or take from the cache what an earlier run left.

    Raises:
        DataError: the data cannot be read.
        ConfigError: the vocabulary is larger than the text has use for.
    """
    corpus = read_data(settings.data, settings.corpus)
    train, _ = corpus.split(held_out_fraction=settings.corpus.held_out_fraction)
    vocab_size = settings.model.vocab_size
    tokenizer, _ = with_cache(
        lambda cache: (
            Tokenizer.train(train.documents, vocab_size)
            if cache is None
            else Tokenizer.train_cached(train, vocab_size, cache)
        )
    )
    if tokenizer.vocab_size < settings.parallel.tp:
        raise ConfigError(f"{tokenizer.vocab_size} token ids cannot be split over tp {settings.parallel.tp}")
    return encode_texts(corpus, tokenizer, settings.corpus, parse_special=settings.special_tokens)


def read_data(data: Sequence[str], settings: CorpusSettings | None = None) -> Corpus:
    """The documents that ``--data`` names.

    Raises:
        DataError: the data cannot be read.
        ConfigError: "stdlib" beside something else.
    """
    if STDLIB not in data:
        return read_corpus(data, text_key=(settings or CorpusSettings()).text_key)
    if len(data) > 1:
        raise ConfigError(f"data is {list(data)}; {STDLIB!r} stands alone (a folder of that name: ./{STDLIB})")
    return stdlib_corpus()


def encode_texts(
    corpus: Corpus,
    tokenizer: Tokenizer,
    settings: CorpusSettings,
    *,
    parse_special: bool = False,
    held_out: Corpus | None = None,
) -> Texts:
    """Split and encode, or take from the cache what an earlier run left.

    Args:
        corpus: all of the text.
        tokenizer: encodes it.
        settings: how it is split.
        parse_special: whether the names of special tokens in it are these tokens.
        held_out: what is measured on; a part of ``corpus`` if None.

    Raises:
        DataError: the text is too short to be split.
    """
    train = corpus
    if held_out is None:
        train, held_out = corpus.split(held_out_fraction=settings.held_out_fraction)
    streams, notes = with_cache(
        lambda cache: [
            TokenStream.from_corpus(part, tokenizer, cache, parse_special=parse_special) for part in (train, held_out)
        ]
    )
    return Texts(corpus, held_out, tokenizer, streams[0], streams[1], notes)


def share_texts(prepare: Callable[[], _D], ranks: Ranks) -> _D:
    """``prepare()`` on every rank; the first of each machine does the work and the others find it in the cache.

    Raises:
        ShardwiseError: what went wrong on any rank, on every rank.
        DesyncError: the ranks read different texts.
    """
    with ranks.phase("reading the text"):
        texts = agree(lambda: prepare() if ranks.local_rank == 0 else None, group=ranks.control)
        texts = agree(lambda: texts or prepare(), group=ranks.control)
    assert texts is not None
    for note in texts.notes if ranks.is_first else ():
        print(f"note   {note}", flush=True)
    check_same(texts.sha256, "the text (its SHA-256)", group=ranks.control)
    check_same(texts.tokenizer.sha256, "the tokenizer (its SHA-256)", group=ranks.control)
    return texts
