"""Objectives whose ranks share the positions of each sample have the sums and gradients of one rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from harness.parity import gather_all
from models.model_checks import alone, check_gradients
from models.test_context_parallel import VOCABULARY, build
from torch import Tensor

from shardwise.core.random import seed_streams
from shardwise.core.topology import Groups, Topology
from shardwise.data import IGNORE_INDEX, Batch
from shardwise.run.settings import PreferenceSettings
from shardwise.run.tasks.preference import PreferenceObjective
from shardwise.training.gradients.finalize import finalize_gradients_
from shardwise.training.objective import Objective


def rows_of(count: int, length: int = 13) -> dict[str, Tensor]:
    """Rows of different lengths, padded, whose labels begin at different positions."""
    generator = torch.Generator().manual_seed(count)
    tokens = torch.randint(VOCABULARY, (count, length), generator=generator)
    labels, places = tokens.roll(-1, 1), torch.arange(length)
    starts, stops = torch.arange(count)[:, None] % 5, length - torch.arange(count)[:, None] % 4
    return {"tokens": tokens, "labels": labels.masked_fill((places < starts) | (places >= stops), IGNORE_INDEX)}


def sums_of(objective: Objective, model: Any, batch: Batch, dtype: torch.dtype | None = None) -> list[Tensor]:
    seed_streams(7, 0, rng="global")
    sums = objective.sums(model(**objective.inputs(batch)), batch, dtype)
    return [part.view(-1) for part in sums if part is not None]


build_causal = partial(build, "window")


def check(number: int, objective_of: Callable[[Groups], Objective], batch: Batch, build_of: Any = build_causal) -> None:
    """Hold the sums of a step, the gradients, and the sums of an evaluation against those of one rank."""
    topology = Topology.create(cp=2, tp=2) if number == 4 else Topology.create(cp=number)
    groups, one = Groups.of(topology), alone(topology)
    models = build_of(one, sequence_parallel=False), build_of(groups, sequence_parallel=number == 4)
    sums = []
    for model, own in zip(models, (one, groups), strict=True):
        objective = objective_of(own)
        assert objective.shares_samples
        loss, *others = sums_of(objective, model.train(), batch)
        loss.backward()
        with torch.no_grad():
            others += sums_of(objective.for_evaluation, model.eval(), batch, torch.float64)
        sums.append(torch.cat([loss.detach(), *others]))
    total = torch.stack(gather_all(sums[1], groups.dp)).sum(0)
    torch.testing.assert_close(total, sums[0], rtol=1e-10, atol=1e-10)
    assert sums[0][0] > 0
    finalize_gradients_(models[1], tp_group=groups.tp, dp_group=groups.dp)
    check_gradients(models[1], models[0], groups, atol=1e-11)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_preferences(group, loss_type):
    """Also with fewer pairs than ranks, and with a pair that only fills up the batch."""
    settings = PreferenceSettings(beta=0.3, loss_type=loss_type)
    for pairs in (4, 1):
        rows = rows_of(2 * pairs)
        if pairs > 1:
            rows["labels"][-2:] = IGNORE_INDEX
        reference = torch.linspace(-70.0, -30.0, 2 * pairs, dtype=torch.float64)
        batch = Batch(**rows, reference=reference)
        check(group.size(), lambda groups: PreferenceObjective(settings, groups.data.group), batch)
