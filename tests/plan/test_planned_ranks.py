"""What cannot be planned is refused, and a rehearsal leaves a process as it was."""

from __future__ import annotations

import dataclasses
import gc
import sys

import pytest
import torch.distributed as dist
from plan.planned_models import described, workload_of
from torch import nn

from shardwise.core.errors import ConfigError
from shardwise.models.description import model_arguments, model_config
from shardwise.models.gpt import GPT
from shardwise.models.transformer.layer import TransformerLayerSpec
from shardwise.models.transformer.mlp import MLP
from shardwise.plan.plan import make_plan
from shardwise.plan.workload import Mesh, Workload
from shardwise.run.build import config_fields

WORKLOAD = workload_of(described("llama"), training={"global_batch_size": 12, "micro_batch_size": 1})


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"tp": 13}, "tp 13 is more than the 12 attention heads; lower it"),
        ({"pp": 4}, "the model's 3 layers are fewer than the 4 parts of pp 4 x virtual stages 1"),
        ({"pp": 2, "schedule": "interleaved", "virtual_stages": 2}, "3 layers are fewer than the 4 parts of pp 2"),
        ({"dp": 5}, "the global batch of 12 samples is not a multiple of dp 5 x micro-batches of 1"),
        ({"dp": 2, "micro_batch_size": 4}, "is not a multiple of dp 2 x micro-batches of 4"),
        ({"zero": 1, "fsdp": True}, "zero 1 splits optimizer state, which fsdp does too; choose one"),
    ],
)
def test_a_layout_that_cannot_be(mesh, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(WORKLOAD, Mesh(**mesh))


@pytest.mark.parametrize("rank", [-1, 6, 10**9])
def test_a_rank_that_there_is_not(rank):
    with pytest.raises(ConfigError, match=f"rank {rank} is not one of the 6 ranks, 0 to 5"):
        make_plan(WORKLOAD, Mesh(tp=2, dp=3), rank=rank)


class FailsLate(nn.Module):
    """An MLP that fails when it is called for the second time."""

    def __init__(self, config, tp_group):
        super().__init__()
        self.mlp, self.calls = MLP(config, tp_group), []

    def forward(self, hidden, **options):
        self.calls.append(hidden.shape)
        if len(self.calls) > 1:
            raise ArithmeticError("a layer that fails")
        return self.mlp(hidden, **options)


@dataclasses.dataclass(frozen=True)
class Failing(Workload):
    """A model of such layers."""

    def build(self, groups):
        config = model_config(self.model, perform_initialization=False, **config_fields(self.settings, groups))
        arguments = model_arguments(config, groups=groups) | {"layer_spec": TransformerLayerSpec(mlp=FailsLate)}
        return GPT(config, **arguments)


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pp=2), Mesh(pp=3, schedule="gpipe")], ids=str)
def test_a_step_that_fails(mesh):
    before, hook = make_plan(WORKLOAD, mesh), sys.excepthook
    with pytest.raises(ArithmeticError, match="a layer that fails"):
        make_plan(Failing(WORKLOAD.settings, WORKLOAD.model), mesh)
    # What the rehearsal replaced is there again.
    assert not dist.is_initialized()
    assert gc.isenabled()
    assert sys.excepthook is hook
    after = make_plan(WORKLOAD, mesh)
    assert [rank.step for rank in after.stages] == [rank.step for rank in before.stages]


@pytest.mark.slow
def test_a_process_in_a_group_plans_in_another():
    expected = make_plan(WORKLOAD, Mesh(tp=2), rank=1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert make_plan(WORKLOAD, Mesh(tp=2), rank=1).stages == expected.stages
        with pytest.raises(ConfigError, match="rank 2 is not one of the 2 ranks, 0 to 1"):
            make_plan(WORKLOAD, Mesh(tp=2), rank=2)
    finally:
        dist.destroy_process_group()
