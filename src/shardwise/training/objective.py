"""Objectives: the sums that a micro-batch adds to the loss and to other metrics of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.data import Batch, HeldOut
from shardwise.data.batch import BatchMover
from shardwise.models.language_model import LanguageModel
from shardwise.training.gradients.base import Gradients


class Objective:
    """The loss of a run and its other metrics.

    Attributes:
        names: names of the other sums; the metrics use them for the means.
        curves: names of the plotted metrics, of a training batch and of held-out data.
        unit: unit of both plotted metrics.
        shares_samples: whether the loss is right if ranks have different positions of a sample (context parallelism).
    """

    shares_samples = False
    names: tuple[str, ...] = ()
    curves: tuple[str, str] = ("bits_per_byte", "held_out_bits_per_byte")
    unit = "bits per byte"

    @property
    def depends_on_length(self) -> bool:
        """Whether the objective has another model, whose rotary angles depend on the length of a text."""
        return False

    def inputs(self, batch: Batch) -> dict[str, Tensor | None]:
        """Return the arguments of the model's forward, which returns hidden states on all stages but the last."""
        return model_inputs(batch)

    def sums(self, output: Tensor, batch: Batch, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the loss and the other sums of a micro-batch.

        Args:
            output: output of the model's last stage.
            batch: input of the model, on its device.
            dtype: dtype in which losses are summed; their own if None.

        Returns:
            The loss, a scalar to call the backward on, not yet divided by the number of labels; and the other sums,
            ``[len(names)]``, fp64, without gradient, or None if there are no names.
        """
        raise NotImplementedError

    @property
    def for_evaluation(self) -> Objective:
        """Objective for held-out data."""
        return self

    def reported(self, means: Sequence[float], bits_per_nat: float) -> dict[str, float]:
        """Return the metrics of a step.

        Args:
            means: mean of the loss, then of each of ``names``.
            bits_per_nat: factor from nats per token to bits per byte of the training text.
        """
        return dict(zip(("loss", *self.names), means, strict=True))

    def held_out(self, sums: Sequence[float], held_out: HeldOut) -> dict[str, float]:
        """Return the metrics of held-out data, the most important first, from ``sums`` over all of the data."""
        raise NotImplementedError

    def outcome(self, held_out: dict[str, float]) -> str:
        """Return the line about ``held_out``, the metrics, for the summary of a run."""
        raise NotImplementedError


@dataclass
class CrossEntropy(Objective):
    """The cross entropy of each token that is not ignored."""

    shares_samples = True
    sum_of_losses: Callable[[Tensor, torch.dtype | None], Tensor] = Gradients().sum_of_losses

    def sums(self, output: Tensor, batch: Batch, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor | None]:
        """Sum the token losses that the model returns; see ``Objective``."""
        return self.sum_of_losses(output, dtype), None

    def reported(self, means: Sequence[float], bits_per_nat: float) -> dict[str, float]:
        """Return the loss in nats per token and in bits per byte."""
        return super().reported(means, bits_per_nat) | {"bits_per_byte": means[0] * bits_per_nat}

    def held_out(self, sums: Sequence[float], held_out: HeldOut) -> dict[str, float]:
        return {"held_out_bits_per_byte": held_out.bits_per_byte(sums[0])}

    def outcome(self, held_out: dict[str, float]) -> str:
        return f"held-out text: {held_out['held_out_bits_per_byte']:.3f} bits per byte"


def model_inputs(batch: Batch) -> dict[str, Tensor | None]:
    """Return the arguments of a model that returns the loss of each token."""
    return {
        "input_ids": batch.tokens,
        "position_ids": batch.position_ids,
        "labels": batch.labels,
        "document_ids": batch.document_ids,
        "lengths": batch.lengths,
    }


@torch.no_grad()
def outputs_of(
    model: LanguageModel,
    batches: Iterable[Batch],
    inputs: Callable[[Batch], dict[str, Tensor | None]],
    mover: BatchMover,
) -> Iterator[tuple[Tensor, Batch]]:
    """Run a model without stages in evaluation mode; yield each output with its batch on the device."""
    model.eval()
    for batch in mover.moved(batches):
        yield model(**inputs(batch)), batch


def means_of(
    objective: Objective, output: Tensor, batch: Batch, num_labels: int, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return the loss divided by ``num_labels``; and all sums ``[n]``, divided the same way, without gradient."""
    loss, others = objective.sums(output, batch, dtype)
    loss = loss / num_labels
    alone = loss.detach().view(1)
    return loss, alone if others is None else torch.cat([alone.to(others.dtype), others / num_labels])


@torch.no_grad()
def measure(model: LanguageModel, objective: Objective, held_out: HeldOut, batch_size: int) -> list[float]:
    """Return the sums of the loss (nats) and of ``objective.names`` over held-out rows, for a model without stages."""
    device = next(model.parameters()).device
    total = torch.zeros(1 + len(objective.names), dtype=torch.float64, device=device)
    batches = held_out.batches(batch_size, with_lengths=model.depends_on_length)
    for output, batch in outputs_of(model, batches, objective.inputs, BatchMover(device)):
        total += means_of(objective, output, batch, 1, torch.float64)[1]
    sums: list[float] = total.tolist()
    return sums
