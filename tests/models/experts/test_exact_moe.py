"""Experts in exact mode are the experts of plain mode, with the same bits on any ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from harness.parity import assert_bit_equal, assert_close_to
from models.experts.test_moe import KINDS, MIXTRAL, WIDTH, config, moe_layer
from models.model_checks import alone, check_gradients
from torch import Tensor

from shardwise.core.communication.trees import tree_sum
from shardwise.core.errors import ConfigError
from shardwise.core.rank_grid import ParallelSizes
from shardwise.core.sequence_view import SequenceView
from shardwise.core.sharding import balanced_range
from shardwise.core.topology import Groups, Topology
from shardwise.exact import expert_products, sum_in_parts
from shardwise.exact.strategies import linear_by_parts
from shardwise.models.adapters.config import LoraConfig
from shardwise.models.adapters.lora_experts import LoraExperts, LoraRouter
from shardwise.models.experts import ClampedGate, Experts
from shardwise.models.experts.exact_moe import ExactMoELayer
from shardwise.models.experts.moe import MoELayer
from shardwise.models.experts.router import RoutedBatch
from shardwise.training.gradients.finalize import finalize_gradients_

PARTS, LENGTH, BATCH = 4, 8, 3
# Number of tokens of each sequence; the others are padding.
TOKENS = (8, 5, 0)
SHARED = dataclasses.replace(MIXTRAL, shared_ffn_hidden_size=24)
EXACT_KINDS = {
    "softmax": dataclasses.replace(MIXTRAL, z_loss=0.01),
    "weights on the input": KINDS["softmax after the choice, weights on the input"],
    "sigmoid, groups": KINDS["sigmoid, groups"],
    "balance of a micro-batch": KINDS["groups, no normalization"],
    "biases": dataclasses.replace(MIXTRAL, biases=True, softmax_after_choice=True),
    "shared": SHARED,
}
LAYOUTS: dict[str, dict[str, int]] = {
    "ep 4": {"ep": 4},
    "ep 2 of dp 4": {"ep": 2},
    "tp 2, ep 4": {"tp": 2, "ep": 4, "etp": 1},
    "tp 2, ep 2": {"tp": 2, "ep": 2, "etp": 1},
    "tp 4, ep 2": {"tp": 4, "ep": 2, "etp": 1},
    "tp 2, etp 1": {"tp": 2, "etp": 1},
}


def layer_of(spec: Experts, groups: Groups, kind: type[MoELayer], **options: Any) -> MoELayer:
    for group in (groups.tp, groups.dp, groups.expert_dp) if kind is ExactMoELayer else ():
        assert group is not None
        sum_in_parts(group, PARTS)
    return moe_layer(spec, groups, kind, tp=4, **options)


def inputs(number: int, dtype: torch.dtype) -> list[Tensor]:
    """Hidden states of a sample, and the gradient of the output."""
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(LENGTH, BATCH, WIDTH, dtype=torch.float64, generator=generator).to(dtype) for _ in range(2)]


def own_positions(whole: Tensor, group: Any) -> Tensor:
    return whole if group is None else whole[slice(*balanced_range(LENGTH, group.size(), group.rank()))]


def run(layer: MoELayer, group: Any, dtype: torch.dtype, numbers: list[int]) -> list[tuple[Tensor, ...]]:
    """Outputs and gradients of inputs at this rank's positions, and statistics; parameters keep the gradients."""
    results = []
    for number in numbers:
        hidden, grad = (own_positions(each, group) for each in inputs(number, dtype))
        hidden = hidden.clone().requires_grad_()
        is_token = torch.arange(LENGTH) < torch.tensor(TOKENS).unsqueeze(1)
        layer.begin(0.7)
        output = layer(hidden, batch=RoutedBatch(SequenceView(LENGTH, group), is_token))
        output.backward(grad)
        results.append((output.detach(), hidden.grad, layer.statistics))
    return results


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", EXACT_KINDS)
def test_exact_experts_are_those_of_plain_mode(group, kind):
    topology = Topology.create()
    layers = [layer_of(EXACT_KINDS[kind], alone(topology), each) for each in (MoELayer, ExactMoELayer)]
    plain, exact = (run(layer, None, torch.float64, [0])[0] for layer in layers)
    for found, expected, atol in zip(exact, plain, (1e-12, 1e-12, 1e-9), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=atol)
    check_gradients(layers[1], layers[0], alone(topology), atol=1e-12)
    topology.destroy()


@pytest.mark.sample(3)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_bits_at_every_layout(group, layout):
    """One sample for each data-parallel rank; on one rank a tree sums their gradients."""
    topology, one = Topology.create(**LAYOUTS[layout]), Topology.create()
    groups, num, place = Groups.of(topology), topology.size("dp"), topology.rank("dp")
    for kind in EXACT_KINDS if layout in ("ep 4", "tp 2, ep 4") else ["softmax"]:
        spec = EXACT_KINDS[kind]
        dense = layer_of(spec, alone(one), ExactMoELayer).float()
        whole, terms = [], []
        for number in range(num):
            whole += run(dense, None, torch.float32, [number])
            terms.append([param.grad for param in dense.parameters()])
            dense.zero_grad()
        for param, *of_samples in zip(dense.parameters(), *terms, strict=True):
            param.grad = tree_sum(of_samples)
        for sequence_parallel in (False, True) if groups.tp.size() > 1 else (False,):
            split = layer_of(spec, groups, ExactMoELayer, sequence_parallel=sequence_parallel).float()
            positions = groups.tp if sequence_parallel else None
            (results,) = run(split, positions, torch.float32, [place])
            *of_positions, statistics = whole[place]
            wanted = [*(own_positions(each, positions) for each in of_positions), statistics]
            for found, expected in zip(results, wanted, strict=True):
                assert_bit_equal(found, expected, name=f"{kind}, {sequence_parallel=}")
            finalize_gradients_(split, tp_group=groups.tp, dp_group=groups.dp, expert_dp_group=groups.expert_dp)
            # Of two different numbers in fp32, the distance is larger than the tolerance.
            check_gradients(split, dense, groups, atol=0.0)
    topology.destroy()
    one.destroy()


@pytest.mark.ranks(4)
def test_what_has_no_exact_form_is_refused(group):
    for axes, message in (
        ({"tp": 2}, r"exact: 2 ranks split each expert, .*; set etp to 1"),
        ({"cp": 2}, r"exact: 2 ranks share positions of a sample \(cp\), and experts have no exact form for that"),
        (
            {"tp": 2, "ep": 2, "etp": 1, "order": "tp-cp-dp-ep-pp"},
            r"exact: the ranks \[[02], [13]\] share samples or experts' tokens, and do not follow each other among",
        ),
    ):
        topology = Topology.create(ParallelSizes(**axes))
        with pytest.raises(ConfigError, match=message):
            layer_of(MIXTRAL, Groups.of(topology), ExactMoELayer)
        topology.destroy()


@pytest.mark.ranks(1)
def test_adapters_are_refused(group):
    layer = layer_of(MIXTRAL, alone(Topology.create()), ExactMoELayer)
    for refused, message in (
        (lambda: LoraExperts.add(layer.experts, {"up": LoraConfig()}), "an adapter on experts has no exact products"),
        (lambda: LoraRouter.add(layer.router, LoraConfig()), "an adapter on a router has no exact sums"),
    ):
        with pytest.raises(ConfigError, match=message):
            refused()


def test_settings_of_experts_that_have_no_exact_form_are_refused():
    for values, name in (
        ({"capacity_factor": 1.5}, "capacity_factor"),
        ({"balances": "global"}, "balances 'global'"),
        ({"pools_layers": True}, "pools_layers"),
        ({"gate": ClampedGate()}, "gate"),
        ({"shared_ffn_hidden_size": 8, "shared_gate": True}, "shared_gate"),
    ):
        with pytest.raises(ConfigError, match=f"experts.{name} cannot be used with exact_parts"):
            config(dataclasses.replace(MIXTRAL, **values), exact_parts=4)
    with pytest.raises(ConfigError, match="ep_comm_type 'all_gather' cannot be used with exact_parts"):
        config(MIXTRAL, exact_parts=4, ep_comm_type="all_gather")
    # Also where another run would gather the tokens; the banner reports it.
    assert config(dataclasses.replace(MIXTRAL, per_token=8), exact_parts=4).ep_comm_type == "a2a"


def test_products_of_few_tokens_are_those_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a router and of experts, also where a library multiplies up to 31 rows in another way."""

    def other(product: Any) -> Any:
        return lambda rows, weight: product(rows, weight) * (2 if len(rows) < 32 else 1)

    monkeypatch.setattr(torch.nn.functional, "linear", other(torch.nn.functional.linear))
    monkeypatch.setattr(expert_products, "whole_product", other(expert_products.whole_product))
    rows, weight = torch.randn(3, 8, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    expected = rows @ weight.t()
    assert_close_to(linear_by_parts(rows.view(3, 1, 8), weight, 1).view(3, 5), expected, rtol_of_norm=1e-14)
    assert_close_to(expert_products.linear_by_source(rows, weight, None, [[3]]), expected, rtol_of_norm=1e-14)
