"""Chats and instructions from ``--data`` to samples: split, encoded, fitted to the sequence length."""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from shardwise.core.errors import DataError
from shardwise.core.files import write_atomically
from shardwise.data import (
    Corpus,
    DataLoader,
    Encoded,
    Example,
    ExampleEncoder,
    HeldOut,
    Preference,
    SampleRows,
    TokenSamples,
    UnusableExampleError,
)
from shardwise.data.labelled import counted
from shardwise.data.tokenizer import Tokenizer
from shardwise.run.settings import CorpusSettings, RunSettings, SampleSettings
from shardwise.run.tasks.texts import with_cache

_CACHE_FORMAT = 1
_REASONS_SHOWN = 3
LOOKED_AT = 8
"""Examples that are looked at before the others are encoded."""

_PARTS = ("to train on", "held out")
# What tokens that begin and end turns look like, in every family that has such.
_TOKEN_NAMES = re.compile(r"<[|\uff5c][^|\uff5c<>\s]{1,60}[|\uff5c]>|</?[a-z_]{1,40}>|\[/?[A-Z_]{2,40}\]")


@dataclass(frozen=True)
class Samples:
    """Chats, prompts with completions and texts that a run trains and measures on.

    Attributes:
        name: what people call them.
        sha256: hex digest of the examples.
        tokenizer: of the model.
        train, held_out: rows to train and to measure on.
        notes: what was left out, and why.
        identity: how examples became samples.
        held_out_bytes: nothing; a general-purpose compressor has no prompts.
    """

    name: str
    sha256: str
    tokenizer: Tokenizer
    train: SampleRows
    held_out: SampleRows
    notes: tuple[str, ...]
    identity: Mapping[str, Any]
    held_out_bytes: bytes = b""

    @property
    def bits_per_nat(self) -> float:
        """Bits per byte of what is learned that a loss of one nat per token is."""
        return float(self.train.labels.sum()) / max(1, self.train.num_bytes) / math.log(2)

    def loader(self, settings: RunSettings) -> DataLoader:
        """The training batches."""
        return DataLoader(self.train, settings.training.global_batch_size, settings.training.seed)

    def held_out_rows(self, settings: RunSettings) -> HeldOut:
        """The held-out rows."""
        return HeldOut(self.held_out)


class Documents(NamedTuple):
    """Plain texts to train on, and others to measure on; a share of the former if None."""

    corpus: Corpus
    held_out: Corpus | None

    def split(self, settings: CorpusSettings) -> tuple[Corpus, Corpus]:
        """Those to train on, and those to measure on."""
        if self.held_out is not None:
            return self.corpus, self.held_out
        return self.corpus.split(held_out_fraction=settings.held_out_fraction)


class Examples(NamedTuple):
    """Examples by the name of their data, and others to measure on; a share of the former if None."""

    name: str
    examples: list[Example]
    held_out: list[Example] | None


def as_examples(corpus: Corpus) -> list[Example]:
    """The documents as examples of their own."""
    return [Example(f"text {number}", None, each) for number, each in enumerate(corpus.documents, 1)]


def prepare_samples(
    name: str,
    examples: Sequence[Example],
    held_out: Sequence[Example] | None,
    encoder: ExampleEncoder,
    settings: SampleSettings,
    *,
    sequence_length: int,
    held_out_fraction: float,
    multiple_of: int = 1,
) -> Samples:
    """Split and encode, or take from the cache what an earlier run left.

    Args:
        name: what people call the examples.
        examples: to train on.
        held_out: to measure on; a part of ``examples`` if None.
        encoder: of the model.
        settings: how samples become rows.
        sequence_length: most tokens in a row.
        held_out_fraction: share of the examples to measure on, if there are no others.
        multiple_of: rows of a batch have a multiple of so many places.

    Raises:
        DataError: the examples cannot be split, or nothing can be learned from any; a chat template or tokenizer of
            another model.
    """
    parts = encode_parts(name, examples, held_out, encoder, held_out_fraction)
    notes, datasets = [*parts.notes], []
    for samples, what in zip(parts.samples, _PARTS, strict=True):
        dataset = SampleRows(
            samples,
            sequence_length,
            packing=settings.packing,
            too_long=settings.too_long,
            multiple_of=multiple_of,
        )
        datasets.append(dataset)
        notes += _notes_on_lengths(dataset, settings, what)
    train, measured = datasets
    identity = {
        "mask_prompts": encoder.mask_prompts,
        "packing": settings.packing,
        "too_long": settings.too_long,
        "chat_template_sha256": template_digest(encoder),
    }
    shown = f"{name}, {counted(len(examples), 'sample')}"
    return Samples(shown, parts.sha256, encoder.tokenizer, train, measured, tuple(dict.fromkeys(notes)), identity)


def template_digest(encoder: ExampleEncoder) -> str | None:
    """Hex digest of the encoder's chat template, if it has one."""
    template = encoder.template
    return None if template is None else hashlib.sha256(template.source.encode()).hexdigest()


@dataclass(frozen=True)
class EncodedParts:
    """Examples as tokens.

    Attributes:
        sha256: hex digest of the examples.
        samples: to train on, and to measure on.
        notes: what was left out, and why.
    """

    sha256: str
    samples: tuple[TokenSamples, TokenSamples]
    notes: tuple[str, ...]


def encode_parts(
    name: str,
    examples: Sequence[Example],
    held_out: Sequence[Example] | None,
    encoder: ExampleEncoder,
    held_out_fraction: float,
) -> EncodedParts:
    """Split and encode; see ``prepare_samples``."""
    digests = [_digest(example) for example in examples]
    notes = check_template(encoder, examples)
    if held_out is None:
        picked = held_out_indices(digests, held_out_fraction)
        train, measured = (
            [each for index, each in enumerate(examples) if (index in picked) == wanted] for wanted in (False, True)
        )
    else:
        train, measured = list(examples), list(held_out)

    def encoded(part: Sequence[Example], what: str) -> TokenSamples:
        (samples, left_out), unkept = with_cache(partial(_encode, part, encoder, f"{name} ({what})"))
        notes.extend([*unkept, *left_out_notes(part, left_out, what)])
        return samples

    sha256 = hashlib.sha256("".join(digests).encode()).hexdigest()
    samples = encoded(train, _PARTS[0]), encoded(measured, _PARTS[1])
    return EncodedParts(sha256, samples, tuple(notes))


def check_template(encoder: ExampleEncoder, examples: Sequence[Example]) -> list[str]:
    """Notes, if no token of the tokenizer ends what the assistant says, by which a model learns to stop.

    Raises:
        DataError: a name does that looks like a token and is none, so that the template, or the tokenizer, belongs to
            another model.
    """
    tokenizer, template = encoder.tokenizer, encoder.template
    chats = [example for example in examples if example.is_chat][:LOOKED_AT]
    if template is None or not chats:
        return []
    masking = ExampleEncoder(tokenizer, template)
    for example in chats:
        try:
            encoded = masking.encode(example)
        except UnusableExampleError:
            continue
        if not tokenizer.added_names.keys().isdisjoint(encoded.ids[encoded.learned].tolist()):
            return []
        text = tokenizer.decode(encoded.ids[encoded.learned].tolist())
        names = dict.fromkeys(_TOKEN_NAMES.findall(template.source))
        foreign = [each for each in names if each in text and each not in tokenizer.added_names.values()]
        if foreign:
            raise DataError(
                f"the chat template ends what the assistant says with {', '.join(map(repr, foreign[:3]))}, which the "
                "tokenizer has no token for: the chat template or the tokenizer in the model's folder is another "
                "model's"
            )
    return ["no special token ends what the assistant says, by which a model would learn to stop"]


def _digest(example: Example) -> str:
    value = [example.prompt, example.completion, example.tools, dict(example.variables)]
    if isinstance(example, Preference):
        value.append(example.rejected)
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def held_out_indices(digests: Sequence[str], fraction: float) -> set[int]:
    """Indices of the examples to measure on: whole ones, equal ones on one side, whatever their order."""
    groups: dict[str, list[int]] = {}
    for index, digest in enumerate(digests):
        groups.setdefault(digest, []).append(index)
    if len(groups) < 2:
        equal = ", all equal," if len(digests) > 1 else ""
        raise DataError(
            f"{counted(len(digests), 'sample')}{equal} cannot be divided into some to train on and some to "
            "measure on; give more, or name a file to measure on (--held-out)"
        )
    target = max(1, round(fraction * len(digests)))
    picked: set[int] = set()
    for digest in sorted(groups)[:-1]:
        if len(picked) >= target:
            break
        picked.update(groups[digest])
    return picked


_Left = dict[str, tuple[int, int]]
"""Why examples were left out: for each reason how many, and the index of the first."""


def _encode(
    examples: Sequence[Example], encoder: ExampleEncoder, name: str, cache: Path | None
) -> tuple[TokenSamples, _Left]:
    """The samples of examples, and what was left out."""
    if cache is None:
        return encode_examples(examples, encoder, name)
    template = encoder.template
    identity = json.dumps(
        [
            _CACHE_FORMAT,
            [_digest(example) for example in examples],
            encoder.tokenizer.sha256,
            None if template is None else template.sha256,
            encoder.mask_prompts,
            encoder.parse_special,
        ]
    )
    key = hashlib.sha256(identity.encode()).hexdigest()
    path = cache / f"samples-{key[:32]}.safetensors"
    cached = _read_cached(path, key, name, encoder.tokenizer.eos_id)
    if cached is None:
        samples, left_out = encode_examples(examples, encoder, name)
        tensors = {each: getattr(samples, each) for each in _ARRAYS}
        content = safetensors.numpy.save(tensors, metadata={"key": key, "left_out": json.dumps(left_out)})
        write_atomically(path, lambda file: file.write(content))
        cached = samples, left_out
    return cached


_ARRAYS: Mapping[str, type] = {"tokens": np.uint32, "learned": np.bool_, "starts": np.int64, "num_bytes": np.uint32}


def _read_cached(path: Path, key: str, name: str, eos_id: int) -> tuple[TokenSamples, _Left] | None:
    """What an earlier run wrote; None if there is none, or it is damaged."""
    try:
        with safetensors.safe_open(path, "numpy") as file:
            header = file.metadata()
            arrays: dict[str, NDArray[Any]] = {each: file.get_tensor(each) for each in _ARRAYS}
        if header["key"] != key or any(arrays[each].dtype != dtype for each, dtype in _ARRAYS.items()):
            return None
        left_out = {
            str(reason): (int(count), int(first)) for reason, (count, first) in json.loads(header["left_out"]).items()
        }
        return TokenSamples(name, **arrays, eos_id=eos_id), left_out
    except Exception:  # the library raises its own kinds; whatever is wrong, encoding anew is the answer
        return None


def encode_examples(examples: Sequence[Example], encoder: ExampleEncoder, name: str) -> tuple[TokenSamples, _Left]:
    """The samples of examples, and what was left out.

    Raises:
        DataError: all of it.
    """
    encoded: list[Encoded] = []
    left_out = _Left()
    for index, example in enumerate(examples):
        try:
            encoded.extend(encoder.encode_all(example))
        except UnusableExampleError as error:
            count, first = left_out.get(error.reason, (0, index))
            left_out[error.reason] = (count + 1, first)
    if not encoded:
        raise DataError(
            f"nothing can be learned from any of the {counted(len(examples), 'sample')} of {name}: "
            f"{_reasons(examples, left_out)}"
        )
    return TokenSamples.of(name, encoded, encoder.tokenizer.eos_id), left_out


def _reasons(examples: Sequence[Example], left_out: _Left) -> str:
    """Why examples were left out, the most frequent reason first."""
    ordered = sorted(left_out.items(), key=lambda item: -item[1][0])
    shown = [f"{count} since {reason} (first: {examples[first].where})" for reason, (count, first) in ordered]
    more = len(shown) - _REASONS_SHOWN
    return "; ".join(shown[:_REASONS_SHOWN]) + (f"; and {more} other reasons" if more > 0 else "")


def left_out_notes(examples: Sequence[Example], left_out: _Left, what: str) -> list[str]:
    """How many examples were left out, and why, for people; nothing if none was."""
    if not left_out:
        return []
    total = sum(count for count, _ in left_out.values())
    return [f"{total} of {counted(len(examples), 'sample')} {what} left out: {_reasons(examples, left_out)}"]


def _notes_on_lengths(dataset: SampleRows, settings: SampleSettings, what: str) -> list[str]:
    notes = []
    if dataset.num_too_long:
        past = {"cut": "cut", "split": "split", "drop": "dropped"}[settings.too_long]
        notes.append(
            f"{dataset.num_too_long} of {counted(len(dataset.samples), 'sample')} {what} {past}, as they are longer "
            f"than {dataset.sequence_length + 1} tokens (--too-long, --model.sequence-length)"
        )
    if dataset.num_masked:
        notes.append(
            f"{counted(dataset.num_masked, 'sample')} {what}, or parts of them, left out since the cut leaves nothing "
            "to learn"
        )
    return notes
