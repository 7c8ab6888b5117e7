"""The objective of a classifier, and its metrics on held-out texts, including the F1 of entities."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication.collectives import split_for_rank
from shardwise.data import Batch, HeldOut
from shardwise.models.classification import IGNORED_LABEL, Classification
from shardwise.training.objective import Objective

_INSIDE = ("B", "I", "E", "S")


def mark_entities(names: Sequence[str]) -> bool:
    """True if the labels mark entities: ``O``, or ``B-``, ``I-``, ``E-`` or ``S-`` and a kind."""
    marks = [name.partition("-") for name in names if name != "O"]
    return bool(marks) and all(prefix in _INSIDE and kind for prefix, _, kind in marks)


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Return kind, first word and end (exclusive) of each entity.

    An entity starts at ``B-`` and ``S-``, and at an ``I-`` or ``E-`` that continues no entity of its kind. It ends
    after ``E-`` and ``S-``, and before a tag that does not continue it. The rules are those of ``conlleval`` of CoNLL
    2000 and of ``seqeval``.

    Args:
        tags: labels of a text's words, in order.
    """
    found: set[tuple[str, int, int]] = set()
    kind, begin, last = "", 0, "O"
    for place, tag in enumerate((*tags, "O")):
        prefix, _, name = tag.partition("-")
        goes_on = prefix in ("I", "E") and last in ("B", "I") and name == kind
        if last != "O" and not goes_on:
            found.add((kind, begin, place))
        if not goes_on:
            kind, begin = name, place
        last = prefix
    return found


@dataclass
class Labelling(Objective):
    """The loss of ``transformers`` for texts or words, and the accuracy, except for a regression.

    Attributes:
        head: classification head of the model.
        label_names: names of the labels.
        group: the ranks that share samples, each of which counts some of them; None if no ranks do.
    """

    head: Classification
    label_names: tuple[str, ...] = ()
    group: ProcessGroup | None = None

    shares_samples = True
    curves = ("loss", "held_out_loss")
    unit = "loss"

    @property
    def is_regression(self) -> bool:
        """True if labels are numbers, for which accuracy is not defined."""
        return self.head.problem_type == "regression"

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]  # depends on the head
        """The accuracy, except for a regression."""
        return () if self.is_regression else ("accuracy",)

    def inputs(self, batch: Batch) -> dict[str, Tensor | None]:
        """Return ids and, for a bidirectional model, token types and mask; the model then returns logits."""
        if batch.attention_mask is None:
            # Padding is on the right, and a causal model does not attend to later tokens.
            return {"input_ids": batch.tokens, "lengths": batch.lengths}
        return {
            "input_ids": batch.tokens,
            "tokentype_ids": batch.tokentype_ids,
            "attention_mask": batch.attention_mask,
        }

    def sums(self, output: Tensor, batch: Batch, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor | None]:
        """See ``Objective``."""
        logits, labels = self._counted(output, self._labels(batch))
        loss = self.head.loss(logits, labels).sum(dtype=dtype)
        if self.is_regression:
            return loss, None
        if self.head.problem_type == "multi_label_classification":
            right = (chosen(self.head, logits) == _truth(self.head, labels)).all(dim=-1)
        else:
            right = logits.argmax(dim=-1) == labels
        return loss, right.sum(dtype=torch.float64).view(1)

    def _labels(self, batch: Batch) -> Tensor:
        """Return the labels of the samples whose logits this rank has."""
        return batch.labels if self.group is None else split_for_rank(batch.labels, dim=0, group=self.group)

    def _counted(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the texts or tokens except padding, and their labels; in training also tokens without a label."""
        if self.head.is_of_tokens:
            logits, labels = logits.flatten(0, 1), labels.reshape(-1, 1)
        if torch.is_grad_enabled():
            # Training batches have no padding texts.
            counts = None
        elif labels.is_floating_point():
            counts = ~labels.isnan().any(dim=1)
        else:
            counts = labels[:, 0] != IGNORED_LABEL
        if counts is not None:
            logits, labels = logits[counts], labels[counts]
        return logits, labels if labels.is_floating_point() else labels[:, 0]

    @property
    def of_evaluation(self) -> Objective:
        """Evaluate by counts for accuracy and F1."""
        return HeldOutLabels(self.head, self.label_names, self.group)


class HeldOutLabels(Labelling):
    """Metrics on held-out texts or words: mean loss, accuracy, and F1 averaged over labels (macro).

    With several labels, a text is correct if all of its labels are. A label that no text has and that was never
    predicted has no F1. If word labels mark entities, F1 is that of the entities; kind, first and last word must be
    correct.
    """

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]  # depends on the head
        """Numbers of texts and of correct texts, and true positives, false positives and false negatives per label."""
        if self.is_regression:
            return ("texts",)
        counts = (f"{what} {index}" for what in ("found", "wrong", "missed") for index in range(self.head.num_labels))
        return ("texts", "right", *(("found", "wrong", "missed") if self._marks_entities else counts))

    @property
    def titles(self) -> dict[str, str]:
        """Titles of the metrics whose names are not clear enough."""
        return {"held_out_f1": "entity F1" if self._marks_entities else "macro F1"}

    @property
    def _marks_entities(self) -> bool:
        return self.head.is_of_tokens and mark_entities(self.label_names)

    def sums(self, output: Tensor, batch: Batch, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor | None]:
        """See ``Objective``."""
        logits, labels = self._counted(output, self._labels(batch))
        loss = self.head.loss(logits, labels).sum(dtype=dtype)
        texts = loss.new_full((1,), len(logits), dtype=torch.float64)
        if self.is_regression:
            return loss, texts
        mine, truth = chosen(self.head, logits), _truth(self.head, labels)
        counts = [(mine == truth).all(dim=-1).sum().view(1)]
        if self._marks_entities:
            counts.append(self._count_entities(output, self._labels(batch)))
        else:
            counts += self._count_labels(mine, truth)
        return loss, torch.cat([texts, *(each.double() for each in counts)])

    def _count_labels(self, mine: Tensor, truth: Tensor) -> list[Tensor]:
        return [(first & second).sum(dim=0) for first, second in ((mine, truth), (mine, ~truth), (~mine, truth))]

    def _count_entities(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return true positives, false positives and false negatives of entities, ``[3]``."""
        counts = torch.zeros(3, dtype=torch.float64)
        for row, numbers in zip(logits.argmax(dim=-1).tolist(), labels.tolist(), strict=True):
            places = [place for place, number in enumerate(numbers) if number != IGNORED_LABEL]
            mine, truth = (entities([self.label_names[each[place]] for place in places]) for each in (row, numbers))
            counts += torch.tensor([len(mine & truth), len(mine - truth), len(truth - mine)])
        return counts.to(logits.device)

    def held_out(self, sums: Sequence[float], held_out: HeldOut) -> dict[str, float]:
        """See ``Objective``."""
        return self.scores(sums)

    def scores(self, sums: Sequence[float]) -> dict[str, float]:
        """Compute the metrics from the sums of the loss and of ``names`` over all texts."""
        loss, texts, *others = sums
        values = {"held_out_loss": loss / texts}
        if not others:
            return values
        right, n = others[0], (len(others) - 1) // 3
        found, wrong, missed = (others[1 + n * index : 1 + n * (index + 1)] for index in range(3))
        scores = [2 * f / (2 * f + w + m) for f, w, m in zip(found, wrong, missed, strict=True) if f + w + m > 0]
        f1 = sum(scores) / len(scores) if scores else 0.0
        return {"held_out_accuracy": right / texts, "held_out_f1": f1} | values

    def outcome(self, held_out: dict[str, float]) -> str:
        """See ``Objective``."""
        loss = f"loss {held_out['held_out_loss']:.4f}"
        if self.is_regression:
            return f"held-out texts: {loss} (mean squared error)"
        what = "words" if self.head.is_of_tokens else "texts"
        f1 = f"{self.titles['held_out_f1']} {held_out['held_out_f1']:.4f}"
        return f"held-out {what}: accuracy {held_out['held_out_accuracy']:.4f}, {f1}, {loss}"


def chosen(head: Classification, logits: Tensor) -> Tensor:
    """Return predicted labels as bools ``[b, n]``: the most likely, or if multi-label, all with probability > 0.5."""
    if head.problem_type == "multi_label_classification":
        return logits > 0
    best = logits.argmax(dim=-1, keepdim=True)
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, best, value=True)


def _truth(head: Classification, labels: Tensor) -> Tensor:
    """Return the correct labels as bools ``[b, n]``."""
    if head.problem_type == "multi_label_classification":
        return labels > 0.5
    return torch.nn.functional.one_hot(labels, head.num_labels).bool()
