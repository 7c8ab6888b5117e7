"""Losses, loads and entropy of routers on any ranks are those of their formulas, and padding counts nowhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models.experts.test_moe import LENGTH, MIXTRAL, VOCABULARY, WIDTH, config, moe_layer, samples
from torch import Tensor

from shardwise.core.communication.collectives import all_reduce
from shardwise.core.sequence_view import SequenceView
from shardwise.core.topology import Groups, Topology
from shardwise.models import GPT, Bert
from shardwise.models.experts import Experts
from shardwise.models.experts.moe import MoELayer
from shardwise.models.experts.router import RoutedBatch, metrics_of
from shardwise.training.gradients.finalize import finalize_gradients_

BATCH = 4
# Numbers of ranks, and whether tensor-parallel ranks split the sequence.
LAYOUTS: dict[int, list[tuple[dict[str, int], bool]]] = {
    1: [({}, False)],
    2: [({"tp": 2}, False), ({"tp": 2}, True), ({"cp": 2}, False), ({"ep": 2}, False)],
    4: [({"tp": 2, "cp": 2}, True), ({"tp": 2, "ep": 4, "etp": 1}, False), ({"cp": 2, "ep": 4}, False)],
}


def samples_of(number: int, padding: str) -> tuple[Tensor, Tensor]:
    """Hidden states ``[number, s, b, h]``, and where they are of tokens, ``[number, b, s]``."""
    generator = torch.Generator().manual_seed(8)
    hidden = torch.randn(number, LENGTH, BATCH, WIDTH, dtype=torch.float64, generator=generator)
    is_token = torch.rand(number, BATCH, LENGTH, generator=generator) < (0.6 if padding == "some" else 0.0)
    # A sequence of padding alone.
    is_token[:, 2] = False
    return hidden, is_token


def defined(spec: Experts, weight: Tensor, batches: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
    """Mean auxiliary loss of batches of sequences ``[n, h]`` without padding; and ``MoELayer.statistics`` of all."""
    balance, statistics = [], torch.zeros(spec.num + 3, dtype=torch.float64)
    every = [tokens for batch in batches for tokens in batch]
    together = {"sequence": every, "micro_batch": [torch.cat(batch) for batch in batches], "global": [torch.cat(every)]}
    for tokens in together[spec.balances]:
        scores = (tokens @ weight.t()).softmax(-1)
        counts = torch.zeros(spec.num, dtype=torch.float64)
        for token in scores:
            counts[token.topk(spec.per_token).indices] += 1
        statistics[:-3] += counts
        statistics[-2] -= (scores * scores.log()).sum().detach()
        balance.append(spec.num * (counts / max(1, counts.sum()) * scores.sum(0) / max(1, len(tokens))).sum())
    squares = [(tokens @ weight.t()).logsumexp(-1).square().sum() / max(1, len(tokens)) for tokens in every]
    loss = spec.aux_loss * torch.stack(balance).mean() + spec.z_loss * torch.stack(squares).mean()
    statistics[-1] = loss.detach() * len(batches)
    return loss, statistics


def check(spec: Experts, groups: Groups, *, sequence_parallel: bool, padding: str) -> None:
    """Losses and statistics of a layer, and gradients of its router and input, by the auxiliary losses alone."""
    place, number = groups.data.samples
    layer = moe_layer(spec, groups, tp=2, sequence_parallel=sequence_parallel)
    layer.begin(1 / number)
    hidden, is_token = samples_of(number, padding)
    whole, weight = hidden.clone().requires_grad_(), layer.router.weight.detach().clone().requires_grad_()
    batches = [[each[:, at][tokens[at]] for at in range(BATCH)] for each, tokens in zip(whole, is_token, strict=True)]
    loss, statistics = defined(spec, weight, batches)
    loss.backward()
    view = groups.data.view(LENGTH, groups.tp if sequence_parallel else None)
    context = view.context

    def own(sequences: Tensor) -> Tensor:
        mine = sequences if context is None else context.own(sequences, dim=0)
        return mine[slice(*view.interval)]

    x = own(hidden[place]).clone().requires_grad_()
    (layer(x, batch=RoutedBatch(view, is_token[place])) * 0).sum().backward()
    finalize_gradients_(layer, tp_group=groups.tp, dp_group=groups.dp, expert_dp_group=groups.expert_dp)
    close: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-14}
    torch.testing.assert_close(layer.router.weight.grad, weight.grad, **close)
    assert whole.grad is not None
    torch.testing.assert_close(x.grad, own(whole.grad[place]), **close)
    assert layer.statistics is not None
    total = layer.statistics
    for group in (groups.tp, groups.dp):
        total = total if group is None else all_reduce(total, group=group)
    torch.testing.assert_close(total, statistics, **close)
    assert metrics_of(total.unsqueeze(0), spec, number).isfinite().all()


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("padding", ["some", "all"])
@pytest.mark.parametrize("balances", ["sequence", "micro_batch", "global"])
def test_padding_counts_nowhere(balances, padding, group):
    spec = dataclasses.replace(MIXTRAL, z_loss=0.03, balances=balances)
    for sizes, sequence_parallel in LAYOUTS[group.size()]:
        check(spec, Groups.of(Topology.create(**sizes)), sequence_parallel=sequence_parallel, padding=padding)


@pytest.mark.ranks(1, 2, 4)
def test_a_loss_of_all_layers_together(group):
    """Each layer's scores get a gradient that depends on choices in both layers, and in all ranks' batches."""
    spec = dataclasses.replace(MIXTRAL, pools_layers=True, balances="global")
    for sizes, sequence_parallel in LAYOUTS[group.size()]:
        groups = Groups.of(Topology.create(**sizes))
        if groups.cp is not None and groups.cp.size() > 1:
            continue
        place, number = groups.data.samples
        layers = [moe_layer(spec, groups, tp=2, sequence_parallel=sequence_parallel) for _ in range(2)]
        hidden, is_token = samples_of(number, "some")
        view = SequenceView(LENGTH, groups.tp if sequence_parallel else None)
        batch = RoutedBatch(view, is_token[place], choices=[])
        outputs = []
        for factor, layer in enumerate(layers, 1):
            layer.begin(1 / number)
            outputs.append(layer(hidden[place][slice(*view.interval)] * factor, batch=batch))
        (outputs[0] * 0 + outputs[1] * 0).sum().backward()
        weights = [layer.router.weight.detach().clone().requires_grad_() for layer in layers]
        tokens = hidden.transpose(1, 2)[is_token]
        scores = torch.cat([(tokens * factor @ weight.t()).softmax(-1) for factor, weight in enumerate(weights, 1)])
        chosen = torch.zeros_like(scores).scatter_(1, scores.topk(spec.per_token).indices, 1.0)
        loss = spec.aux_loss * spec.num * (chosen.mean(0) * scores.mean(0)).sum()
        loss.backward()
        total = layers[0].statistics[-1] + layers[1].statistics[-1]
        for other in (groups.tp, groups.dp):
            total = total if other is None else all_reduce(total, group=other)
        torch.testing.assert_close(total / number, loss.detach(), rtol=1e-10, atol=0.0)
        for layer, weight in zip(layers, weights, strict=True):
            finalize_gradients_(layer, tp_group=groups.tp, dp_group=groups.dp, expert_dp_group=groups.expert_dp)
            torch.testing.assert_close(layer.router.weight.grad, weight.grad, rtol=1e-10, atol=1e-14)


def forms_of(lengths: Tensor) -> dict[str, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]:
    """For each way to say where padding is: rows with padding, and the argument, from rows with padding at the end."""
    is_token = torch.arange(LENGTH) < lengths.unsqueeze(1)
    return {
        "lengths": lambda rows: (rows, {"lengths": lengths}),
        "mask at the end": lambda rows: (rows, {"attention_mask": is_token.long()}),
        "mask at the start": lambda rows: (rows.flip(1), {"attention_mask": is_token.flip(1).long()}),
        "documents": lambda rows: (rows, {"document_ids": is_token.long() - 1}),
    }


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", [GPT, Bert])
def test_a_padded_batch_is_its_texts_alone(kind, group):
    """However a batch says where its padding is."""
    groups = Groups.of(Topology.create(tp=group.size()))
    model = kind(config(dataclasses.replace(MIXTRAL, z_loss=0.03), tp=2), VOCABULARY, LENGTH, groups=groups)
    lengths = torch.tensor([9, 5])
    texts = [samples(number)[0, :length] for number, length in enumerate(lengths.tolist())]

    def gradients(rows: Tensor, labels: Tensor, scale: float, **others: Tensor) -> None:
        for layer in model.modules():
            if isinstance(layer, MoELayer):
                layer.loss_scale = scale
        if kind is Bert:
            loss, _ = model(rows, others.get("attention_mask"), lm_labels=labels, position_ids=others["position_ids"])
        else:
            loss = model(rows, labels=labels, **others)
        loss.sum().backward()

    for text in texts:
        gradients(text[None], text[None], 0.5, position_ids=torch.arange(len(text)))
    finalize_gradients_(model, tp_group=groups.tp, dp_group=groups.dp, expert_dp_group=groups.expert_dp)
    expected = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    places = torch.arange(LENGTH).expand(2, -1)
    for name, form in forms_of(lengths).items():
        if kind is Bert and "mask" not in name:
            continue
        model.zero_grad()
        at_end = "start" not in name
        rows, labels = torch.full((2, LENGTH), 3), torch.full((2, LENGTH), -100)
        for row, text in enumerate(texts):
            own = text if at_end else text.flip(0)
            rows[row, : len(text)] = labels[row, : len(text)] = own
        rows, others = form(rows)
        labels = labels if at_end else labels.flip(1)
        positions = places if at_end else (places - (LENGTH - lengths[:, None])).clamp(min=0)
        gradients(rows, labels, 1.0, position_ids=positions, **others)
        finalize_gradients_(model, tp_group=groups.tp, dp_group=groups.dp, expert_dp_group=groups.expert_dp)
        assert {each for each, param in model.named_parameters() if param.grad is not None} == set(expected)
        for each, grad in expected.items():
            torch.testing.assert_close(model.get_parameter(each).grad, grad, rtol=1e-10, atol=1e-12)


@pytest.mark.ranks(1)
def test_the_bias_of_the_choice_moves_against_loads(group):
    spec = dataclasses.replace(MIXTRAL, num=4, selection_bias=True, bias_rate=0.5)
    loads = torch.tensor([9.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    for centers_bias, expected in ((False, [-0.5, 0.5, 0.5, 0.5]), (True, [-0.75, 0.25, 0.25, 0.25])):
        layer = moe_layer(dataclasses.replace(spec, centers_bias=centers_bias), Groups(group))
        torch.nn.init.zeros_(layer.router.selection_bias)
        layer.router.balance_(loads)
        assert layer.router.selection_bias.tolist() == expected
