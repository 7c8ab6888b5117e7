"""Experts with a capacity take the same tokens of a sequence at every layout, and those of a definition."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models.experts.test_balance_losses import BATCH, LAYOUTS, samples_of
from models.experts.test_moe import LENGTH, MIXTRAL, WIDTH, moe_layer
from models.model_checks import alone, check_gradients
from torch import Tensor

from shardwise.core.communication.collectives import all_reduce
from shardwise.core.topology import Groups, Topology
from shardwise.models.experts import Experts
from shardwise.models.experts.moe import MoELayer
from shardwise.models.experts.router import METRICS, RoutedBatch, metrics_of
from shardwise.training.gradients.finalize import finalize_gradients_


def defined(layer: MoELayer, tokens: Tensor) -> tuple[Tensor, int]:
    """Output for the tokens of a sequence ``[n, h]``, choice by choice; and the number of choices that do not fit."""
    spec, f = layer.spec, layer.spec.ffn_hidden_size
    up, down = layer.experts.up.view(spec.num, 2 * f, WIDTH), layer.experts.down.view(spec.num, f, WIDTH)
    scores = (tokens @ layer.router.weight.t()).softmax(-1)
    choices = []
    for place, token in enumerate(scores):
        chosen = token.topk(spec.per_token).indices
        total = token[chosen].sum()
        choices += [(place, expert, token[expert] / total) for expert in chosen.tolist()]
    assert spec.capacity_factor is not None
    room = [math.ceil(spec.capacity_factor * len(tokens) * spec.per_token / spec.num)] * spec.num
    if spec.drops_by == "probability":
        choices.sort(key=lambda choice: -choice[2].item())
    outputs, dropped = [token * 0 for token in tokens], 0
    for place, expert, weight in choices:
        room[expert] -= 1
        if room[expert] < 0:
            dropped += 1
            continue
        inner = up[expert] @ tokens[place]
        output = (F.silu(inner[:f]) * inner[f:]) @ down[expert]
        if spec.weighs_input:
            inner = up[expert] @ (tokens[place] * weight)
            output, weight = (F.silu(inner[:f]) * inner[f:]) @ down[expert], 1.0
        outputs[place] = outputs[place] + weight * output
    return torch.stack(outputs), dropped


def compare(
    split: MoELayer,
    dense: MoELayer,
    groups: Groups,
    whole: Tensor,
    outputs: Tensor,
    *,
    sequence_parallel: bool,
    **batch: Any,
) -> None:
    """Compare output and all gradients of ``split`` with ``outputs``, which were computed of ``whole`` by ``dense``."""
    place, _ = groups.data.samples
    weighting = torch.randn(whole.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    (outputs * weighting).sum().backward()
    view = groups.data.view(LENGTH, groups.tp if sequence_parallel else None)
    context = view.context

    def own(sequences: Tensor) -> Tensor:
        mine = sequences if context is None else context.own(sequences, dim=0)
        return mine[slice(*view.interval)]

    x = own(whole.detach()[place]).clone().requires_grad_()
    output = split(x, sequence=view, batch=RoutedBatch(view, **batch))
    (output * own(weighting[place])).sum().backward()
    finalize_gradients_(split, tp_group=groups.tp, dp_group=groups.dp, expert_dp_group=groups.expert_dp)
    close: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(output, own(outputs[place]), **close)
    assert whole.grad is not None
    torch.testing.assert_close(x.grad, own(whole.grad[place]), **close)
    check_gradients(split, dense, groups, atol=1e-11)


def check(
    spec: Experts, topology: Topology, way: Any = "auto", *, sequence_parallel: bool, padding: str | None
) -> None:
    groups = Groups.of(topology)
    place, number = groups.data.samples
    dense = moe_layer(spec, alone(topology), tp=2)
    split = moe_layer(spec, groups, tp=2, sequence_parallel=sequence_parallel, ep_comm_type=way)
    split.begin(1.0)
    hidden, is_token = samples_of(number, "some")
    if padding is None:
        is_token.fill_(True)
    whole, outputs, dropped = hidden.clone().requires_grad_(), torch.zeros_like(hidden), 0
    for sample in range(number):
        for row in range(BATCH):
            where = is_token[sample, row]
            if where.any():
                outputs[sample, where, row], here = defined(dense, whole[sample, :, row][where])
                dropped += here
    assert dropped > 0
    mask = None if padding is None else is_token[place]
    compare(split, dense, groups, whole, outputs, sequence_parallel=sequence_parallel, is_token=mask)
    assert split.statistics is not None
    total = split.statistics
    for group in (groups.tp, groups.dp):
        total = total if group is None else all_reduce(total, group=group)
    assert dict(zip(METRICS, metrics_of(total[None], spec, 1), strict=True))["dropped_tokens"] == dropped


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("padding", [None, "some"])
@pytest.mark.parametrize("drops_by", ["probability", "position"])
def test_a_full_expert_takes_no_more_tokens(drops_by, padding, group):
    spec = dataclasses.replace(MIXTRAL, aux_loss=0.0, capacity_factor=0.7, drops_by=drops_by)
    way: Any = "a2a" if drops_by == "probability" else "all_gather"
    for sizes, sequence_parallel in LAYOUTS[group.size()]:
        check(spec, Topology.create(**sizes), way, sequence_parallel=sequence_parallel, padding=padding)


@pytest.mark.ranks(1)
def test_capacity_of_experts_that_weigh_their_input(group):
    spec = dataclasses.replace(MIXTRAL, aux_loss=0.0, capacity_factor=0.7, weighs_input=True)
    check(spec, Topology.create(), sequence_parallel=False, padding=None)


@pytest.mark.ranks(1)
def test_capacity_is_for_training(group):
    layers = [
        moe_layer(dataclasses.replace(MIXTRAL, capacity_factor=factor), Groups(group)) for factor in (None, 0.2, 99.0)
    ]
    hidden = torch.randn(LENGTH, 1, WIDTH, dtype=torch.float64)
    every, few, enough = (layer(hidden) for layer in layers)
    assert not torch.equal(every, few)
    assert torch.equal(every, enough)
    assert torch.equal(layers[1].eval()(hidden), every)
