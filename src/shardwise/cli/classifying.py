"""Label texts, and measure how well: what the ranks of ``shardwise classify``, and of ``eval`` on a classifier, do."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardwise.cli.classify import ClassifyArguments
from shardwise.cli.eval import EvalArguments
from shardwise.cli.reporting import print_line
from shardwise.core.communication.agreement import agree, check_same, gather_objects
from shardwise.core.errors import ConfigError, DataError, DivergenceError
from shardwise.data import (
    EvaluationRows,
    LabelledText,
    Labels,
    encode_labelled,
    evaluation_batches,
    labelled_text_of,
    labelled_words_of,
    read_records,
)
from shardwise.data.labelled import ProblemType, counted
from shardwise.data.tokenizer import Tokenizer
from shardwise.models.classification import IGNORED_LABEL, Classification
from shardwise.run.commands.opened_model import TO_BRING_A_TOKENIZER, OpenCheckpoint, check_fits, open_model
from shardwise.run.processes.ranks import Ranks, open_ranks
from shardwise.run.tasks.classifying import pad_id_of, problem_of
from shardwise.run.tasks.labelling import HeldOutLabels
from shardwise.storage.huggingface.architectures.classifier import label_names
from shardwise.storage.huggingface.fields import Fields

_USUAL_SEQUENCE_LENGTH = 512


@dataclass(frozen=True)
class Opened:
    """A model that labels texts, without its tensors.

    Attributes:
        model: where it is.
        tokenizer: of the model.
        head: of the model.
        names: of its labels.
        pad_id: what fills up short texts.
    """

    model: OpenCheckpoint
    tokenizer: Tokenizer
    head: Classification
    names: tuple[str, ...]
    pad_id: int

    def length(self, given: int | None) -> int:
        """Most tokens of a text. Raises ConfigError if that is more than the model's longest."""
        longest = self.model.description.max_sequence_length
        length = given or min(_USUAL_SEQUENCE_LENGTH, longest)
        if length > longest:
            raise ConfigError(f"--sequence-length {length} is more than {longest}, the longest sequence of the model")
        return length


def open_classifier(checkpoint: str, adapter: str | None, world_size: int) -> Opened:
    """A model that labels texts, and its tokenizer.

    Raises:
        ConfigError: another model, or more ranks than it can be split over.
        CheckpointError: no model there, or a damaged one.
        DataError: no tokenizer, or a damaged one.
    """
    opened = open_model(Path(checkpoint), None if adapter is None else Path(adapter))
    check_fits(opened.description, world_size)
    head = opened.description.classification
    if head is None or opened.config is None:
        raise ConfigError(
            f"{opened.folder} holds a model without a head for labels; shardwise finetune --task "
            "sequence-classification makes one that labels texts, and token-classification one that labels words"
        )
    if opened.tokenizer is None:
        raise DataError(f"{opened.folder} has no tokenizer; {TO_BRING_A_TOKENIZER}, and import it again")
    values = opened.config.values
    pad_id = pad_id_of(values, opened.folder, opened.description, opened.tokenizer, None, task=head.task)
    return Opened(opened, opened.tokenizer, head, tuple(label_names(Fields(values))), pad_id)


def classify(arguments: ClassifyArguments) -> None:
    """Print the labels of the texts; every rank calls.

    Raises:
        ShardwiseError: see ``open_classifier``; a text of no tokens, or data that cannot be read; on every rank.
    """
    with open_ranks(arguments.device, timeout=arguments.timeout) as ranks:
        opened = agree(
            lambda: open_classifier(arguments.checkpoint, arguments.adapter, ranks.world_size), group=ranks.control
        )
        of_tokens = opened.head.is_of_tokens
        texts = agree(lambda: _texts(arguments, of_tokens) if ranks.is_first else [], group=ranks.control)
        texts = gather_objects(texts, "the texts", group=ranks.control)[0]
        if not texts:
            return
        rest = iter(texts)
        if not (arguments.data or arguments.text):
            kept = [text for text in texts if _has_tokens(opened, text, arguments.special_tokens)]
            # A blank line of which nothing can be said has a line of output too, so that these keep their numbers.
            rest = _after_null_for(texts, kept) if ranks.is_first else iter(kept)
            texts = kept
        for logits, (_, numbers, *_) in _outputs(opened, ranks, arguments, texts, None) if texts else ():
            if ranks.is_first:
                for row, words, text in zip(logits.double().cpu(), numbers.tolist(), rest, strict=False):
                    if text.words is None:
                        said = answer(opened.head, opened.names, row)
                    else:
                        said = answer_words(opened.names, row, words, text.words)
                    print(json.dumps(said, ensure_ascii=False), flush=True)
        # Blank lines after the last text.
        next(rest, None)


def _has_tokens(opened: Opened, text: LabelledText, parse_special: bool) -> bool:
    """Whether a line has any token; of some tokenizers the empty one has."""
    if text.text.strip():
        return True
    tokenizer, length = opened.tokenizer, opened.length(None)
    if text.words is not None:
        return bool(tokenizer.encode_words(text.words, max_length=length, parse_special=parse_special)[0])
    return bool(tokenizer.encode_framed(text.text, max_length=length, parse_special=parse_special)[0])


def _after_null_for(texts: Sequence[LabelledText], kept: Sequence[LabelledText]) -> Iterator[LabelledText]:
    """The texts that are ``kept``; each of the others prints null in its place."""
    places = {id(text) for text in kept}
    for text in texts:
        if id(text) in places:
            yield text
        else:
            print("null", flush=True)


def _texts(arguments: ClassifyArguments, of_tokens: bool) -> list[LabelledText]:
    if arguments.data and arguments.text:
        raise ConfigError("--data and --text both say what to label; leave one out")
    if arguments.data:
        _, records = read_records(arguments.data)
        if of_tokens:
            return [labelled_words_of(record, arguments.text_key, needs_labels=False) for record in records]
        return [labelled_text_of(record, arguments.text_key, needs_label=False) for record in records]
    lines = arguments.text or tuple(line.rstrip("\r\n") for line in sys.stdin)
    where = "--text" if arguments.text else "standard input, line"
    return [
        LabelledText(f"{where} {number}", text, None, None, tuple(text.split()) if of_tokens else None)
        for number, text in enumerate(lines, 1)
    ]


def answer(head: Classification, names: Sequence[str], logits: Tensor) -> object:
    """What is said of a text.

    Args:
        head: of the model.
        names: of the labels.
        logits: ``[n]``.
    """
    problem = head.problem_type or ("regression" if head.num_labels == 1 else "single_label_classification")
    if problem == "regression":
        return {"scores": logits.tolist()}
    if problem == "multi_label_classification":
        pairs = sorted(zip(logits.sigmoid().tolist(), names, strict=True), reverse=True)
        return [{"label": name, "score": score} for score, name in pairs if score > 0.5]
    return named(names, logits)


def answer_words(
    names: Sequence[str], logits: Tensor, numbers: Sequence[int], words: Sequence[str]
) -> list[dict[str, object]]:
    """What is said of each word; null of those of which no token is left.

    Args:
        names: of the labels.
        logits: ``[s, n]``.
        numbers: ``[s]``: of each token that begins a word, which that is; -100 of the others.
        words: of the text.
    """
    said = {number: named(names, row) for row, number in zip(logits, numbers, strict=True) if number != IGNORED_LABEL}
    unknown = {"label": None, "score": None}
    return [{"word": word, **said.get(number, unknown)} for number, word in enumerate(words)]


def named(names: Sequence[str], logits: Tensor) -> dict[str, object]:
    """The likeliest label of ``logits`` ``[n]``, and its probability."""
    scores = logits.softmax(dim=-1)
    best = int(scores.argmax())
    return {"label": names[best], "score": float(scores[best])}


def _outputs(
    opened: Opened,
    ranks: Ranks,
    arguments: ClassifyArguments | EvalArguments,
    texts: Sequence[LabelledText],
    labels: Labels | None,
) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
    """The logits of each batch, of texts and no filling, and the batch."""
    encoded = agree(
        lambda: encode_labelled(
            texts,
            tokenizer=opened.tokenizer,
            labels=labels,
            max_length=opened.length(arguments.sequence_length),
            pad_id=opened.pad_id,
            kinds=opened.model.description.num_tokentypes,
            parse_special=arguments.special_tokens,
        ),
        group=ranks.control,
    )
    for note in encoded.notes("--sequence-length") if ranks.is_first else ():
        print_line(f"note: {note}")
    model = opened.model.load_model(ranks)
    model.eval()
    objective = HeldOutLabels(opened.head)
    windows = EvaluationRows(encoded.rows)
    left = len(windows)
    with torch.no_grad(), ranks.phase("labelling", limited=True):
        batches = evaluation_batches(windows, min(arguments.batch_size, left), with_lengths=model.depends_on_length)
        for batch in batches:
            moved = tuple(tensor.to(ranks.device) for tensor in batch)
            logits: Tensor = model(**objective.inputs(moved))
            yield logits[:left], tuple(tensor[:left] for tensor in moved)
            left -= min(left, len(logits))


def evaluate_labels(arguments: EvalArguments, ranks: Ranks, opened: Opened) -> None:
    """Print how well a model labels the data; every rank calls.

    Raises:
        ShardwiseError: data that cannot be read, or labels that are none of the model's; on every rank.
    """

    def read() -> tuple[str, list[LabelledText]]:
        name, records = read_records(arguments.data)
        of_record = labelled_words_of if of_tokens else labelled_text_of
        return name, [of_record(record, arguments.text_key) for record in records]

    of_tokens = opened.head.is_of_tokens
    name, texts = agree(read, group=ranks.control)
    check_same((name, len(texts)), "the data", group=ranks.control)
    if of_tokens:
        problem: ProblemType = "single_label_classification"
        objective = HeldOutLabels(opened.head, opened.names)
    else:
        problem = agree(lambda: problem_of(opened.head, texts), group=ranks.control)
        objective = HeldOutLabels(opened.head.with_problem(problem))
    sums = torch.zeros(1 + len(objective.names), dtype=torch.float64)
    for logits, batch in _outputs(opened, ranks, arguments, texts, Labels(opened.names, problem)):
        loss, counts = objective.sums(logits, batch, torch.float64)
        assert counts is not None
        sums += torch.cat([loss.view(1), counts]).cpu()
    measured = objective.scores(sums.tolist())
    if not math.isfinite(measured["held_out_loss"]):
        raise DivergenceError(f"the loss on {name} is {measured['held_out_loss']}: the model's weights have diverged")
    if ranks.is_first:
        print(f"data            {name}: {counted(len(texts), 'text')}")
        for key, value in measured.items():
            print(f"{objective.titles.get(key, key.removeprefix('held_out_')):<15} {value:.6f}")
