"""Trainers of one tiny model at any layout, and what they come to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from run.tiny import tiny_settings
from torch import Tensor

from shardwise.core.sharded_state import gather_parameter, sharded_state_dict
from shardwise.core.topology import Groups, Topology
from shardwise.data import Batch
from shardwise.run.build import build_model
from shardwise.run.checkpoints import run_state
from shardwise.run.settings import ParallelSettings, RecomputeSettings
from shardwise.storage.checkpoint import ParamShard
from shardwise.training.trainer import Trainer

VOCAB = 61
ONE = ParallelSettings()


def trainer_of(
    folder: Path,
    parallel: ParallelSettings = ONE,
    recompute: RecomputeSettings | None = None,
    *,
    groups: Groups | None = None,
    model: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    **training: Any,
) -> Trainer:
    """A trainer of a fresh model of one seed; on each rank alone without a layout."""
    sizes = {"num_layers": 4, "hidden_size": 16, "ffn_hidden_size": 22, "sequence_length": 11} | (model or {})
    settings = tiny_settings(folder, model=sizes, optimizer=optimizer, **training)
    settings = dataclasses.replace(settings, parallel=parallel, recompute=recompute or RecomputeSettings())
    if groups is None:
        groups = Groups.of(Topology.create(tp=parallel.tp, pp=parallel.pp))
        if parallel == ONE:
            groups = Groups.alone(groups.tp)
    torch.manual_seed(settings.training.seed)
    return Trainer(settings, build_model(settings, VOCAB, groups=groups, device=torch.device("cpu")), groups)


def batches_of(trainer: Trainer, steps: int, first: int = 0) -> Iterator[tuple[int, Iterable[Batch]]]:
    """Each step with this rank's micro-batches, of ids that follow a pattern, so that there is something to learn."""
    batch, length = trainer.settings.training.global_batch_size, trainer.settings.sequence_length
    share = batch // trainer.dp_group.size()
    mine = slice(trainer.dp_group.rank() * share, (trainer.dp_group.rank() + 1) * share)
    micro = trainer.settings.micro_batch_size(trainer.dp_group.size())
    for step in range(first, first + steps):
        start = torch.randint(VOCAB, (batch, 1), generator=torch.Generator().manual_seed(step))
        ids = (start + torch.arange(length + 1) * 7) % VOCAB
        yield step, map(Batch, ids[mine, :-1].split(micro), ids[mine, 1:].split(micro))


def curve(trainer: Trainer, steps: int, first: int = 0) -> Tensor:
    """Losses and gradient norms of steps, ``[steps, 2]``."""
    results = [trainer.step(step, batches) for step, batches in batches_of(trainer, steps, first)]
    return torch.tensor([(result.loss, result.grad_norm) for result in results], dtype=torch.float64)


def losses_of(trainer: Trainer, steps: int, first: int = 0) -> Tensor:
    """Losses of steps."""
    return curve(trainer, steps, first)[:, 0]


def whole_weights(trainer: Trainer) -> dict[str, Tensor]:
    """The whole parameters of this rank's stage, by their names in the whole model."""
    trainer.wait_for_weights()
    return {
        key: gather_parameter(shard.data, shard.layout, group=trainer.tp_group)
        for key, shard in sharded_state_dict(trainer.model, group=trainer.tp_group).items()
    }


def state_of(trainer: Trainer) -> dict[str, ParamShard]:
    """What a checkpoint of the run holds of this rank."""
    session: Any = SimpleNamespace(trainer=trainer)
    return run_state(session)


def assert_relative(actual: Tensor, expected: Tensor, bound: float, name: str) -> None:
    """Each number is within ``bound`` of what is expected, relative to it."""
    error = ((actual - expected) / expected).abs().max().item()
    # Written so that a NaN fails.
    assert error <= bound, f"{name}: {error:.1e}"
