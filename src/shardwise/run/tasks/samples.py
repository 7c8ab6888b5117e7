"""Chats, instructions and texts as training data: convert records to examples and examples to rows.

Examples are split, encoded or loaded from the cache, and fitted to the sequence length. Notes report omitted examples.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from shardwise.core.atomic_files import write_atomically
from shardwise.core.errors import ConfigError, DataError
from shardwise.core.json_text import first_of
from shardwise.core.slow_work import told_if_slow
from shardwise.data import (
    Corpus,
    Encoded,
    Example,
    ExampleEncoder,
    HeldOut,
    PairRows,
    SampleRows,
    TokenSamples,
    UnusableExampleError,
    example_of,
    read_by_form,
)
from shardwise.data.blend import parse_blend
from shardwise.data.examples import has_text, is_plain_text, is_preference, names_its_text
from shardwise.data.json_records import Record, counted
from shardwise.data.reading import corpus_of
from shardwise.data.tokenizer import ChatTemplate, Tokenizer
from shardwise.data.tokenizer.chat_template import REASONING, TemplateError
from shardwise.data.turns import UNSHOWN
from shardwise.run.settings import SampleSettings
from shardwise.run.tasks.pretrained_model import FolderTokenizer, PretrainedModel
from shardwise.run.tasks.sources import is_token_file, prepare_sources, sources_of
from shardwise.run.tasks.task import Method
from shardwise.run.tasks.task_data import TaskData, divided, keys_of, sha256_of, with_cache
from shardwise.run.tasks.texts import STDLIB, encode_texts, read_data
from shardwise.training.bounds import require

_CACHE_FORMAT = 2
_REASONS_SHOWN = 3
LOOKED_AT = 8
"""Number of examples that are checked before the others are encoded."""

NO_RECORDS = "--prompt-template is for records, and stdlib has none"

# The format of tokens that start and end turns.
_TOKEN_NAMES = re.compile(r"<[|\uff5c][^|\uff5c<>\s]{1,60}[|\uff5c]>|</?[a-z_]{1,40}>|\[/?[A-Z_]{2,40}\]")


class _Documents(NamedTuple):
    """Plain texts for training and held-out texts; if the latter are None, a part of the former is held out."""

    corpus: Corpus
    held_out: Corpus | None


_Examples = tuple[str, list[Example], list[Example] | None]


class Examples(Method):
    """Train a pretrained model on chats, prompts with completions, or texts."""

    def __init__(self, source: PretrainedModel) -> None:
        self.source, self.settings = source, source.settings

    def encoder(self) -> ExampleEncoder:
        """Create the encoder of examples. Raises DataError if the folder's chat template is invalid."""
        settings = self.settings
        return ExampleEncoder(
            self.source.tokenizer,
            ChatTemplate.load(self.source.folder.path),
            mask_prompts=settings.samples.mask_prompts,
            learn=settings.samples.learn,
            parse_special=settings.special_tokens,
        )

    def to_show(self) -> list[Example] | TaskData:
        """Return the examples in the order of the data, or one stream of texts. Raises as a run."""
        data = self._read(parse_blend(self.settings.data)[0])
        if not isinstance(data, _Documents):
            return data[1]
        return _as_examples(data.corpus) if self.settings.samples.packing else self._stream(*data)

    def _records(self, paths: Sequence[str]) -> tuple[str, list[Record]]:
        settings = self.settings
        return read_by_form(
            paths, settings.samples.prompt_template, partial(has_text, text_key=settings.corpus.text_key)
        )

    def _read(self, paths: Sequence[str]) -> _Documents | _Examples:
        """Return documents if all data is plain text; else the name, training examples and held-out examples."""
        settings, key = self.settings, self.settings.corpus.text_key
        measured = settings.samples.held_out
        if STDLIB in (*paths, *measured):
            require(settings.samples.prompt_template is None, NO_RECORDS)
            held_out = read_data(measured, settings.corpus) if measured else None
            return _Documents(read_data(paths, settings.corpus), held_out)
        name, records = self._records(paths)
        for record in records:
            # Some preference data sets also have the text that their preferences were made from.
            if is_preference(record) and is_plain_text(record, key) and key not in record.value:
                raise DataError(f"{record.where}: a preference ('chosen' and 'rejected'); use shardwise dpo")
        others = self._records(measured)[1] if measured else None
        if all(is_plain_text(record, key) and names_its_text(record, key) for record in (*records, *(others or ()))):
            held_out = None if others is None else corpus_of("held out", others, key)
            return _Documents(corpus_of(name, records, key), held_out)
        examples = [example_of(record, key) for record in records]
        return name, examples, None if others is None else [example_of(record, key) for record in others]

    def prepare(self) -> TaskData:
        settings, sources = self.settings, sources_of(self.settings.data)[0]
        read = {each: self._read(each) for each in sources if not is_token_file(each[0])}
        are_texts = all(isinstance(each, _Documents) for each in read.values())
        apart = settings.samples.packing or not are_texts
        if apart and len(read) < len(set(sources)):
            raise ConfigError(
                "token files (.idx) are one stream, without chats or --packing, which keep samples apart; blend them "
                "with plain texts, or leave them out"
            )
        return prepare_sources(settings, self.source.tokenizer, lambda paths: self._prepare(read[paths], apart))

    def _prepare(self, data: _Documents | _Examples, apart: bool) -> TaskData:
        settings = self.settings
        if isinstance(data, _Documents):
            if not apart:
                return self._stream(*data)
            corpus, held_out = data
            train = corpus
            if held_out is None:
                train, held_out = corpus.split(held_out_fraction=settings.corpus.held_out_fraction)
            data = corpus.name, _as_examples(train), _as_examples(held_out)
        parallel = settings.parallel
        if parallel.parts is not None and parallel.cp > 1 and not settings.samples.packing:
            raise ConfigError(
                f"parallel.exact with parallel.cp {parallel.cp} needs rows of one length, and samples have several; "
                "use --packing"
            )
        return prepare_samples(
            *data,
            self.encoder(),
            settings.samples,
            sequence_length=settings.sequence_length,
            held_out_fraction=settings.corpus.held_out_fraction,
            # Exact runs sum over equal parts of a sequence.
            multiple_of=parallel.parts or 1,
            # Each rank that shares a sample has a position.
            shortest=parallel.cp,
        )

    def _stream(self, corpus: Corpus, held_out: Corpus | None) -> TaskData:
        settings, too_long = self.settings, self.settings.samples.too_long
        if too_long != SampleSettings.too_long:
            raise ConfigError(
                f"--too-long {too_long} is for separate samples, and plain texts are one stream, cut where a "
                "sample is full; add --packing, which keeps texts apart, or leave it out"
            )
        return encode_texts(
            corpus,
            self.source.tokenizer,
            settings.corpus,
            sequence_length=settings.sequence_length,
            parse_special=settings.special_tokens,
            held_out=held_out,
        )


def _as_examples(corpus: Corpus) -> list[Example]:
    """Convert each document to an example."""
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
    shortest: int = 1,
) -> TaskData:
    """Split and encode examples, or load them from the cache of an earlier run.

    Args:
        name: display name of the examples.
        examples: examples for training.
        held_out: examples for evaluation; if None, a part of ``examples``.
        encoder: encoder of the model.
        settings: settings for packing and truncation.
        sequence_length: maximum tokens per row.
        held_out_fraction: fraction of ``examples`` to hold out if ``held_out`` is None.
        multiple_of: the length of a batch's rows is a multiple of this.
        shortest: least length of a batch's rows.

    Raises:
        DataError: the examples cannot be split, none has a token to train on, or the chat template or tokenizer belongs
            to another model.
    """
    packing, too_long = settings.packing, settings.too_long
    rows_of = partial(
        SampleRows,
        sequence_length=sequence_length,
        packing=packing,
        too_long=too_long,
        multiple_of=multiple_of,
        shortest=shortest,
    )
    identity = {"mask_prompts": encoder.mask_prompts, "learn": encoder.learn, "packing": packing, "too_long": too_long}
    return prepare_rows(name, examples, held_out, encoder, rows_of, held_out_fraction, "sample", identity)


def prepare_rows(
    name: str,
    examples: Sequence[Example],
    held_out: Sequence[Example] | None,
    encoder: ExampleEncoder,
    rows_of: Callable[[TokenSamples], SampleRows | PairRows],
    held_out_fraction: float,
    noun: str,
    identity: Mapping[str, Any],
    notes: Sequence[str] = (),
) -> TaskData:
    """Split, encode and fit examples to the sequence length; see ``prepare_samples``."""
    found = [*check_template(encoder, examples), *_note_ends(encoder, examples), *_notes_unread(encoder, examples)]
    parts, fitted = divided(examples, held_out, held_out_fraction), [*notes]
    rows: list[SampleRows | PairRows] = []
    for part, what in zip(parts, ("to train on", "held out"), strict=True):
        (samples, left_out), unkept = with_cache(partial(_encode, part, encoder, f"{name} ({what})"))
        found += [*unkept, *left_out_notes(part, left_out, what)]
        rows.append(rows_of(samples))
        fitted += rows[-1].notes(what)
    return TaskData(
        f"{name}, {counted(len(examples), noun)}",
        sha256_of(examples),
        encoder.tokenizer,
        rows[0],
        HeldOut(rows[1]),
        tuple(dict.fromkeys([*found, *fitted])),
        {**identity, "chat_template_sha256": _hash_of_templates(encoder.template, examples)},
        bits_per_nat=_bits_per_nat(rows[0]),
        held_out_sha256=sha256_of(parts[1]),
        keys=(keys_of(each.sha256 for each in parts[0]), keys_of(each.sha256 for each in parts[1])),
    )


def _hash_of_templates(template: ChatTemplate | None, examples: Sequence[Example]) -> str | None:
    if template is None:
        return None
    sources = dict.fromkeys([template.source, *(template.source_for(bool(each.tools)) for each in examples)])
    return hashlib.sha256("".join(sources).encode()).hexdigest()


def _bits_per_nat(rows: SampleRows | PairRows) -> float:
    if isinstance(rows, PairRows):
        return 0.0
    return float(rows.labels.sum()) / max(1, rows.num_bytes) / math.log(2)


def check_template(encoder: ExampleEncoder, examples: Sequence[Example]) -> list[str]:
    """Return a note if no special token ends the assistant's turns; a model needs such a token to learn to stop."""
    tokenizer, template = encoder.tokenizer, encoder.template
    chats = [replace(example, flags=()) for example in examples if example.is_chat][:LOOKED_AT]
    if template is None or not chats:
        return []
    written, learned = (ExampleEncoder(tokenizer, template, ends_turns=each) for each in (False, True))
    num_unshown, has_token, ends = 0, False, False
    for example in chats:
        try:
            num_unshown += not written.shows(example)
            encoded = written.encode(example)
            ends = ends or _has_added(learned.encode(example), tokenizer)
        except UnusableExampleError:
            continue
        has_token = has_token or _has_added(encoded, tokenizer)
        if has_token:
            continue
        text = tokenizer.decode(encoded.ids[encoded.learned].tolist())
        names = dict.fromkeys(_TOKEN_NAMES.findall(template.source_for(bool(example.tools))))
        foreign = [each for each in names if each in text and each not in tokenizer.added_names.values()]
        if foreign:
            raise DataError(
                f"the chat template ends what the assistant says with {', '.join(map(repr, foreign[:3]))}, which the "
                "tokenizer has no token for: the chat template or the tokenizer in the model's folder is another "
                "model's"
            )
    if num_unshown == len(chats):
        raise DataError(
            f"{UNSHOWN}: its text does not depend on them; use the template that the model was published with (a "
            "template that reads lists of parts only is not supported)"
        )
    return [] if ends else ["no special token ends the assistant's turns, so the model does not learn to stop"]


def _note_ends(encoder: ExampleEncoder, examples: Sequence[Example]) -> list[str]:
    """Tell the tokenizer of a model's folder which tokens end what is learned; return a note if they are new to it."""
    tokenizer = encoder.tokenizer
    if not isinstance(tokenizer, FolderTokenizer):
        return []
    kinds = {example.is_chat for example in examples}
    chat_ends = encoder.turn_end_ids() if True in kinds and encoder.template is not None else ()
    tokenizer.learned_ends = tuple(dict.fromkeys((*chat_ends, *([tokenizer.eos_id] if False in kinds else ()))))
    if not (eos_ids := tokenizer.new_eos_ids()):
        return []
    names = " and ".join(f"{tokenizer.tokens[each]!r} ({each})" for each in tokenizer.learned_ends)
    return [f"what is learned ends with {names}, so the result's eos_token_id is {eos_ids}, learned tokens first"]


def _notes_unread(encoder: ExampleEncoder, examples: Sequence[Example]) -> list[str]:
    """Return notes on keys of records that nothing reads, and on fields that the chat template does not show."""
    notes = []
    if unread := dict.fromkeys(key for example in examples for key in example.unread):
        first = next(example.where for example in examples if example.unread)
        notes.append(f"keys of the records that are not read: {first_of([*unread], 8)} (first: {first})")
    unwanted = [example for example in examples if example.label == 0]
    if unwanted and {example.label for example in examples} <= {0, 1, None}:
        of = f"{len(unwanted):,} of {counted(len(examples), 'record')}"
        notes.append(
            f"'label' is 0 in {of}, which are learned like the others; remove them if 0 says that people do not want "
            f"the answer (first: {unwanted[0].where})"
        )
    texts = [example for example in examples if not example.is_chat and example.prompt is None]
    if 0 < len(texts) < len(examples):
        of = f"{len(texts):,} of {len(examples):,} records"
        notes.append(f"{of} are texts, all of which is learned (first: {texts[0].where})")
    if encoder.template is None:
        return notes
    places: dict[tuple[str, str], list[tuple[Example, int]]] = {}
    for example in examples:
        for role, name, number in _fields(example) if example.is_chat else ():
            if (found := places.get((role, name))) is None:
                found = places[role, name] = []
            if len(found) < LOOKED_AT:
                found.append((example, number))
    for (role, name), found in places.items():
        if not any(_is_shown(encoder.template, example, number, name) for example, number in found):
            of_role = f" of {role} messages" if role else ""
            notes.append(f"the chat template does not show {name!r}{of_role} (first: {found[0][0].where})")
    return notes


def _fields(example: Example) -> Iterator[tuple[str, str, int]]:
    """Yield the role, the name and the index of the message of each field that a template should show."""
    if example.tools:
        yield "", "tools", -1
    messages = example.messages
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    for number, message in enumerate(messages):
        role = message["role"]
        # Templates drop reasoning before the last answer, and answers that are not shown are left out.
        if role != "assistant" or number == answers[-1]:
            for name in _names(role, tuple(message)):
                if message[name]:
                    yield role, name, number


@lru_cache(1024)
def _names(role: str, keys: tuple[str, ...]) -> list[str]:
    """Return the fields of a message that a template should show."""
    return sorted({*keys} - _BESIDES - ({"content", "tool_calls"} if role == "assistant" else set()))


# Fields of messages that templates read rarely.
_BESIDES = {"role", "name", "id", "tool_call_id"}


def _is_shown(template: ChatTemplate, example: Example, number: int, name: str) -> bool:
    """Return whether a chat is rendered otherwise if a field, or the tools, are others; True if the template fails."""
    messages, tools = [dict(message) for message in example.messages], example.tools
    try:
        text = template.render(messages, tools=tools, **example.variables).text
        if name == "tools":
            tools = None
        elif name == "content":
            messages[number]["content"] += "q7q"
        else:
            for each in REASONING if name in REASONING else (name,):
                messages[number].pop(each, None)
        return template.render(messages, tools=tools, **example.variables).text != text
    except TemplateError:
        return True


def _has_added(encoded: Encoded, tokenizer: Tokenizer) -> bool:
    return not tokenizer.added_names.keys().isdisjoint(encoded.ids[encoded.learned].tolist())


_Left = dict[str, tuple[int, int]]
"""Reasons for omitting examples: for each reason the number of examples and the index of the first."""


def _encode(
    examples: Sequence[Example], encoder: ExampleEncoder, name: str, cache: Path | None
) -> tuple[TokenSamples, _Left]:
    """Encode examples as samples; also return the reasons for omitted examples."""
    if cache is None:
        return encode_examples(examples, encoder, name)
    template = encoder.template
    identity = json.dumps(
        [
            _CACHE_FORMAT,
            [example.sha256 for example in examples],
            encoder.tokenizer.sha256,
            None if template is None else template.sha256,
            encoder.mask_prompts,
            encoder.learn,
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
    """Return the samples in the cache; None if they are missing or damaged."""
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
    except Exception:  # the library raises its own kinds, and the samples are then encoded again
        return None


def encode_examples(examples: Sequence[Example], encoder: ExampleEncoder, name: str) -> tuple[TokenSamples, _Left]:
    """Encode examples as samples; also return the reasons for omitted examples."""
    encoded: list[Encoded] = []
    left_out = _Left()
    index = 0
    with told_if_slow(f"encoding {name}", lambda: f"sample {index + 1:,} of {len(examples):,}"):
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
    """Format the reasons for omitting examples, the most frequent first."""
    ordered = sorted(left_out.items(), key=lambda item: -item[1][0])
    shown = [f"{count} since {reason} (first: {examples[first].where})" for reason, (count, first) in ordered]
    more = len(shown) - _REASONS_SHOWN
    return "; ".join(shown[:_REASONS_SHOWN]) + (f"; and {more} other reasons" if more > 0 else "")


def left_out_notes(examples: Sequence[Example], left_out: _Left, what: str) -> list[str]:
    """Return notes on the number of omitted examples and the reasons; empty if none was omitted."""
    if not left_out:
        return []
    total = sum(count for count, _ in left_out.values())
    return [f"{total} of {counted(len(examples), 'sample')} {what} left out: {_reasons(examples, left_out)}"]
