"""A new model and its plain training text: the corpus of ``--data``, its split, tokenizer and tokens."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.core.errors import ConfigError
from shardwise.core.topology import Groups
from shardwise.data import Corpus, HeldOut, TokenRows, TokenStream, WindowRows, read_corpus, stdlib_corpus
from shardwise.data.tokenizer import Tokenizer
from shardwise.models.config import ModelConfig
from shardwise.models.description import ModelChunks
from shardwise.models.gpt import GPT
from shardwise.run.build import build_model, describe
from shardwise.run.settings import CorpusSettings, RunSettings, Settings
from shardwise.run.tasks.sources import is_token_file, prepare_sources, sources_of
from shardwise.run.tasks.task import Method
from shardwise.run.tasks.task_data import TaskData, keys_of, with_cache

STDLIB = "stdlib"


class NewModel:
    """Source that initializes a new model."""

    identity: Mapping[str, Any] = {}
    trains_weights = True

    def __init__(self, settings: Settings) -> None:
        self._settings = settings.model

    def describe(self, data: TaskData) -> ModelConfig:
        """Describe the model of the settings."""
        return describe(self._settings, data.tokenizer.vocab_size)

    def build(
        self, settings: RunSettings, data: TaskData, *, groups: Groups, device: torch.device
    ) -> GPT | ModelChunks:
        """See ``build_model``."""
        return build_model(settings, data.tokenizer.vocab_size, groups=groups, device=device)


class NewTexts(Method):
    """Train a new model on text, with a tokenizer trained on the same text."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def prepare(self) -> TaskData:
        settings = self.settings
        sources, _ = sources_of(settings.data)
        corpora = {each: read_data(each, settings.corpus) for each in sources if not is_token_file(each[0])}
        tokenizer = self._tokenizer([*corpora.values()], has_token_files=len(corpora) < len(set(sources)))
        if tokenizer.vocab_size < settings.parallel.tp:
            raise ConfigError(f"{tokenizer.vocab_size} token ids cannot be split over tp {settings.parallel.tp}")
        return prepare_sources(
            settings,
            tokenizer,
            lambda source: encode_texts(
                corpora[source],
                tokenizer,
                settings.corpus,
                sequence_length=settings.sequence_length,
                parse_special=settings.special_tokens,
            ),
        )

    def _tokenizer(self, corpora: Sequence[Corpus], *, has_token_files: bool) -> Tokenizer:
        """Load the tokenizer of the settings, or train one on the training part of all corpora."""
        settings = self.settings
        if (path := settings.corpus.tokenizer) is not None:
            return Tokenizer.load(path)
        if has_token_files:
            raise ConfigError(
                "token files (.idx) do not have their tokenizer; name the one that made them, a tokenizer.json or its "
                "folder: --corpus.tokenizer"
            )
        parts = [each.split(held_out_fraction=settings.corpus.held_out_fraction)[0] for each in corpora]
        train = parts[0] if len(parts) == 1 else Corpus("blend", sum((part.documents for part in parts), ()))
        vocab_size = settings.model.vocab_size
        tokenizer, _ = with_cache(
            lambda cache: (
                Tokenizer.train(train.documents, vocab_size)
                if cache is None
                else Tokenizer.train_cached(train, vocab_size, cache)
            )
        )
        return tokenizer


def read_data(data: Sequence[str], settings: CorpusSettings | None = None) -> Corpus:
    """Read the documents of ``--data``."""
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
    sequence_length: int,
    parse_special: bool = False,
    held_out: Corpus | None = None,
) -> TaskData:
    """Split and encode a corpus, or load the tokens from the cache of an earlier run."""
    train = corpus
    if held_out is None:
        train, held_out = corpus.split(held_out_fraction=settings.held_out_fraction)
    (stream, measured), notes = with_cache(
        lambda cache: [
            TokenStream.from_corpus(part, tokenizer, cache, parse_special=parse_special) for part in (train, held_out)
        ]
    )
    return TaskData(
        corpus.name,
        corpus.sha256,
        tokenizer,
        TokenRows(stream, sequence_length),
        HeldOut(WindowRows(measured, sequence_length)),
        notes,
        held_out_bytes=held_out.to_bytes(),
        held_out_sha256=held_out.sha256,
        bits_per_nat=stream.num_tokens / stream.num_bytes / math.log(2),
        keys=(keys_of(train.digests), keys_of(held_out.digests)),
    )
