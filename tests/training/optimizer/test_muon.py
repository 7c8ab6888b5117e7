"""Muon: one update is that of one rank at every layout, of each matrix by itself; its state and settings."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from harness.model_options import NO_DROPOUT
from harness.parity import assert_close_to, gather_shards
from models.experts.test_moe import MIXTRAL, build
from models.model_checks import alone
from run.tiny_layouts import losses_of, trainer_of
from torch import nn

from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.errors import ConfigError
from shardwise.core.topology import Groups, Topology
from shardwise.models.config import ModelConfig
from shardwise.models.gpt import GPT
from shardwise.models.transformer.heads import GlobalHeads
from shardwise.nn import named_param_layouts
from shardwise.nn.replicated import replicas_of
from shardwise.run.settings import (
    FinetuneOptimizerSettings,
    FinetuneSettings,
    LoraSettings,
    OptimizerSettings,
    ParallelSettings,
)
from shardwise.training.optimizer import muon as muon_module
from shardwise.training.optimizer.adamw import AdamW
from shardwise.training.optimizer.muon import Muon, distribute_matrices, orthogonalized, product_dtype
from shardwise.training.optimizer.optimizer import optimizer_state, set_learning_rate_

SHARED = {"learning_rate": 0.02, "weight_decay": 0.1, "betas": (0.9, 0.95), "epsilon": 1e-8}
OPTIONS = SHARED | {"momentum": 0.9, "matrix_learning_rate_ratio": 1.5}
H, HEADS, D, FFN, V = 20, 5, 4, 13, 29
MATRICES = ("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight")


def gpt(group, *, query_groups=HEADS, dtype=torch.float64, gated=True, **fields):
    config = ModelConfig(
        num_layers=2,
        hidden_size=H,
        num_attention_heads=HEADS,
        num_query_groups=query_groups,
        ffn_hidden_size=FFN,
        gated_linear_unit=gated,
        activation_func=F.silu,
        params_dtype=dtype,
        **NO_DROPOUT,
        **fields,
    )
    torch.manual_seed(3)
    return GPT(config, V, 7, groups=Groups(tp=group))


def give_gradients(model, group, step):
    """The same whole gradients at every number of ranks; returned by name."""
    wholes = {}
    generator = torch.Generator().manual_seed(step)
    for name, param, layout in named_param_layouts(model, group.size()):
        wholes[name] = torch.randn(layout.global_shape, generator=generator, dtype=torch.float64)
        param.grad = layout.take(wholes[name], group.rank()).to(param.dtype).clone()
    return wholes


def newton_schulz(matrix):
    """As Jordan et al. write it, in fp64."""
    x = matrix / matrix.norm()
    if x.size(0) > x.size(1):
        x = x.T
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x if matrix.size(0) <= matrix.size(1) else x.T


def rows_of(name, query_groups, gated):
    """The rows of each matrix in a weight."""
    if "linear_qkv" in name:
        n = HEADS // query_groups
        kind = torch.tensor(([0] * n + [1, 2]) * query_groups).repeat_interleave(D)
        return [(kind == which).nonzero().flatten() for which in range(3)]
    if "linear_fc1" in name and gated:
        return [torch.arange(FFN), torch.arange(FFN, 2 * FFN)]
    return [slice(None)]


def expected_weights(weights, gradients, rates, query_groups, gated):
    """Each step's formula, on whole matrices."""
    momenta = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    weights = {name: weight.clone() for name, weight in weights.items()}
    for gradient_of, rate in zip(gradients, rates, strict=True):
        for name, weight in weights.items():
            momenta[name] = 0.9 * momenta[name] + 0.1 * gradient_of[name]
            nesterov = 0.1 * gradient_of[name] + 0.9 * momenta[name]
            weight *= 1 - 1.5 * rate * 0.1
            for rows in rows_of(name, query_groups, gated):
                part = nesterov[rows]
                weight[rows] -= 1.5 * rate * 0.2 * math.sqrt(max(part.shape)) * newton_schulz(part)
    return weights, momenta


def gathered(model, group):
    layouts = named_param_layouts(model, group.size())
    return {name: gather_shards(param.detach(), layout, group) for name, param, layout in layouts}


def is_matrix(name):
    return name.endswith(MATRICES)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize(("query_groups", "gated"), [(HEADS, True), (1, False)])
def test_an_update_is_that_of_one_rank_and_of_each_matrix_by_itself(group, query_groups, gated, monkeypatch):
    # One weight after the other, and all at once.
    monkeypatch.setattr(muon_module, "_ELEMENTS_AT_ONCE", 1 if gated else 1 << 24)
    model = gpt(group, query_groups=query_groups, gated=gated)
    before = gathered(model, group)
    optimizer = Muon(model, **OPTIONS)
    gradients, rates = [], (0.02, 0.01)
    for step, rate in enumerate(rates):
        gradients.append(give_gradients(model, group, step))
        set_learning_rate_(optimizer, rate)
        optimizer.step()
    matrices = {name: weight for name, weight in before.items() if is_matrix(name)}
    assert len(matrices) == 8
    weights, momenta = expected_weights(matrices, gradients, rates, query_groups, gated)
    after = gathered(model, group)
    for name, expected in weights.items():
        assert_close_to(after[name], expected, rtol_of_norm=1e-12, name=name)
    state = optimizer_state(model.sharded_state_dict(), optimizer)
    for name, expected in momenta.items():
        momentum = state[f"momentum.{name}"]
        assert_close_to(gather_shards(momentum.data, momentum.layout, group), expected, rtol_of_norm=1e-13, name=name)

    # All else is AdamW's.
    other = gpt(group, query_groups=query_groups, gated=gated)
    adamw = AdamW(other, **SHARED)
    for step, rate in enumerate(rates):
        give_gradients(other, group, step)
        set_learning_rate_(adamw, rate)
        adamw.step()
    for name, expected in gathered(other, group).items():
        if not is_matrix(name):
            assert_close_to(after[name], expected, rtol_of_norm=1e-15, name=name)
    assert {name for name in state if not name.startswith("momentum.")} == {
        f"{kind}.{name}" for kind in ("exp_avg", "exp_avg_sq") for name in before if not is_matrix(name)
    }


# Experts that are divided, split (unevenly), both, and copied.
OF_EXPERTS = ({"ep": 4}, {"tp": 2, "ep": 2}, {"tp": 1, "etp": 4}, {"tp": 2, "ep": 4, "etp": 1}, {"tp": 2, "etp": 1})


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize("gated", [True, False])
def test_an_update_of_experts_is_that_of_each_matrix(gated, group, monkeypatch):
    """The gate, the up and the down projection of each expert; routers and biases are AdamW's."""
    monkeypatch.setattr(muon_module, "_ELEMENTS_AT_ONCE", 1 if gated else 1 << 24)
    spec = dataclasses.replace(MIXTRAL, biases=True, shared_ffn_hidden_size=13)
    for sizes in OF_EXPERTS if group.size() == 4 else ({},):
        topology = Topology.create(**sizes)
        groups, tp = Groups.of(topology), topology.size("tp")
        dense, split = (build(spec, each, tp=tp, gated_linear_unit=gated) for each in (alone(topology), groups))
        before = {name: param.detach().clone() for name, param in dense.named_parameters()}
        generator, gradients = torch.Generator().manual_seed(1), {}
        for name, param in dense.named_parameters():
            param.grad = gradients[name] = torch.randn(param.shape, generator=generator, dtype=torch.float64)
        replicas = replicas_of(split)
        own = {
            name: (param, layout, (groups.experts if replicas[param].is_of_expert else groups.tp).rank())
            for name, param, layout in named_param_layouts(split, tp)
        }
        for name, (param, layout, rank) in own.items():
            param.grad = layout.take(gradients[name], rank).clone()
        for model in (dense, split):
            optimizer = Muon(model, **OPTIONS)
            optimizer.step()
        weights = dict(dense.named_parameters())
        for name in before:
            if name.endswith(("experts.up", "experts.down")):
                expected = before[name] * (1 - 1.5 * 0.02 * 0.1)
                nesterov = gradients[name] * (0.1 + 0.9 * 0.1)
                for rows in torch.arange(len(expected)).split(spec.ffn_hidden_size):
                    factor = 1.5 * 0.02 * 0.2 * math.sqrt(spec.ffn_hidden_size)
                    expected[rows] -= factor * newton_schulz(nesterov[rows])
                assert_close_to(weights[name].detach(), expected, rtol_of_norm=1e-12, name=name)
            param, layout, rank = own[name]
            assert_close_to(param.detach(), layout.take(weights[name].detach(), rank), rtol_of_norm=1e-12, name=name)
        state = optimizer_state(split.sharded_state_dict(), optimizer)
        assert {name.rpartition(".")[2] for name in state if ".experts." in name and name.startswith("momentum.")} == {
            "up",
            "down",
        }
        assert "exp_avg.decoder.layers.0.mlp.router.weight" in state


@pytest.mark.ranks(4)
def test_runs_with_experts_train_as_one_rank(group, tmp_path):
    options = {
        "model": {"num_layers": 2, "num_experts": 4, "expert_ffn_hidden_size": 10},
        "optimizer": {"name": "muon"},
        "dtype": "float64",
    }
    expected = losses_of(trainer_of(tmp_path, **options), 4)
    for parallel in (
        ParallelSettings(tp=2, ep=2, zero=1),
        ParallelSettings(ep=2, zero=1),
        ParallelSettings(ep=2, fsdp=True),
        ParallelSettings(tp=2, ep=4, etp=1, sequence_parallel=True),
    ):
        axes = {name: getattr(parallel, name) for name in ("tp", "ep", "etp")}
        groups = Groups.of(Topology.create(**axes))
        losses = losses_of(trainer_of(tmp_path, parallel, groups=groups, **options), 4)
        assert_close_to(losses, expected, rtol_of_norm=1e-10, name=str(parallel))


@pytest.mark.ranks(3)
def test_each_matrix_is_computed_on_one_rank_and_travels_once_each_way(group, monkeypatch):
    calls = []
    monkeypatch.setattr(muon_module, "orthogonalized", lambda matrix: calls.append(matrix.shape) or matrix)
    model = gpt(group)
    optimizer = Muon(model, **OPTIONS)
    give_gradients(model, group, 0)
    with CollectiveCounter() as counter:
        optimizer.step()
    assert len(counter.launches) == 2
    every = [None] * 3
    torch.distributed.all_gather_object(every, calls, group=group)
    found = sorted(tuple(shape) for shapes in every for shape in shapes)
    layer = [(HEADS * D, H)] * 3 + [(H, HEADS * D), (FFN, H), (FFN, H), (H, FFN)]
    assert found == sorted(2 * layer)
    assert min(len(shapes) for shapes in every) >= 4


@pytest.mark.ranks(2)
def test_fewer_matrices_than_ranks_and_some_without_gradient(group):
    model = gpt(group)
    for name, param in model.named_parameters():
        param.requires_grad_("layers.0.mlp.linear_fc2.weight" in name or "layers.1" in name)
    optimizer = Muon(model, **OPTIONS)
    before = gathered(model, group)
    fc2 = model.decoder.layers[0].mlp.linear_fc2.weight
    fc2.grad = torch.ones_like(fc2)
    optimizer.step()
    after = gathered(model, group)
    assert [name for name in after if not torch.equal(after[name], before[name])] == [
        "decoder.layers.0.mlp.linear_fc2.weight"
    ]
    optimizer.zero_grad()
    assert fc2.grad is None


@pytest.mark.ranks(1)
def test_singular_values_end_near_one(group):
    for shape, dtype in (((40, 17), torch.float64), ((17, 40), torch.float32), ((33, 33), torch.bfloat16)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        values = torch.linalg.svdvals(orthogonalized(matrix).double())
        assert values.max() < 1.3
        assert values.quantile(0.1) > 0.5
    assert not orthogonalized(torch.zeros(3, 5)).any()
    assert orthogonalized(torch.ones(1, 4)).norm() == pytest.approx(1, abs=0.35)


def test_work_is_divided_by_what_it_costs():
    """A step costs the elements times the shorter side."""
    assert distribute_matrices([(10, 10), (50, 2), (2, 50)], 2) == [[0], [1, 2]]
    # In fp16 the sums of products may overflow.
    assert [product_dtype(dtype) for dtype in (torch.float16, torch.bfloat16)] == [torch.float32, torch.bfloat16]


@pytest.mark.ranks(1)
def test_copies_are_trained_in_place_of_parameters(group):
    model = gpt(group, dtype=torch.bfloat16)
    optimizer = Muon(model, **OPTIONS)
    copies = {param: nn.Parameter(param.detach().float()) for param in model.parameters()}
    optimizer.train_instead_(copies)
    for param, copy in copies.items():
        copy.grad = torch.ones_like(copy)
        layout = next(layout for _, other, layout in named_param_layouts(model, 1) if other is param)
        for tensor, _ in optimizer.state_of(copy, layout).values():
            assert tensor.dtype == torch.float32
    before = [param.detach().clone() for param in model.parameters()]
    optimizer.step()
    assert all(torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))
    assert all(not torch.equal(copy, param.float()) for param, copy in copies.items())


@pytest.mark.ranks(1)
def test_keys_that_are_values_are_refused(group):
    with pytest.raises(ConfigError, match="muon cannot be used with keys that are values"):
        OptimizerSettings(name="muon").make(gpt(group, global_heads=GlobalHeads(HEADS, D, keys_are_values=True)))


def test_settings():
    made = OptimizerSettings(name="muon", momentum=0.8, matrix_learning_rate_ratio=3.0)
    own = made.make(nn.LayerNorm(3)).param_groups[-1]
    assert (own["momentum"], own["ratio"]) == (0.8, 3.0)
    own = OptimizerSettings(name="muon").make(nn.LayerNorm(3)).param_groups[-1]
    assert (own["momentum"], own["ratio"]) == (0.95, 1.0)
    for name, value in (("momentum", 0.9), ("matrix_learning_rate_ratio", 2.0)):
        with pytest.raises(ConfigError, match=f"{name.replace('_', '-')} {value} is for --optimizer.name muon"):
            OptimizerSettings(**{name: value})
    with pytest.raises(ConfigError, match="which adapters do not change; use adamw"):
        FinetuneSettings(
            base="m", data=("d",), lora=LoraSettings(lora_rank=2), optimizer=FinetuneOptimizerSettings(name="muon")
        )
