"""The training step and the measurement on held-out text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch.distributed import ProcessGroup

from shardwise.collectives.primitives import all_reduce
from shardwise.data import Batch, DataLoader, EvaluationWindows, evaluation_batches
from shardwise.models.gpt import GPTModel
from shardwise.optimizer.adamw import learning_rate_at, make_adamw, set_learning_rate_
from shardwise.optimizer.gradients import clip_grad_norm_, finalize_gradients_
from shardwise.random import seed_streams
from shardwise.training.settings import Settings


@dataclass(frozen=True)
class StepResult:
    """What one step did.

    Attributes:
        loss: mean over the global batch, in nats per token, before the update.
        grad_norm: global gradient norm before clipping.
        learning_rate: of the update.
    """

    loss: float
    grad_norm: float
    learning_rate: float


class Trainer:
    """A model, its optimizer and its groups; knows nothing of files or screens.

    Args:
        settings: of the run.
        model: on its device.
        tp_group: the ranks that split the model.
        dp_group: the ranks that see different samples.
    """

    def __init__(self, settings: Settings, model: GPTModel, *, tp_group: ProcessGroup, dp_group: ProcessGroup) -> None:
        chosen = settings.optimizer
        self.settings = settings
        self.model = model
        self.tp_group = tp_group
        self.dp_group = dp_group
        self.device = next(model.parameters()).device
        self.optimizer = make_adamw(
            model,
            learning_rate=chosen.learning_rate,
            weight_decay=chosen.weight_decay,
            betas=(chosen.beta1, chosen.beta2),
            epsilon=chosen.epsilon,
        )

    def step(self, step: int, micro_batches: Iterable[Batch]) -> StepResult:
        """One optimizer step.

        Args:
            step: from 0.
            micro_batches: this data-parallel rank's samples.

        Returns:
            The same on every rank.
        """
        settings = self.settings
        # Dropout's numbers are a function of the step, so that a resumed run draws what it would have drawn. Ranks of
        # one tensor-parallel group share the data-parallel stream; data-parallel ranks must not.
        stream_seed = _stream_seed(settings.training.seed, step, self.dp_group.rank())
        seed_streams(stream_seed, self.tp_group.rank(), rng=settings.training.rng)
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        num_tokens = settings.training.global_batch_size * settings.model.sequence_length
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for tokens, labels in micro_batches:
            losses = self.model(tokens.to(self.device), labels=labels.to(self.device))
            loss = losses.sum() / num_tokens
            loss.backward()
            total += loss.detach()
        finalize_gradients_(self.model, tp_group=self.tp_group, dp_group=self.dp_group)
        norm = clip_grad_norm_(self.model, settings.optimizer.clip_grad_norm, tp_group=self.tp_group)
        learning_rate = learning_rate_at(
            step,
            steps=settings.training.steps,
            warmup_steps=settings.optimizer.warmup_steps,
            highest=settings.optimizer.learning_rate,
            final_ratio=settings.optimizer.final_learning_rate_ratio,
        )
        set_learning_rate_(self.optimizer, learning_rate)
        self.optimizer.step()
        return StepResult(float(all_reduce(total, group=self.dp_group)), float(norm), learning_rate)

    def train_step(self, step: int, loader: DataLoader) -> StepResult:
        """``step`` on this rank's samples of ``loader``."""
        batches = loader.batch(
            step, self.dp_group.rank(), self.dp_group.size(), self.settings.training.micro_batch_size
        )
        return self.step(step, batches)

    @torch.no_grad()
    def evaluate(self, windows: EvaluationWindows) -> float:
        """Bits per byte of the held-out text, the same on every rank."""
        self.model.eval()
        per_rank = max(1, self.settings.training.global_batch_size // self.dp_group.size())
        micro = self.settings.training.micro_batch_size or per_rank
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for tokens, labels in evaluation_batches(windows, micro, self.dp_group.rank(), self.dp_group.size()):
            losses = self.model(tokens.to(self.device), labels=labels.to(self.device))
            total += losses.sum(dtype=torch.float64)
        return windows.bits_per_byte(float(all_reduce(total, group=self.dp_group)))


def _stream_seed(seed: int, step: int, dp_rank: int) -> int:
    # Hashed, and short of 64 bits, since the tensor-parallel stream adds its rank.
    return int(np.random.SeedSequence((seed, step, dp_rank)).generate_state(1, np.uint64)[0] >> np.uint64(2))
