"""Labelled texts or words as training data, and the classification head for their labels."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardwise.core.errors import ConfigError
from shardwise.core.topology import Groups
from shardwise.data import (
    EncodedTexts,
    HeldOut,
    LabelledText,
    Labels,
    encode_labelled,
    labels_of,
    read_labelled,
)
from shardwise.data.json_records import counted
from shardwise.data.labelled import usual_problem
from shardwise.data.tokenizer import Tokenizer
from shardwise.data.tokenizer.library import DeclaredTokens
from shardwise.models.classification import Classification, HeadTask, ProblemType
from shardwise.models.description import ModelDescription
from shardwise.run.settings import FinetuneSettings, LabelSettings
from shardwise.run.tasks.labelling import Labelling
from shardwise.run.tasks.pretrained_model import PretrainedModel
from shardwise.run.tasks.task import Method
from shardwise.run.tasks.task_data import TaskData, divided, sha256_of
from shardwise.storage.huggingface.architectures.architecture import label_names, usual_names
from shardwise.storage.huggingface.fields import Fields
from shardwise.storage.huggingface.pretrained import CONFIG_NAME, PretrainedConfig, PretrainedFolder

_JOINED = (
    "the tokenizer puts no blank between words, and the model reads them joined; with add_prefix_space in its "
    "tokenizer.json it reads them as in a text"
)


class LabelledTexts(Method):
    """Train a pretrained model, with its head or a new one, to label texts or words.

    Args:
        source: source of the model, which is not built yet.

    Attributes:
        task: "sequence-classification" labels texts, "token-classification" labels words.
        pad_id: id of the padding token.

    Raises:
        ConfigError: the model has no padding token.
    """

    def __init__(self, source: PretrainedModel) -> None:
        self.source, self.settings = source, source.settings
        task = self.settings.labels.task
        assert task != "text-generation"
        self.task: HeadTask = task
        folder, pad_token = source.folder, self.settings.labels.pad_token
        self.pad_id = pad_id_of(
            folder.config.values, folder.path, folder.description, source.tokenizer, pad_token, task=task
        )

    def prepare(self) -> TaskData:
        settings, tokenizer = self.settings, self.source.tokenizer
        name, texts = self.read_texts(settings.data)
        measured = self.read_texts(settings.samples.held_out)[1] if settings.samples.held_out else None
        parts = divided(texts, measured, settings.corpus.held_out_fraction)
        labels = choose_labels(self.source.folder, texts, settings.labels)
        train, held_out = (self.encoded(part, labels) for part in parts)
        notes = (
            *((_JOINED,) if self.task == "token-classification" and tokenizer.joins_words else ()),
            *train.notes("--model.sequence-length", " to train on"),
            *held_out.notes("--model.sequence-length", " held out"),
        )
        kinds = counted(len(labels), "label") if labels.problem != "regression" else "numbers"
        return TaskData(
            f"{name}, {counted(len(texts), 'text')} with {kinds}",
            sha256_of(texts),
            tokenizer,
            train.rows,
            HeldOut(held_out.rows),
            notes,
            {"labels": list(labels.names), "problem_type": labels.problem},
            labels=labels,
            head=self._head(labels),
            held_out_sha256=sha256_of(parts[1]),
        )

    def read_texts(self, paths: Sequence[str]) -> tuple[str, list[LabelledText]]:
        """Read the name of the data and its texts. Raises as ``read_labelled``."""
        return read_labelled(paths, self.settings.corpus.text_key, of_words=self.task == "token-classification")

    def encoded(self, texts: Sequence[LabelledText], labels: Labels) -> EncodedTexts:
        """Encode texts as rows. Raises as ``encode_labelled``."""
        return encode_labelled(
            texts,
            tokenizer=self.source.tokenizer,
            labels=labels,
            max_length=self.settings.sequence_length,
            pad_id=self.pad_id,
            shortest=self.settings.parallel.cp,
            kinds=self.source.folder.description.num_tokentypes,
            parse_special=self.settings.special_tokens,
        )

    def _head(self, labels: Labels) -> Classification:
        """Return the head to train, with the dropout of the settings if the head's class has dropout."""
        return head_of(self.source.folder.config, self.task, labels, self.pad_id, self.settings.model.dropout)

    def objective(self, data: TaskData, groups: Groups, device: torch.device) -> Labelling:
        """The loss of ``transformers``, and the accuracy."""
        assert data.head is not None
        assert data.labels is not None
        return Labelling(data.head, data.labels.names, groups.cp)


def pad_id_of(
    values: Mapping[str, Any],
    path: Path,
    model: ModelDescription,
    tokenizer: Tokenizer,
    name: str | None,
    *,
    task: HeadTask,
) -> int:
    """Return the id of the padding token: the token ``name``, or the one in ``config.json`` or of the tokenizer.

    Args:
        values: fields of ``config.json``.
        path: folder of the model.
        model: description of the model.
        tokenizer: tokenizer of the model.
        name: name of the token; None if not given.
        task: task of the head. A head for words ignores padding, so any token will do; ``name`` is then None.

    Raises:
        ConfigError: no padding token is known, the model lacks it, or the model's head uses another one.
    """
    given = Fields(values, str(path / CONFIG_NAME)).optional(int, "pad_token_id")
    if task == "token-classification":
        return given if given is not None and 0 <= given < model.vocab_size else 0
    if given is None and name is None:
        name = DeclaredTokens(path).names.get("pad_token")
    if name is None and given is None:
        raise ConfigError(
            f"{path} does not say which token fills up short texts (pad_token_id in config.json); name one with "
            f"--pad-token, such as --pad-token '{tokenizer.eos_token}'"
        )
    number = given if name is None else tokenizer.id_of(name)
    if number is None:
        raise ConfigError(f"--pad-token {name!r} is no token of {path}")
    if given is not None and number != given:
        raise ConfigError(
            f"--pad-token {name!r} is token {number}, and pad_token_id of {path} is {given}; leave it out"
        )
    if not 0 <= number < model.vocab_size:
        raise ConfigError(
            f"the token that fills up short texts is {number}, outside the vocabulary of {path}, {model.vocab_size} ids"
        )
    return number


def problem_of(head: Classification, texts: Sequence[LabelledText]) -> ProblemType:
    """Return the problem type of a head, or of the labels if the head has none. See ``usual_problem``."""
    return head.problem_type or usual_problem(texts, head.num_labels)


def choose_labels(folder: PretrainedFolder, texts: Sequence[LabelledText], settings: LabelSettings) -> Labels:
    """Return the labels of the folder's head if it has one, else the labels of the texts.

    Raises:
        ConfigError: ``settings`` contradict the folder.
        DataError: see ``labels_of``.
    """
    assert settings.task != "text-generation"
    head, of_tokens = own_head(folder.config, settings.task), settings.task == "token-classification"
    if head is None:
        given = "single_label_classification" if of_tokens else settings.problem_type
        if not settings.label_names:
            return labels_of(texts, num_labels=settings.num_labels, problem=given)
        return _named(settings.label_names, given or usual_problem(texts))
    names = own_names(folder.config, head, settings, folder.path)
    problem = "single_label_classification" if of_tokens else settings.problem_type or problem_of(head, texts)
    if settings.label_names:
        return _named(settings.label_names, problem)
    is_unnamed = list(names) == usual_names(len(names))
    # A head without label names takes the names in the data if their number matches.
    if is_unnamed and problem != "regression":
        named = any(isinstance(each, str) for text in texts for each in _as_list(text.label))
        return labels_of(texts, num_labels=len(names), problem=problem) if named else Labels(names, problem)
    return Labels(names, problem)


def own_names(config: PretrainedConfig, head: Classification, settings: LabelSettings, path: Path) -> tuple[str, ...]:
    """Return the names of the labels of a model's head.

    Raises:
        ConfigError: ``settings`` contradict the head.
    """
    if settings.num_labels not in (None, head.num_labels):
        raise ConfigError(
            f"--num-labels is {settings.num_labels}, and the head of {path} has {head.num_labels} labels; leave the "
            "flag out, or start from a model without the head"
        )
    if settings.problem_type is not None and head.problem_type not in (None, settings.problem_type):
        raise ConfigError(
            f"--problem-type is {settings.problem_type}, and config.json of {path} says {head.problem_type}; leave the "
            "flag out"
        )
    names = tuple(label_names(Fields(config.values)))
    is_unnamed = list(names) == usual_names(len(names))
    if settings.label_names and (
        len(settings.label_names) != len(names) if is_unnamed else settings.label_names != names
    ):
        raise ConfigError(
            f"--label-names has {counted(len(settings.label_names), 'name')}, and the head of {path} has "
            f"{counted(len(names), 'label')}{'' if is_unnamed else ': ' + ', '.join(names[:5])}; leave the flag out"
        )
    return names


def _named(names: tuple[str, ...], problem: ProblemType) -> Labels:
    if problem == "regression":
        raise ConfigError("--label-names is given, and the labels are numbers of a regression; leave it out")
    return Labels(names, problem)


def _as_list(label: Any) -> list[Any]:
    return label if isinstance(label, list) else [label]


def head_of(
    config: PretrainedConfig, task: HeadTask, labels: Labels, pad_id: int, dropout: float | None
) -> Classification:
    """Return the classification head for ``labels``: the model's head if it has one for the task.

    Args:
        config: the model.
        task: task of the head.
        labels: labels of the data.
        pad_id: id of the padding token.
        dropout: dropout of the head, if the head's class has dropout; that of the model if None.
    """
    own, kind = own_head(config, task), config.architecture.classifier_of(task)
    usual = kind.read(Fields(config.values)).dropout
    if task == "token-classification":
        head = own or kind.head(len(labels), dropout=usual)
    elif own is not None:
        # Write the problem type, which transformers would otherwise infer from the first batch of labels.
        head = dataclasses.replace(own, pad_token_id=pad_id) if kind.pads else own
        head = head.with_problem(head.problem_type or labels.problem)
    else:
        head = kind.head(len(labels), problem_type=labels.problem, pad_token_id=pad_id, dropout=usual)
    return head if dropout is None or kind.dropout is None else dataclasses.replace(head, dropout=dropout)


def own_head(config: PretrainedConfig, task: HeadTask) -> Classification | None:
    """Return the model's head if it has one for the task."""
    head = config.description.classification
    return head if head is not None and head.task == task else None


def planned_head(config: PretrainedConfig, settings: FinetuneSettings) -> Classification | None:
    """Return the head of a run whose data is not read; None if the run predicts text.

    Raises:
        ConfigError: the number of labels is unknown, or ``settings`` contradict the model's head.
    """
    labels, task = settings.labels, settings.labels.task
    if task == "text-generation":
        return None
    names = labels.label_names or tuple(usual_names(labels.num_labels or 0))
    problem = labels.problem_type or ("regression" if len(names) == 1 else "single_label_classification")
    if (head := own_head(config, task)) is not None:
        names = own_names(config, head, labels, Path(settings.base))
        problem = labels.problem_type or head.problem_type or problem
    if not names:
        raise ConfigError("a plan reads no data, whose labels it could count; give their number with --num-labels")
    pad_id = Fields(config.values).optional(int, "pad_token_id") or 0
    return head_of(config, task, Labels(names, problem), pad_id, settings.model.dropout)
