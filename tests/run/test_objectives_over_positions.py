"""Objectives whose ranks share the positions of each sample have the sums and gradients of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models.model_checks import check_gradients
from models.test_context_parallel import VOCABULARY, alone, build

from shardwise.core.topology import Groups, Topology
from shardwise.data import IGNORE_INDEX, Batch
from shardwise.run.settings import PreferenceSettings, TeacherSettings
from shardwise.run.tasks.distillation import DistillationObjective
from shardwise.run.tasks.preference import PreferenceObjective
from shardwise.training.objective import Objective
from shardwise.training.optimizer.gradients import finalize_gradients_

LAYOUTS: dict[int, tuple[dict[str, Any], ...]] = {2: ({"cp": 2},), 3: ({"cp": 3},), 4: ({"cp": 2, "tp": 2},)}


def rows_of(count: int, length: int = 13) -> dict[str, torch.Tensor]:
    """Rows of different lengths, padded, whose labels begin at different positions."""
    generator = torch.Generator().manual_seed(count)
    tokens = torch.randint(VOCABULARY, (count, length), generator=generator)
    labels, places = tokens.roll(-1, 1), torch.arange(length)
    starts, stops = torch.arange(count)[:, None] % 5, length - torch.arange(count)[:, None] % 4
    return {"tokens": tokens, "labels": labels.masked_fill((places < starts) | (places >= stops), IGNORE_INDEX)}


def check(topology: Topology, objective_of: Any, batch: Batch, *, sequence_parallel: bool = False) -> None:
    groups, one = Groups.of(topology), Groups.alone(alone(topology))
    models = build("window", one), build("window", groups, sequence_parallel=sequence_parallel)
    sums = []
    for model, own in zip(models, (one, groups), strict=True):
        objective: Objective = objective_of(own)
        assert objective.shares_samples
        loss, others = objective.sums(model(**objective.inputs(batch)), batch)
        loss.backward()
        sums.append(torch.cat([loss.detach().view(1), others]))
    dist.all_reduce(sums[1], group=groups.dp)
    torch.testing.assert_close(sums[1], sums[0], rtol=1e-10, atol=1e-10)
    assert sums[0].abs().min() > 0
    finalize_gradients_(models[1], tp_group=groups.tp, dp_group=groups.dp)
    check_gradients(models[1], models[0], groups, atol=1e-11)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_preferences(group, loss_type):
    """Also with fewer pairs than ranks, and with a pair that only fills up the batch."""
    for sizes in LAYOUTS[group.size()]:
        topology = Topology.create(**sizes)
        for pairs in (4, 1):
            rows = rows_of(2 * pairs)
            if pairs > 1:
                rows["labels"][-2:] = IGNORE_INDEX
            reference = torch.linspace(-70.0, -30.0, 2 * pairs, dtype=torch.float64)
            settings = PreferenceSettings(beta=0.3, loss_type=loss_type)
            check(
                topology,
                lambda groups, settings=settings: PreferenceObjective(settings, groups.cp),
                Batch(**rows, reference=reference),
                sequence_parallel="tp" in sizes,
            )


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("divergence", ["forward", "reverse"])
def test_a_teacher(group, divergence):
    settings = TeacherSettings(teacher="t", divergence=divergence, temperature=1.7, alpha=0.6)

    def objective_of(groups: Groups) -> DistillationObjective:
        teacher = build("alibi", Groups(tp=groups.tp, dp=groups.dp, cp=groups.cp)).requires_grad_(False).eval()
        return DistillationObjective(settings, teacher, groups.tp, VOCABULARY, VOCABULARY - 3)

    for sizes in LAYOUTS[group.size()]:
        check(Topology.create(**sizes), objective_of, Batch(**rows_of(3)))
