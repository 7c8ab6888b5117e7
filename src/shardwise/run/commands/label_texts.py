"""Label texts with a classifier, and evaluate it."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Annotated, Literal

from torch import Tensor

from shardwise.core.communication.agreement import agree, check_same, gather_objects
from shardwise.core.errors import ConfigError, DataError, DivergenceError
from shardwise.data import (
    EncodedTexts,
    HeldOut,
    LabelledText,
    Labels,
    encode_labelled,
    read_labelled,
)
from shardwise.data.batch import BatchMover
from shardwise.data.json_records import counted
from shardwise.data.tokenizer import Tokenizer
from shardwise.models.classification import IGNORED_LABEL, Classification, ProblemType
from shardwise.run.commands.opened_model import (
    TO_BRING_A_TOKENIZER,
    Evaluation,
    OpenCheckpoint,
    as_tuple,
    check_fits,
    open_model,
)
from shardwise.run.processes.ranks import Ranks, open_ranks
from shardwise.run.settings import CorpusSettings
from shardwise.run.tasks.labelling import HeldOutLabels
from shardwise.run.tasks.labels import pad_id_of, problem_of
from shardwise.storage.huggingface.architectures.architecture import label_names
from shardwise.storage.huggingface.fields import Fields
from shardwise.training.bounds import BATCH, DEFAULT_BATCH, DEFAULT_TIMEOUT, SEQUENCE, TIMEOUT, checks_arguments
from shardwise.training.objective import measure, outputs_of


@dataclass(frozen=True)
class OpenClassifier:
    """A classifier without its tensors.

    Attributes:
        model: the opened model.
        tokenizer: the model's tokenizer.
        head: the model's classification head.
        names: names of the labels.
        pad_id: token id of the padding.
    """

    model: OpenCheckpoint
    tokenizer: Tokenizer
    head: Classification
    names: tuple[str, ...]
    pad_id: int

    def encode(
        self,
        texts: Sequence[LabelledText],
        labels: Labels | None,
        *,
        sequence_length: int | None,
        special_tokens: bool,
    ) -> EncodedTexts:
        """Encode texts as rows.

        Raises:
            ConfigError: ``sequence_length`` is above the model's maximum.
            DataError: see ``encode_labelled``.
        """
        return encode_labelled(
            texts,
            tokenizer=self.tokenizer,
            labels=labels,
            max_length=self.model.sequence_length(sequence_length),
            pad_id=self.pad_id,
            kinds=self.model.description.num_tokentypes,
            parse_special=special_tokens,
        )


def open_classifier(
    checkpoint: str | PathLike[str], adapter: str | PathLike[str] | None, world_size: int
) -> OpenClassifier:
    """Open a classifier and its tokenizer.

    Raises:
        ConfigError: the model is not a classifier, or cannot be split over this many ranks.
        CheckpointError: the model is missing or damaged.
        DataError: the tokenizer is missing or damaged.
    """
    opened = open_model(checkpoint, adapter)
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
    return OpenClassifier(opened, opened.tokenizer, head, tuple(label_names(Fields(values))), pad_id)


@checks_arguments
def classify(
    checkpoint: str | PathLike[str],
    text: str | Sequence[str] = (),
    *,
    data: str | Sequence[str] = (),
    lines: Iterable[str] | None = None,
    adapter: str | PathLike[str] | None = None,
    sequence_length: Annotated[int | None, SEQUENCE] = None,
    batch_size: Annotated[int, BATCH] = DEFAULT_BATCH,
    special_tokens: bool = True,
    text_key: str = CorpusSettings.text_key,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    timeout: Annotated[float, TIMEOUT] = DEFAULT_TIMEOUT,
    on_answer: Callable[[object], object] | None = None,
    on_note: Callable[[str], object] | None = None,
) -> list[object]:
    """Label texts; every rank calls.

    Args:
        checkpoint: Hugging Face folder, folder of an import, or folder of adapters that names its base model.
        text: text or texts to label; a model that labels words splits them at spaces.
        data: instead of ``text``, files and folders of records, in the formats that ``finetune`` reads.
        lines: instead of ``text``, lines to label, read on the first rank. The answer to a line without a token is
            None.
        adapter: folder of adapters to apply to the model.
        sequence_length: maximum tokens of a text; the end of a longer text is cut off. If None, 512 or the model's
            maximum, whichever is less.
        batch_size: texts per batch.
        special_tokens: parse the names of special tokens in texts as special tokens.
        text_key: field of a record that has the text or the words.
        device: device of the model; "auto" takes a GPU if every rank can have one.
        timeout: maximum wait for another rank, in seconds.
        on_answer: callback on the first rank; receives each answer as soon as it is known.
        on_note: callback on the first rank; receives each line for the user.

    Returns:
        An answer for each text, on every rank, in the format of the transformers pipeline: ``{"label": ..., "score":
        ...}``. A multi-label model returns a list of the labels with a probability above 0.5, a regression ``{"scores":
        [...]}``, and a model that labels words a list of ``{"word": ..., "label": ..., "score": ...}``.

    Raises:
        ConfigError: an argument is out of range, not exactly one of ``text``, ``data`` and ``lines`` is given, the
            model has no classification head, or it cannot be split over this many ranks.
        CheckpointError: the model is missing or damaged.
        DataError: a text has no token, data cannot be read, or the tokenizer is missing.
    """
    given, files = as_tuple(text), as_tuple(data)
    answers: list[object] = []
    with open_ranks(device, timeout=timeout) as ranks:
        tell = ranks.on_first(on_answer)

        def say(said: object) -> None:
            answers.append(said)
            tell(said)

        opened = agree(lambda: open_classifier(checkpoint, adapter, ranks.world_size), group=ranks.control)
        of_tokens = opened.head.is_of_tokens
        texts = agree(
            lambda: _texts(given, files, lines, text_key, of_tokens) if ranks.is_first else [], group=ranks.control
        )
        texts = gather_objects(texts, "the texts", group=ranks.control)[0]
        rest, kept = iter(texts), texts
        if not (files or given):
            kept = [each for each in texts if _has_tokens(opened, each, special_tokens)]
            # A blank line without tokens also gets an answer, so that answers keep their line numbers.
            rest = _after_none_for(texts, kept, say)
        if kept:
            encode = partial(opened.encode, kept, None, sequence_length=sequence_length, special_tokens=special_tokens)
            rows = _rows(encode, ranks, on_note)
            model = opened.model.load_model(ranks)
            batches = rows.batches(min(batch_size, len(rows)), with_lengths=model.depends_on_length)
            with ranks.phase("labelling", limited=True):
                inputs = HeldOutLabels(opened.head).inputs
                for logits, batch in outputs_of(model, batches, inputs, BatchMover(ranks.device)):
                    # Rows of padding come after all texts.
                    for row, words, labelled in zip(logits.double().cpu(), batch.labels.tolist(), rest, strict=False):
                        if labelled.words is None:
                            say(answer(opened.head, opened.names, row))
                        else:
                            say(answer_words(opened.names, row, words, labelled.words))
        # Answer the blank lines after the last text.
        next(rest, None)
    return answers


def _has_tokens(opened: OpenClassifier, text: LabelledText, parse_special: bool) -> bool:
    """True if a line has a token; some tokenizers give one even to an empty line."""
    if text.text.strip():
        return True
    length = opened.model.sequence_length(None)
    return bool(opened.tokenizer.encode_framed(text.content, max_length=length, parse_special=parse_special).ids)


def _after_none_for(
    texts: Sequence[LabelledText], kept: Sequence[LabelledText], say: Callable[[object], object]
) -> Iterator[LabelledText]:
    """Yield the texts that are ``kept``, and report None as the answer to each other text in order."""
    places = {id(text) for text in kept}
    for text in texts:
        if id(text) in places:
            yield text
        else:
            say(None)


def _texts(
    given: Sequence[str], files: Sequence[str], lines: Iterable[str] | None, text_key: str, of_tokens: bool
) -> list[LabelledText]:
    if files and given:
        raise ConfigError("--data and --text both say what to label; leave one out")
    if files:
        return read_labelled(files, text_key, of_words=of_tokens, needs_labels=False)[1]
    if not given and lines is None:
        raise ConfigError("there is nothing to label; give one of text, data and lines")
    each = given or [line.rstrip("\r\n") for line in lines or ()]
    where = "--text" if given else "standard input, line"
    return [
        LabelledText(f"{where} {number}", text, None, None, tuple(text.split()) if of_tokens else None)
        for number, text in enumerate(each, 1)
    ]


def answer(head: Classification, names: Sequence[str], logits: Tensor) -> object:
    """Return the answer for a text.

    Args:
        head: the model's classification head.
        names: names of the labels.
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
    """Return the answer for each word; its label is None for a word without a token.

    Args:
        names: names of the labels.
        logits: ``[s, n]``.
        numbers: ``[s]``, the index of the word that starts at each token; -100 for other tokens.
        words: words of the text.
    """
    said = {number: named(names, row) for row, number in zip(logits, numbers, strict=True) if number != IGNORED_LABEL}
    unknown = {"label": None, "score": None}
    return [{"word": word, **said.get(number, unknown)} for number, word in enumerate(words)]


def named(names: Sequence[str], logits: Tensor) -> dict[str, object]:
    """Return the most likely label of ``logits`` ``[n]`` and its probability."""
    scores = logits.softmax(dim=-1)
    best = int(scores.argmax())
    return {"label": names[best], "score": float(scores[best])}


def _rows(encode: Callable[[], EncodedTexts], ranks: Ranks, on_note: Callable[[str], object] | None) -> HeldOut:
    """Encode the texts on every rank; the first rank reports cut texts. Raises as ``OpenClassifier.encode``."""
    encoded = agree(encode, group=ranks.control)
    for note in encoded.notes("--sequence-length"):
        ranks.on_first(on_note)(note)
    return HeldOut(encoded.rows)


def evaluate_labels(
    opened: OpenClassifier,
    ranks: Ranks,
    data: Sequence[str],
    *,
    sequence_length: int | None,
    batch_size: int,
    special_tokens: bool,
    text_key: str,
    on_note: Callable[[str], object] | None,
) -> Evaluation:
    """Evaluate a classifier on data; see ``evaluate``. Every rank calls.

    Raises:
        ConfigError: ``sequence_length`` is above the model's maximum.
        DataError: data cannot be read, or the model lacks one of its labels.
        DivergenceError: the loss is not finite.
    """

    of_tokens = opened.head.is_of_tokens
    name, texts = agree(lambda: read_labelled(data, text_key, of_words=of_tokens), group=ranks.control)
    check_same((name, len(texts)), "the data", group=ranks.control)
    if of_tokens:
        problem: ProblemType = "single_label_classification"
        objective = HeldOutLabels(opened.head, opened.names)
    else:
        problem = agree(lambda: problem_of(opened.head, texts), group=ranks.control)
        objective = HeldOutLabels(opened.head.with_problem(problem))
    labels = Labels(opened.names, problem)
    encode = partial(opened.encode, texts, labels, sequence_length=sequence_length, special_tokens=special_tokens)
    rows = _rows(encode, ranks, on_note)
    model = opened.model.load_model(ranks)
    with ranks.phase("labelling", limited=True):
        measured = objective.scores(measure(model, objective, rows, min(batch_size, len(rows))))
    if not math.isfinite(measured["held_out_loss"]):
        raise DivergenceError(f"the loss on {name} is {measured['held_out_loss']}: the model's weights have diverged")
    titles = {key: objective.titles.get(key, key.removeprefix("held_out_")) for key in measured}
    return Evaluation(f"{name}: {counted(len(texts), 'text')}", {titles[key]: value for key, value in measured.items()})
