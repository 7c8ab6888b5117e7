"""Fine-tuning for labels: from a Hugging Face folder to one with a classification head."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.core.errors import ConfigError
from shardwise.core.files import write_atomically
from shardwise.core.topology import Groups
from shardwise.data import (
    DataLoader,
    EncodedTexts,
    HeldOut,
    LabelledRows,
    LabelledText,
    Labels,
    encode_labelled,
    labelled_text_of,
    labelled_words_of,
    labels_of,
    read_records,
)
from shardwise.data.labelled import ProblemType, counted, usual_problem
from shardwise.data.tokenizer import Tokenizer
from shardwise.data.tokenizer.library import DeclaredTokens
from shardwise.models.adapters import LoraConfig
from shardwise.models.classification import Classification, Task
from shardwise.models.description import ModelChunks, ModelDescription
from shardwise.models.transformer_model import TransformerModel
from shardwise.run.settings import FinetuneSettings, LabelSettings, RunSettings
from shardwise.run.tasks.finetuning import Finetuning
from shardwise.run.tasks.labelling import Labelling
from shardwise.run.tasks.samples import held_out_indices
from shardwise.storage.huggingface import config_to_json, describe_model, load_pretrained
from shardwise.storage.huggingface.architectures.architecture import label_fields, label_names, usual_names
from shardwise.storage.huggingface.fields import Fields
from shardwise.storage.huggingface.pretrained import CONFIG_NAME
from shardwise.storage.huggingface.pretrained_folder import PretrainedFolder

_JOINED = (
    "the tokenizer puts no blank between words, and the model reads them joined; with add_prefix_space in its "
    "tokenizer.json it reads them as in a text"
)


@dataclass(frozen=True)
class LabelledTexts:
    """Texts with labels that a run trains and measures on.

    Attributes:
        name: what people call them.
        sha256: hex digest of the texts and labels.
        tokenizer: of the model.
        labels: what they are.
        train, held_out: rows to train and to measure on.
        notes: what was cut.
        held_out_bytes: nothing; a general-purpose compressor labels no texts.
    """

    name: str
    sha256: str
    tokenizer: Tokenizer
    labels: Labels
    train: LabelledRows
    held_out: LabelledRows
    notes: tuple[str, ...]
    held_out_bytes: bytes = b""

    @property
    def identity(self) -> Mapping[str, Any]:
        """The labels."""
        return {"labels": list(self.labels.names), "problem_type": self.labels.problem}

    @property
    def bits_per_nat(self) -> float:
        """Nothing: no text is predicted."""
        return 0.0

    def loader(self, settings: RunSettings) -> DataLoader:
        """The training batches."""
        return DataLoader(self.train, settings.training.global_batch_size, settings.training.seed)

    def held_out_rows(self, settings: RunSettings) -> HeldOut:
        """The held-out rows."""
        return HeldOut(self.held_out)


class Classifying(Finetuning):
    """A run that trains a model, or adapters of it and its head, to label texts.

    Args:
        settings: of the run.

    Attributes:
        task: what has labels, texts or their words.
        labels: what they are; known once the texts are read.

    Raises:
        ConfigError: an architecture without such a head, no padding token, or labels that contradict the model's.
    """

    labels: Labels
    leaves_sample = False
    has_plan = False

    def __init__(self, settings: FinetuneSettings) -> None:
        task = settings.labels.task
        assert task != "text-generation"
        self.task: Task = task
        super().__init__(settings)
        folder = self.folder
        self.pad_id = pad_id_of(
            folder.config.values,
            folder.path,
            folder.description,
            self.tokenizer,
            settings.labels.pad_token,
            task=task,
        )

    def check_model(self, description: ModelDescription) -> None:
        """Raise ConfigError unless the model can have the head."""
        self.folder.architecture.classifier_of(self.task)

    def _prepare(self) -> LabelledTexts:
        settings = self.settings
        name, texts = self.labelled_texts(settings.data)
        if settings.samples.held_out:
            parts = [texts, self.labelled_texts(settings.samples.held_out)[1]]
        else:
            picked = held_out_indices([_digest(text) for text in texts], settings.corpus.held_out_fraction)
            parts = [[text for index, text in enumerate(texts) if (index in picked) == held] for held in (False, True)]
        labels = self.labels_of(texts)
        train, held_out = (self.encoded(part, labels) for part in parts)
        notes = (
            *((_JOINED,) if self.task == "token-classification" and self.tokenizer.joins_words else ()),
            *train.notes("--model.sequence-length", " to train on"),
            *held_out.notes("--model.sequence-length", " held out"),
        )
        sha256 = hashlib.sha256("".join(_digest(text) for text in texts).encode()).hexdigest()
        kinds = counted(len(labels), "label") if labels.problem != "regression" else "numbers"
        name = f"{name}, {counted(len(texts), 'text')} with {kinds}"
        return LabelledTexts(name, sha256, self.tokenizer, labels, train.rows, held_out.rows, notes)

    def labelled_texts(self, paths: Sequence[str]) -> tuple[str, list[LabelledText]]:
        """What people call the data, and its texts. Raises as ``read_records`` and what reads a record."""
        name, records = read_records(paths)
        read = labelled_words_of if self.task == "token-classification" else labelled_text_of
        return name, [read(record, self.settings.corpus.text_key) for record in records]

    def labels_of(self, texts: Sequence[LabelledText]) -> Labels:
        """What labels there are. Raises as ``choose_labels``."""
        return choose_labels(self.folder, texts, self.settings.labels)

    def encoded(self, texts: Sequence[LabelledText], labels: Labels) -> EncodedTexts:
        """Rows of texts. Raises as ``encode_labelled``."""
        return encode_labelled(
            texts,
            tokenizer=self.tokenizer,
            labels=labels,
            max_length=self.settings.sequence_length,
            pad_id=self.pad_id,
            kinds=self.folder.description.num_tokentypes,
            parse_special=self.settings.special_tokens,
        )

    def read_texts(self, ranks: Any) -> Any:
        """See ``Finetuning``; the labels are known afterwards."""
        texts = super().read_texts(ranks)
        assert isinstance(texts, LabelledTexts)
        self.labels = texts.labels
        return texts

    @property
    def head(self) -> Classification:
        """The head that the model is to have, with the dropout of the settings where its class has any."""
        head, dropout = head_of(self.folder, self.task, self.labels, self.pad_id), self.settings.model.dropout
        drops = self.folder.architecture.classifier_of(self.task).dropout is not None
        return head if dropout is None or not drops else dataclasses.replace(head, dropout=dropout)

    def describe(self, vocab_size: int) -> ModelDescription:
        """The folder's model with its head."""
        return self.folder.architecture.with_head(super().describe(vocab_size), self.head)

    def load(self, **options: Any) -> TransformerModel | ModelChunks:
        """The folder's model, with its head or a new one."""
        return load_pretrained(self.folder.path, classification=self.head, **options)

    def objective(self, groups: Groups, device: torch.device) -> Labelling:
        """The loss of ``transformers``, and the accuracy."""
        return Labelling(self.head, self.labels.names)

    def adapters(self) -> LoraConfig:
        """The adapters of the settings; the head is trained whole."""
        config, folder = super().adapters(), self.folder
        parts = [folder.architecture.classifier_of(self.task).tensor]
        of_texts = self.task == "sequence-classification"
        if (
            of_texts
            and folder.description.kind == "bert"
            and not any("pooler" in name for name in folder.tensors.tensors)
        ):
            parts.append("pooler")
        return dataclasses.replace(config, modules_to_save=tuple(dict.fromkeys((*config.modules_to_save, *parts))))

    def beside_adapters(self, model: TransformerModel, out: Path) -> None:
        """Write the ``config.json`` of the model with the head, which says what the labels are."""
        config = config_to_json(
            describe_model(model),
            architecture=self.folder.architecture.model_type,
            dtype=self.folder.dtype,
            base=self.folder.config.values,
        )
        text = json.dumps(config | self.fields, indent=2) + "\n"
        write_atomically(out / CONFIG_NAME, lambda file: file.write(text.encode()))

    @property
    def fields(self) -> dict[str, Any]:
        """The labels' names."""
        return label_fields(list(self.labels.names))


def pad_id_of(
    values: Mapping[str, Any],
    path: Path,
    model: ModelDescription,
    tokenizer: Tokenizer,
    name: str | None,
    *,
    task: Task,
) -> int:
    """The token that fills up short texts: the one called ``name``, or that of ``config.json`` or the tokenizer's.

    Args:
        values: of ``config.json``.
        path: the model's folder.
        model: what is in it.
        tokenizer: of the model.
        name: of the token; None if nobody said.
        task: of the head. One of words does not look at what fills up, and any token does; ``name`` is None.

    Raises:
        ConfigError: there is none, or it is no token of the model's, or the model's head goes by another one.
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
    """What the labels of texts mean to a head; see ``usual_problem``."""
    return head.problem_type or usual_problem(texts, head.num_labels)


def choose_labels(folder: PretrainedFolder, texts: Sequence[LabelledText], settings: LabelSettings) -> Labels:
    """The labels of the folder's head, where it has one; else those of the texts.

    Raises:
        ConfigError: ``settings`` contradict the folder.
        DataError: see ``labels_of``.
    """
    head = folder.description.classification
    of_tokens = settings.task == "token-classification"
    if head is None or head.task != settings.task:
        given = "single_label_classification" if of_tokens else settings.problem_type
        if not settings.label_names:
            return labels_of(texts, num_labels=settings.num_labels, problem=given)
        return _named(settings.label_names, given or usual_problem(texts))
    if settings.num_labels not in (None, head.num_labels):
        raise ConfigError(
            f"--num-labels is {settings.num_labels}, and the head of {folder.path} has {head.num_labels} labels; leave "
            "the flag out, or start from a model without the head"
        )
    if settings.problem_type is not None and head.problem_type not in (None, settings.problem_type):
        raise ConfigError(
            f"--problem-type is {settings.problem_type}, and config.json of {folder.path} says {head.problem_type}; "
            "leave the flag out"
        )
    names = tuple(label_names(Fields(folder.config.values)))
    problem = "single_label_classification" if of_tokens else settings.problem_type or problem_of(head, texts)
    is_unnamed = list(names) == usual_names(len(names))
    if settings.label_names and (
        len(settings.label_names) != len(names) if is_unnamed else settings.label_names != names
    ):
        raise ConfigError(
            f"--label-names has {counted(len(settings.label_names), 'name')}, and the head of {folder.path} has "
            f"{counted(len(names), 'label')}{'' if is_unnamed else ': ' + ', '.join(names[:5])}; leave the flag out"
        )
    if settings.label_names:
        return _named(settings.label_names, problem)
    # A head that nobody named takes the names of the data, if they are as many.
    if is_unnamed and problem != "regression":
        named = any(isinstance(each, str) for text in texts for each in _as_list(text.label))
        return labels_of(texts, num_labels=len(names), problem=problem) if named else Labels(names, problem)
    return Labels(names, problem)


def _named(names: tuple[str, ...], problem: ProblemType) -> Labels:
    if problem == "regression":
        raise ConfigError("--label-names is given, and the labels are numbers of a regression; leave it out")
    return Labels(names, problem)


def _as_list(label: Any) -> list[Any]:
    return label if isinstance(label, list) else [label]


def head_of(folder: PretrainedFolder, task: Task, labels: Labels, pad_id: int) -> Classification:
    """The classification head for such labels: the folder's, if it has one for the task."""
    own = folder.description.classification
    kind = folder.architecture.classifier_of(task)
    dropout = kind.read(Fields(folder.config.values)).dropout
    if task == "token-classification":
        return own if own is not None and own.task == task else kind.head(len(labels), dropout=dropout)
    if own is not None and own.task == task:
        # Where transformers would look at the first batch of labels, the file is told what is so.
        own = dataclasses.replace(own, pad_token_id=pad_id) if kind.pads else own
        return own.with_problem(own.problem_type or labels.problem)
    return kind.head(len(labels), problem_type=labels.problem, pad_token_id=pad_id, dropout=dropout)


def _digest(text: LabelledText) -> str:
    return hashlib.sha256(json.dumps([text.words or text.text, text.pair, text.label]).encode()).hexdigest()
