"""What a run trains, on what, and what it does besides: the parts in which runs differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from shardwise.core.topology import Groups
from shardwise.run.build import build_model, describe
from shardwise.run.processes.ranks import Ranks
from shardwise.run.tasks.texts import TrainingData, prepare_texts, share_texts
from shardwise.run.wording import summary
from shardwise.storage.huggingface.description import ModelDescription
from shardwise.training.objective import Objective
from shardwise.training.settings import RunSettings, Settings

if TYPE_CHECKING:
    from shardwise.run.finishing import Outcome
    from shardwise.run.session import Session


class Recipe:
    """A run that trains a new model; other runs override what they do otherwise.

    Args:
        settings: of the run.

    Attributes:
        settings: likewise, with what making the recipe has decided.
        identity: the model that the run starts from, as checkpoints record it; nothing for a new one.
        trains_weights: all weights of the model, not adapters beside them.
        rows_per_sample: sequences that a sample of a batch is.
        has_plan: whether ``shardwise plan`` knows what the run needs if it trains all weights.
        leaves_sample: the run ends with a text by the model.
    """

    identity: Mapping[str, Any] = {}
    trains_weights = True
    rows_per_sample = 1
    has_plan = True
    leaves_sample = True
    build_model = staticmethod(build_model)

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings

    def read_texts(self, ranks: Ranks) -> TrainingData:
        """What is trained and measured on; every rank calls. Raises as ``share_texts``.

        ``settings`` may be others afterwards, if the number of steps depends on what there is.
        """
        settings = self.settings
        assert isinstance(settings, Settings)
        return share_texts(lambda: prepare_texts(settings), ranks)

    def describe(self, vocab_size: int) -> ModelDescription:
        """The model, whose tokenizer has ``vocab_size`` ids."""
        assert isinstance(self.settings, Settings)
        return describe(self.settings.model, vocab_size)

    def objective(self, groups: Groups, device: torch.device) -> Objective | None:
        """What a step minimises; the cross entropy of each token if None. Every rank calls.

        Args:
            groups: the model's process groups.
            device: where the model is.
        """
        return None

    def before(self, session: Session) -> None:
        """What is to be done before the first step; every rank calls."""

    def after(self, session: Session) -> None:
        """What is to be done once the last step is saved; every rank calls."""

    def report(self, session: Session, outcome: Outcome) -> str:
        """What is printed at the end."""
        return summary(session, outcome)
