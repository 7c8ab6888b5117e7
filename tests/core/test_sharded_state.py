"""The walk over a module: who answers for what, under which name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.core.sharded_state import sharded_state_dict
from shardwise.core.sharding import ParamLayout, ParamShard
from shardwise.megatron.config import ModelParallelConfig
from shardwise.tensor_parallel.layers import ColumnParallelLinear


class Answers(nn.Module):
    """Answers for itself and its child."""

    def __init__(self):
        super().__init__()
        self.child = nn.Linear(2, 2)
        self.asked = []

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        self.asked.append((prefix, sharded_offsets, metadata))
        weight = self.child.weight
        return {prefix + "mine": ParamShard("theirs", weight, ParamLayout.replicated(weight.shape, 2), 0)}


@pytest.mark.ranks(2)
def test_names_layouts_and_who_answers(group):
    column = ColumnParallelLinear(
        3, 5, config=ModelParallelConfig(), init_method=nn.init.zeros_, bias=False, tp_group=group
    )
    answers = Answers()
    model = nn.ModuleDict({"norm": nn.BatchNorm1d(4), "column": column, "answers": answers})
    model.register_parameter("own", nn.Parameter(torch.zeros(2)))
    metadata = {"anything": 1}
    state = sharded_state_dict(model, "m.", ((0, 1, 4),), metadata, group=group)
    assert list(state) == [
        "m.own", "m.norm.weight", "m.norm.bias", "m.norm.running_mean", "m.norm.running_var",
        "m.norm.num_batches_tracked", "m.column.weight", "m.answers.mine",
    ]  # fmt: skip
    assert answers.asked == [("m.answers.", ((0, 1, 4),), metadata)]
    assert state["m.answers.mine"].key == "theirs"
    assert state["m.own"].data is model.own
    assert state["m.own"].global_shape == (4, 2)
    assert state["m.column.weight"].layout == column.param_layouts["weight"]
    assert state["m.norm.num_batches_tracked"].is_replica == (group.rank() == 1)
    assert list(sharded_state_dict(column, "c.", group=group)) == ["c.weight"]


@pytest.mark.ranks(1)
def test_tied_parameters_come_once(group):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    assert list(sharded_state_dict(model, group=group)) == ["0.weight", "0.bias"]
