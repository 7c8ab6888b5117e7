"""Direct preference optimization: from pairs of answers to a model that prefers the better ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.core.topology import Groups
from shardwise.data import IGNORE_INDEX, Batch, Example, PreferenceEncoder, Windows, preference_of, read_records
from shardwise.data.tokenizer import ChatTemplate
from shardwise.nn.loss.preference_loss import preference_loss
from shardwise.run.settings.finetune_settings import DpoSettings, PreferenceSettings
from shardwise.run.tasks.finetuning import Finetuning
from shardwise.run.tasks.pairs import Pairs, prepare_pairs
from shardwise.run.tasks.recipe import Session
from shardwise.run.tasks.reference import set_reference_
from shardwise.training.objective import Objective, model_inputs


@dataclass(frozen=True)
class PreferenceObjective(Objective):
    """The mean loss of pairs, and their rewards: ``beta`` times how much likelier an answer has become.

    Attributes:
        settings: of the loss.
    """

    settings: PreferenceSettings

    names = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
    curves = ("loss", "held_out_loss")
    unit = "loss of a pair"

    def inputs(self, batch: Batch) -> dict[str, Tensor | None]:
        """What gives minus the log-probability of each token of the answers."""
        tokens, labels, _, *lengths = batch
        return model_inputs((tokens, labels, *lengths))

    def sums(self, output: Tensor, batch: Batch, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor | None]:
        """Sums over pairs; a pair without labels is filling and counts for nothing. See ``Objective``."""
        _, labels, reference, *_ = batch
        # Whole answers are sums of many numbers, of which small differences are taken.
        ratios = -output.sum(-1, dtype=torch.float64) - reference.squeeze(1)
        chosen, rejected = ratios.view(-1, 2).unbind(1)
        num_chosen, num_rejected = (labels != IGNORE_INDEX).sum(-1).view(-1, 2).unbind(1)
        settings, is_filling = self.settings, num_chosen == 0
        loss = preference_loss(
            chosen,
            rejected,
            beta=settings.beta,
            kind=settings.loss_type,
            label_smoothing=settings.label_smoothing,
            num_chosen=num_chosen,
            num_rejected=num_rejected,
        ).masked_fill(is_filling, 0.0)
        rewards = settings.beta * torch.stack([chosen, rejected]).detach()
        margins = rewards[0] - rewards[1]
        numbers = torch.cat([rewards, margins.unsqueeze(0), (margins > 0).double().unsqueeze(0)])
        return loss.sum(), numbers.masked_fill(is_filling, 0.0).sum(1)

    def held_out(self, sums: Sequence[float], windows: Windows) -> dict[str, float]:
        """The same means of held-out pairs."""
        means = self.reported([each / len(windows) for each in sums], 0.0)
        return {f"held_out_{name}": value for name, value in means.items()}

    def outcome(self, held_out: dict[str, float]) -> str:
        """The loss, and how often the better answer has the higher reward."""
        return (
            f"held-out pairs: loss {held_out['held_out_loss']:.3f}, the chosen answer has the higher reward in "
            f"{held_out['held_out_rewards/accuracies']:.1%} of them"
        )


class PreferenceTuning(Finetuning):
    """A run on preferences; see ``Finetuning``.

    The reference is the model that the run begins with: its log-probabilities of all answers are computed before the
    first step, and kept in the run's folder.
    """

    settings: DpoSettings
    rows_per_sample = 2
    has_plan = False

    def encoder(self) -> PreferenceEncoder:
        """What turns pairs into tokens. Raises DataError if the folder's chat template is none."""
        template = ChatTemplate.load(self.folder.path)
        return PreferenceEncoder(self.tokenizer, template, parse_special=self.settings.special_tokens)

    def to_show(self) -> list[Example]:
        """The pairs of the data, in its order. Raises as ``read_records`` and ``preference_of``."""
        return self._pairs(self.settings.data)[1]

    def _pairs(self, paths: Sequence[str]) -> tuple[str, list[Example]]:
        name, records = read_records(paths)
        return name, [preference_of(record) for record in records]

    def _prepare(self) -> Pairs:
        settings = self.settings
        measured = settings.samples.held_out
        name, examples = self._pairs(settings.data)
        return prepare_pairs(
            name,
            examples,
            self._pairs(measured)[1] if measured else None,
            self.encoder(),
            settings.samples,
            sequence_length=settings.sequence_length,
            held_out_fraction=settings.corpus.held_out_fraction,
        )

    def objective(self, groups: Groups, device: torch.device) -> Objective:
        """The loss of pairs; see ``Recipe``."""
        return PreferenceObjective(self.settings.preference)

    def before(self, session: Session) -> None:
        """Find what the model that the run begins with says of all pairs; every rank calls. Raises as
        ``set_reference_``."""
        set_reference_(session, self.reference_identity())
