"""Adapters of experts and routers on any ranks are those of merged dense weights: outputs, gradients, merged layers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from models.experts.test_moe import LAYOUTS, LENGTH, MIXTRAL, WIDTH, alone, moe_layer
from torch import Tensor
from torch.func import functional_call

from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.errors import ConfigError
from shardwise.core.sequence_view import SequenceView
from shardwise.core.sharding.balanced import balanced_sizes
from shardwise.core.topology import Groups, Topology
from shardwise.models.adapters import LoraConfig, LoraExperts, LoraRouter
from shardwise.models.experts.moe import MoELayer
from shardwise.nn.replicated import named_param_layouts, replicas_of
from shardwise.training.gradients.finalize import finalize_gradients_
from shardwise.training.optimizer.grad_norm import global_grad_norm

# Ranks that nothing divides, of which four ranks can split each.
CONFIGS = {
    "experts.up": LoraConfig(r=5, lora_alpha=4),
    "experts.down": LoraConfig(r=6, lora_alpha=9, use_rslora=True),
    "router": LoraConfig(r=3, lora_alpha=2),
}
OF_EXPERTS = {"up": CONFIGS["experts.up"], "down": CONFIGS["experts.down"]}
SIZES = {"experts.up": (8, 44, WIDTH), "experts.down": (8, WIDTH, 22), "router": (1, 8, WIDTH)}


def factors_of(place: str) -> dict[str, Tensor]:
    """Factors as in peft's files: ``[e * r, i]`` and ``[o, r * e]``, whose experts are adjacent columns."""
    (number, output, input_), rank = SIZES[place], CONFIGS[place].r
    generator = torch.Generator().manual_seed(len(place))
    shapes = {"lora_A": (number * rank, input_), "lora_B": (output, rank * number)}
    return {name: 0.2 * torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def merged(layer: MoELayer, factors: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    """Weights with the products, by peft's formula."""
    weights = {}
    for place, own in factors.items():
        number, rank = SIZES[place][0], CONFIGS[place].r
        a, b = own["lora_A"].view(number, rank, -1), own["lora_B"].view(-1, rank, number)
        delta = CONFIGS[place].scaling * torch.einsum("ore,eri->eoi", b, a)
        name = "router.weight" if place == "router" else place
        delta = delta.transpose(1, 2) if place == "experts.down" else delta
        weights[name] = layer.get_parameter(name) + delta.flatten(0, 1)
    return weights


def add_adapters(layer: MoELayer) -> None:
    """Adapters everywhere, with values of ``factors_of``."""
    LoraExperts.add(layer.experts, OF_EXPERTS)
    LoraRouter.add(layer.router, CONFIGS["router"])
    with torch.no_grad():
        for place, adapter in adapters_of(layer).items():
            for name, whole in factors_of(place).items():
                own = adapter.param_layouts[name].take(adapter.from_file(name, whole), adapter.group.rank())
                assert torch.equal(adapter.to_file(name, adapter.from_file(name, whole)), whole)
                adapter.get_parameter(name).copy_(own)


def adapters_of(layer: MoELayer):
    experts = {f"experts.{name}": adapter for name, adapter in layer.experts.lora.items()}
    return experts | {"router": layer.router.lora["weight"]}


def hidden_of(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(LENGTH, 2, WIDTH, generator=generator, dtype=torch.float64)


def check(topology: Topology, *, sequence_parallel: bool) -> None:
    groups, one, own = Groups.of(topology), alone(topology), topology.rank("dp")
    dense, split = moe_layer(MIXTRAL, one), moe_layer(MIXTRAL, groups, sequence_parallel=sequence_parallel)
    add_adapters(split)
    factors = {place: {name: each.requires_grad_() for name, each in factors_of(place).items()} for place in CONFIGS}
    inputs = [hidden_of(number).requires_grad_() for number in range(topology.size("dp"))]
    outputs = [functional_call(dense, merged(dense, factors), (each,)) for each in inputs]
    torch.stack([output.square().sum() for output in outputs]).sum().backward()

    view = SequenceView(LENGTH, groups.tp if sequence_parallel else None)
    first, stop = view.interval if sequence_parallel else (0, LENGTH)
    input_ = hidden_of(own)[first:stop].requires_grad_()
    output = split(input_, sequence=view)
    torch.testing.assert_close(output, outputs[own][first:stop], rtol=1e-10, atol=1e-10)
    output.square().sum().backward()
    torch.testing.assert_close(input_.grad, inputs[own].grad[first:stop], rtol=1e-10, atol=1e-10)
    finalize_gradients_(split, tp_group=groups.tp, dp_group=groups.dp, expert_dp_group=groups.expert_dp)
    total = torch.zeros((), dtype=torch.float64)
    for place, adapter in adapters_of(split).items():
        for name, layout in adapter.param_layouts.items():
            expected = factors[place][name].grad
            total += expected.square().sum()
            part = layout.take(adapter.from_file(name, expected), adapter.group.rank())
            gradient = adapter.get_parameter(name).grad
            torch.testing.assert_close(gradient, part, rtol=1e-10, atol=1e-10)
    # The norm of adapters alone, as in training: each part once.
    for name, param in split.named_parameters():
        if "lora" not in name:
            param.grad = None
    norm = global_grad_norm(split, tp_group=groups.tp, groups=groups)
    torch.testing.assert_close(norm, total.sqrt(), rtol=1e-12, atol=0.0)

    for layer in (split.experts, split.router):
        layer.merge_()
    torch.testing.assert_close(split(input_, sequence=view), output, rtol=1e-10, atol=1e-10)
    whole = merged(dense, factors)
    for name, param, layout in named_param_layouts(split, groups.tp.size()):
        group = groups.experts if replicas_of(split)[param].is_of_expert else groups.tp
        if "lora" not in name:
            torch.testing.assert_close(param, layout.take(whole[name], group.rank()), rtol=1e-12, atol=1e-12)
    for layer in (split.experts, split.router):
        layer.unmerge_()
        layer.remove()
    plain = dict(split.named_parameters())
    assert plain.keys() == dict(dense.named_parameters()).keys()
    torch.testing.assert_close(split(input_, sequence=view), dense(hidden_of(own))[first:stop], rtol=1e-9, atol=1e-9)


@pytest.mark.sample(4)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_is_the_merged_dense_layer(layout, group):
    topology = Topology.create(**LAYOUTS[layout])
    check(topology, sequence_parallel=False)
    if LAYOUTS[layout]["tp"] > 1:
        check(topology, sequence_parallel=True)


@pytest.mark.ranks(1)
def test_one_rank_is_the_merged_dense_layer(group):
    check(Topology.create(), sequence_parallel=False)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("etp", [1, 2])
def test_collectives(etp, group):
    """Ranks that split experts gather one factor of each weight, and scatter its gradient; others add nothing."""
    groups = Groups.of(Topology.create(tp=2, ep=2 // etp, etp=etp))
    launches = []
    for has_adapters in (False, True):
        layer = moe_layer(MIXTRAL, groups)
        if has_adapters:
            LoraExperts.add(layer.experts, OF_EXPERTS)
        hidden = hidden_of(0).requires_grad_()
        with CollectiveCounter() as forward:
            output = layer(hidden)
        with CollectiveCounter() as backward:
            output.sum().backward()
        launches.append([[(each.name, each.num_bytes) for each in counter.launches] for counter in (forward, backward)])
    whole = [each.r for each in OF_EXPERTS.values()] if etp == 2 else []
    own = [balanced_sizes(rank, 2)[group.rank()] for rank in whole]
    for plain, adapted, name, ranks in zip(*launches, ("all_gather", "reduce_scatter"), (own, whole), strict=True):
        assert sorted(adapted) == sorted(plain + [(name, MIXTRAL.num * rank * WIDTH * 8) for rank in ranks])


@pytest.mark.ranks(2)
def test_what_experts_and_routers_cannot_have(group):
    layer = moe_layer(MIXTRAL, Groups.of(Topology.create(tp=2)), tp=2)
    with pytest.raises(ConfigError, match=r"LoRA rank 1 of experts is less than the 2 ranks that split each expert"):
        LoraExperts.add(layer.experts, {"up": LoraConfig(r=1)})
    for options in ({"lora_dropout": 0.1}, {"use_dora": True}):
        (name,) = options
        config = LoraConfig(**options)
        for add in (lambda config=config: LoraExperts.add(layer.experts, {"up": config}),
                    lambda config=config: LoraRouter.add(layer.router, config),
                    lambda config=config: dataclasses.replace(config, target_parameters=("gate.weight",))):  # fmt: skip
            with pytest.raises(ConfigError, match=f"{name} is .*adapters of experts and routers do not have in peft"):
                add()
    with pytest.raises(ConfigError, match="a Router is no ExpertWeights"):
        LoraExperts.add(layer.router, {"up": LoraConfig()})
    with pytest.raises(ConfigError, match="a LoraExpertWeights is no Router"):
        LoraRouter.add(LoraExperts.add(layer.experts, {"up": LoraConfig()}), LoraConfig())
    with pytest.raises(ConfigError, match="the experts have adapters already: up; remove them first"):
        LoraExperts.add(layer.experts, {"down": LoraConfig()})
