"""A layer that a plan has never seen is planned as it runs; a row of layers as if each was rehearsed."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from harness.peaks import LivePeak
from plan.planned_models import described, kept_in_a_step, planned, state_of, state_tensors, workload_of
from torch import nn

from shardwise.core.communication import moves
from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.topology import Groups, Topology
from shardwise.models.description import ModelChunks, chunks_of, model_arguments, model_config
from shardwise.models.gpt import GPT
from shardwise.models.transformer.attention import SelfAttention
from shardwise.models.transformer.layer import TransformerLayerSpec
from shardwise.models.transformer.mlp import MLP, layer_arguments
from shardwise.nn import ColumnLinear
from shardwise.plan import rehearsal
from shardwise.plan.plan import make_plan
from shardwise.plan.workload import Mesh, Workload
from shardwise.run.build import config_fields
from shardwise.training.trainer import Trainer


class GatedByAll(nn.Module):
    """An MLP whose output is multiplied by a number that the ranks find together, and by a weight that all hold."""

    def __init__(self, config, tp_group):
        super().__init__()
        self.tp_group = tp_group
        self.mlp = MLP(config, tp_group)
        self.probe = ColumnLinear(config.hidden_size, 10, bias=False, **layer_arguments(config, group=tp_group))
        self.scale = nn.Parameter(torch.ones(config.hidden_size, dtype=config.params_dtype))

    def forward(self, hidden, *, sequence=None):
        probed = moves.gather(self.probe(hidden, sequence=sequence), dim=-1, group=self.tp_group)
        return self.mlp(hidden, sequence=sequence) * probed.sinh().mean(-1, keepdim=True) * self.scale


class SumOfPowers(SelfAttention):
    """Attention whose output is a sum of its powers: of more powers in every second layer."""

    def __init__(self, config, layer_number, tp_group):
        super().__init__(config, layer_number, tp_group)
        self.powers = (1, 2, 3) if layer_number % 2 == 0 else (1, 2)

    def forward(self, hidden, **options):
        output = super().forward(hidden, **options)
        return sum(output**power for power in self.powers)


@dataclasses.dataclass(frozen=True)
class Unseen(Workload):
    """A model of such layers."""

    alternates: bool = False

    def build(self, groups):
        attention = SumOfPowers if self.alternates else SelfAttention
        fields = config_fields(self.settings, groups) | {"perform_initialization": False}
        config = model_config(self.model, **fields)
        chunks = []
        for chunk in chunks_of(config):
            arguments = model_arguments(config, groups=groups, vp_stage=chunk)
            arguments["layer_spec"] = TransformerLayerSpec(attention=attention, mlp=GatedByAll)
            chunks.append(GPT(config, **arguments))
        return ModelChunks(chunks) if len(chunks) > 1 else chunks[0]


def unseen(num_layers, *, alternates=False, **options):
    workload = workload_of(described("gpt2", num_layers=num_layers), **options)
    return Unseen(workload.settings, workload.model, alternates=alternates)


@pytest.fixture
def workload_and_plans():
    workload = unseen(3, tp=2, dtype="bfloat16")
    return workload, planned(workload, 2, range(2))


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_it_is_planned_as_it_runs(group, workload_and_plans):
    workload, plans = workload_and_plans
    plan = plans[group.rank()]
    groups = Groups.of(Topology.create(tp=2))
    model = workload.build(groups)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.01)
    trainer = Trainer(workload.settings, model, groups)
    batch = workload.batch(3, with_lengths=False)
    assert kept_in_a_step(trainer, batch) == plan.step.kept
    state = state_of(trainer)
    assert {name: getattr(plan.step, name) for name in state} == state
    assert plan.step.num_parameters == sum(param.numel() for param in model.parameters())
    with CollectiveCounter() as counter, LivePeak() as live:
        live.count(
            [*model.parameters(), *trainer.gradients.buffers, *(kept for kept, _ in state_tensors(trainer.optimizer))]
        )
        trainer.step(1, [batch])
    assert live.peak == pytest.approx(plan.total, rel=0.02)
    launched = Counter((each.name, each.num_bytes) for each in counter.launches)
    assert launched == {(call.name, call.num_bytes): number for call, number in plan.calls.items()}


SHORTENED = {
    "equal": (unseen(12), Mesh()),
    "alternating": (unseen(10, alternates=True), Mesh(tp=2)),
    "stages": (unseen(16, alternates=True), Mesh(pp=2, schedule="gpipe")),
    "interleaved": (
        unseen(16, training={"global_batch_size": 4, "micro_batch_size": 1}),
        Mesh(pp=2, schedule="interleaved", virtual_stages=2),
    ),
    "recomputed": (unseen(9, recompute={"granularity": "full", "num_layers": 2}), None),
}


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("case", SHORTENED)
def test_a_short_row_of_layers_counts_as_all_of_them(monkeypatch, case):
    workload, mesh = SHORTENED[case]
    mesh = mesh or Mesh(recomputation=workload.settings.recompute)
    short = make_plan(workload, mesh)
    monkeypatch.setattr(rehearsal, "_shortened", lambda kinds: (list(range(len(kinds))), [(1, 1)] * len(kinds)))
    whole = make_plan(workload, mesh)
    for one, other in zip(short.stages, whole.stages, strict=True):
        assert one.total == other.total
        for name in ("weights", "gradients", "masters", "optimizer", "others", "num_parameters", "kept", "in_flight"):
            assert getattr(one.step, name) == getattr(other.step, name), name
        assert (one.flops, one.calls) == (other.flops, other.calls)
        parts = [
            [(each.place, each.peak, each.net, each.flops, each.sent) for each in rank.step.segments]
            for rank in (one, other)
        ]
        assert parts[0] == parts[1]
