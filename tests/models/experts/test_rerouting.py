"""Experts that take turns, or that a program chooses, are those of a definition at every layout."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models.experts.test_balance_losses import BATCH, LAYOUTS, samples_of
from models.experts.test_capacity import compare
from models.experts.test_moe import LENGTH, MIXTRAL, WIDTH, moe_layer
from models.model_checks import alone
from torch import Tensor

from shardwise.core.topology import Groups, Topology
from shardwise.models.experts.moe import MoELayer


def in_turn(number: int) -> Tensor:
    """Experts ``[number, b, s, k]``: the first token of each sequence has experts 0 and 1, the next one 2 and 3."""
    every = torch.arange(LENGTH * MIXTRAL.per_token) % MIXTRAL.num
    return every.view(LENGTH, MIXTRAL.per_token).expand(number, BATCH, -1, -1)


def at_random(number: int) -> Tensor:
    """Experts ``[number, b, s, k]``."""
    scores = torch.rand(number, BATCH, LENGTH, MIXTRAL.num, generator=torch.Generator().manual_seed(9))
    return scores.topk(MIXTRAL.per_token).indices


def defined(layer: MoELayer, hidden: Tensor, experts: Tensor) -> Tensor:
    """Output for ``[s, b, h]``, choice by choice, with experts ``[b, s, k]``."""
    f = layer.spec.ffn_hidden_size
    up, down = layer.experts.up.view(-1, 2 * f, WIDTH), layer.experts.down.view(-1, f, WIDTH)
    rows = []
    for sample in range(BATCH):
        for token, chosen in zip(hidden[:, sample], experts[sample].tolist(), strict=True):
            scores = (layer.router.weight @ token).softmax(-1)
            inner = [up[expert] @ token for expert in chosen]
            parts = [
                scores[expert] * ((F.silu(each[:f]) * each[f:]) @ down[expert])
                for expert, each in zip(chosen, inner, strict=True)
            ]
            rows.append(torch.stack(parts).sum(0) / scores[chosen].sum())
    return torch.stack(rows).view(BATCH, LENGTH, WIDTH).transpose(0, 1)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("kind", ["in turn", "given"])
def test_replaced_choices_are_those_of_a_definition(kind, group):
    """Outputs, the input's gradient, and those of the router, which weighs the experts, and of the experts."""
    spec = dataclasses.replace(MIXTRAL, aux_loss=0.0, forces_balance=kind == "in turn")
    for sizes, sequence_parallel in LAYOUTS[group.size()]:
        topology = Topology.create(**sizes)
        groups = Groups.of(topology)
        place, number = groups.data.samples
        experts = in_turn(number) if kind == "in turn" else at_random(number)
        dense = moe_layer(spec, alone(topology), tp=2)
        split = moe_layer(spec, groups, tp=2, sequence_parallel=sequence_parallel)
        hidden, _ = samples_of(number, "some")
        whole = hidden.clone().requires_grad_()
        expected = torch.stack([defined(dense, *each) for each in zip(whole, experts, strict=True)])
        batch: dict[str, Any] = {}
        if kind == "given":
            mine = experts[place]

            def given(_: MoELayer, chosen: Tensor, samples: Tensor, positions: Tensor, mine: Tensor = mine) -> Tensor:
                assert chosen.shape == (len(samples), MIXTRAL.per_token)
                return mine[samples, positions]

            batch = {"reroute": given}
        compare(split, dense, groups, whole, expected, sequence_parallel=sequence_parallel, **batch)
