"""How Hugging Face's folders say what a classification head is, and what its labels are called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.core.errors import ConfigError
from shardwise.models.classification import Classification, Task
from shardwise.storage.huggingface.fields import Fields

PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")

_USUAL_NUM_LABELS = 2
_USUAL_DROPOUT = 0.1


@dataclass(frozen=True)
class ClassifierFormat:
    """An architecture's class for a task.

    Attributes:
        task: labels are of sequences or of tokens.
        class_name: in ``architectures``.
        tensor: the head's name in files.
        bias: the head has one.
        dropout: fields that say how much is dropped before the head, 0.1 if none is there; None if nothing is.
        pads: the head of sequences looks at the last token that is no padding.
    """

    task: Task
    class_name: str
    tensor: str
    bias: bool
    dropout: tuple[str, ...] | None = None
    pads: bool = True

    def read(self, fields: Fields) -> Classification:
        """The head that a ``config.json`` describes.

        Raises:
            ConfigError: a value that is not offered, or label names that contradict their number.
        """
        dropout = 0.0
        if self.dropout is not None:
            dropout = fields.get(float, *self.dropout, default=_USUAL_DROPOUT, within=(0, 1))
        problem_type = fields.optional(str, "problem_type")
        if problem_type not in (None, *PROBLEM_TYPES):
            raise fields.error("problem_type", problem_type, f"null or one of {', '.join(PROBLEM_TYPES)}")
        of_sequences = self.task == "sequence-classification"
        return self.head(
            len(label_names(fields)),
            problem_type=problem_type if of_sequences else None,
            pad_token_id=fields.optional(int, "pad_token_id"),
            dropout=dropout,
        )

    def head(
        self,
        num_labels: int,
        *,
        problem_type: Any = None,
        pad_token_id: int | None = None,
        dropout: float = 0.0,
    ) -> Classification:
        """The head of that many labels, as this class has it."""
        pad = pad_token_id if self.pads and self.task == "sequence-classification" else None
        return Classification(self.task, num_labels, problem_type, self.bias, pad, dropout)

    def write(self, head: Classification) -> dict[str, Any]:
        """The fields that say so, but for the labels' names.

        Raises:
            ConfigError: the class has no such head.
        """
        if head.bias != self.bias:
            raise ConfigError(
                f"{self.class_name} has a head {'with' if self.bias else 'without'} a bias, and this one is otherwise"
            )
        fields: dict[str, Any] = {"problem_type": head.problem_type}
        if self.pads and head.task == "sequence-classification":
            fields["pad_token_id"] = head.pad_token_id
        if self.dropout is not None:
            fields["classifier_dropout"] = head.dropout
        return fields


def classifiers(
    name: str,
    *,
    of_tokens: bool = True,
    token_tensor: str = "score",
    token_dropout: tuple[str, ...] = ("classifier_dropout", "hidden_dropout"),
) -> tuple[ClassifierFormat, ...]:
    """The usual heads of a causal model: ``NameForSequenceClassification`` and ``NameForTokenClassification``."""
    of_sequences = ClassifierFormat("sequence-classification", f"{name}ForSequenceClassification", "score", bias=False)
    tokens = ClassifierFormat(
        "token-classification", f"{name}ForTokenClassification", token_tensor, bias=True, dropout=token_dropout
    )
    return (of_sequences, tokens) if of_tokens else (of_sequences,)


def label_names(fields: Fields) -> list[str]:
    """The labels' names in order, by ``id2label``; as many as ``num_labels`` says, or two, if that is missing.

    Raises:
        ConfigError: it is no such table, or its length is not ``num_labels``.
    """
    given = fields.optional(int, "num_labels")
    table = fields.values.get("id2label")
    if table is None:
        count = _USUAL_NUM_LABELS if given is None else given
        if not 1 <= count <= 1 << 20:
            raise fields.error("num_labels", count, f"from 1 to {1 << 20}")
        return usual_names(count)
    names = table if isinstance(table, dict) else {}
    wanted = {str(index) for index in range(len(names))}
    if not names or names.keys() != wanted or not all(isinstance(name, str) for name in names.values()):
        raise fields.error("id2label", table, 'an object that names each label: {"0": ..., "1": ...}')
    if given not in (None, len(names)):
        raise fields.error("num_labels", given, f"the number of labels in id2label, {len(names)}")
    return [names[str(index)] for index in range(len(names))]


def usual_names(count: int) -> list[str]:
    """The names that labels have where nobody gave them any."""
    return [f"LABEL_{index}" for index in range(count)]


def label_fields(names: list[str]) -> dict[str, Any]:
    """``id2label`` and ``label2id`` of labels with these names, in order."""
    return {
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
    }


def with_label_fields(values: Mapping[str, Any], num_labels: int) -> dict[str, Any]:
    """``values`` with names for so many labels, those that they have where these are as many."""
    kept = {name: value for name, value in values.items() if name != "num_labels"}
    table = values.get("id2label")
    return (
        kept if isinstance(table, dict) and len(table) == num_labels else kept | label_fields(usual_names(num_labels))
    )
