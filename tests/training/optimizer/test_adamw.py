"""AdamW over shards is AdamW over the whole, its state can be taken and given back, and it decays matrices."""

import pytest
import torch
from harness.parity import assert_bit_equal, assert_close_to, gather_shards
from torch import nn

from shardwise.core.initialization import Normal
from shardwise.core.sharded_state import sharded_state_dict
from shardwise.megatron.config import ModelParallelConfig
from shardwise.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, named_param_layouts
from shardwise.training.optimizer.adamw import STATE_NAMES, AdamW
from shardwise.training.optimizer.optimizer import optimizer_state, set_learning_rate_

OPTIONS = {"learning_rate": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.95), "epsilon": 1e-8}


class TwoLayers(nn.Module):
    """Column, norm, row: split matrices and vectors, and whole ones."""

    def __init__(self, group, dtype=torch.float32):
        super().__init__()
        config = ModelParallelConfig(params_dtype=dtype)
        self.up = ColumnParallelLinear(6, 9, config=config, init_method=Normal(0.5), tp_group=group)
        self.down = RowParallelLinear(
            9,
            6,
            config=config,
            init_method=Normal(0.5),
            bias=True,
            input_is_parallel=True,
            skip_bias_add=False,
            tp_group=group,
        )
        self.norm = nn.LayerNorm(6, dtype=dtype)
        self.frozen = nn.Parameter(torch.ones(2, 2, dtype=dtype), requires_grad=False)
        self.group = group

    def forward(self, x):
        return self.norm(x + self.down(torch.tanh(self.up(x)[0]))[0])


def state_of(model, optimizer):
    return optimizer_state(sharded_state_dict(model, group=model.group), optimizer)


def train(model, optimizer, steps):
    for step in steps:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x.to(model.norm.weight.dtype)).square().mean().backward()
        set_learning_rate_(optimizer, 0.01 / (1 + step))
        optimizer.step()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_resumed_run_equals_the_uninterrupted_one(group, dtype):
    torch.manual_seed(3)
    straight = TwoLayers(group, dtype)
    optimizer = AdamW(straight, **OPTIONS)
    train(straight, optimizer, range(3))
    weights = {name: value.clone() for name, value in straight.state_dict().items()}
    state = {name: moment.data.clone() for name, moment in state_of(straight, optimizer).items()}
    train(straight, optimizer, range(3, 6))

    torch.manual_seed(4)
    resumed = TwoLayers(group, dtype)
    resumed.load_state_dict(weights)
    optimizer = AdamW(resumed, **OPTIONS)
    empty = state_of(resumed, optimizer)
    assert set(empty) == set(state)
    for name, moment in empty.items():
        assert not moment.data.any()
        moment.data.copy_(state[name])
    optimizer.set_step_(3)
    train(resumed, optimizer, range(3, 6))
    for name, value in straight.state_dict().items():
        assert_bit_equal(resumed.state_dict()[name], value, name=name)


@pytest.mark.ranks(1, 2, 3)
def test_shards_are_updated_as_the_whole(group):
    torch.manual_seed(3)
    model = TwoLayers(group, torch.float64)
    layouts = list(named_param_layouts(model, group.size()))
    dense = nn.ParameterDict(
        {name.replace(".", "_"): gather_shards(param, layout, group) for name, param, layout in layouts}
    )
    sharded = AdamW(model, **OPTIONS)
    # PyTorch's own, decay on matrices alone.
    whole = torch.optim.AdamW(
        [
            {"params": [p for p in dense.values() if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in dense.values() if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    for _ in range(4):
        for name, param, layout in layouts:
            gradient = torch.randn(layout.global_shape, dtype=torch.float64)
            if param.requires_grad:
                param.grad = layout.take(gradient, group.rank()).clone()
                dense[name.replace(".", "_")].grad = gradient
        sharded.step()
        whole.step()
    for name, param, layout in layouts:
        expected = dense[name.replace(".", "_")]
        if param.requires_grad:
            assert_close_to(gather_shards(param, layout, group), expected, rtol_of_norm=1e-13, name=name)
    for name, moment in state_of(model, sharded).items():
        kind, _, of = name.partition(".")
        expected = whole.state[dense[of.replace(".", "_")]][kind]
        assert_close_to(gather_shards(moment.data, moment.layout, group), expected, rtol_of_norm=1e-13, name=name)


@pytest.mark.ranks(2)
def test_state_is_named_and_laid_out_like_the_parameters(group):
    model = TwoLayers(group)
    optimizer = AdamW(model, **OPTIONS)
    state = state_of(model, optimizer)
    trained = {name: layout for name, param, layout in named_param_layouts(model, 2) if param.requires_grad}
    assert "frozen" not in trained
    assert set(state) == {f"{kind}.{name}" for kind in STATE_NAMES for name in trained}
    for name, moment in state.items():
        of = name.partition(".")[2]
        assert moment.layout == trained[of]
        assert moment.data.shape == model.get_parameter(of).shape
        # The optimizer's own memory: loading fills it in place.
        assert moment.data is optimizer.state[model.get_parameter(of)][name.partition(".")[0]]
    # Asking twice makes nothing anew.
    again = state_of(model, optimizer)
    assert all(again[name].data is moment.data for name, moment in state.items())
    optimizer.set_step_(7)
    steps = {float(optimizer.state[param]["step"]) for param in model.parameters() if param.requires_grad}
    assert steps == {7.0}
    assert model.frozen not in optimizer.state


@pytest.mark.ranks(1)
def test_what_decays(group):
    model = TwoLayers(group)
    optimizer = AdamW(model, **OPTIONS)
    decays = {id(param): rule["weight_decay"] for rule in optimizer.param_groups for param in rule["params"]}
    for name, param in model.named_parameters():
        if name == "frozen":
            assert id(param) not in decays
        else:
            assert decays[id(param)] == (0.1 if param.dim() == 2 else 0.0), name
    for rule in optimizer.param_groups:
        assert (rule["lr"], rule["betas"], rule["eps"]) == (0.01, (0.9, 0.95), 1e-8)
    set_learning_rate_(optimizer, 0.5)
    assert {rule["lr"] for rule in optimizer.param_groups} == {0.5}
    only_vectors = AdamW(nn.LayerNorm(3), **OPTIONS)
    assert [rule["weight_decay"] for rule in only_vectors.param_groups] == [0.0]
    nothing_to_train = AdamW(nn.LayerNorm(3).requires_grad_(False), **OPTIONS)
    nothing_to_train.step()
    assert [rule["params"] for rule in nothing_to_train.param_groups] == [[]]
