"""The doctor on small models of one micro-batch, without ``inputs``: classes of faults, modules, and sound runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from doctor.parts import VOCAB, WIDTH, Column, Group, Residual, Row, diagnosed, mlp
from doctor.small_models import (
    INSIDE,
    SEQUENCE,
    Attention,
    Dropped,
    Gated,
    Joint,
    ResidualInside,
    Tied,
    Tokens,
    Turned,
    WithLoss,
    WithPositions,
    WrongGradient,
    averaged,
    loss_of_parts,
    loss_of_replica,
    loss_of_same_samples,
    loss_of_sum,
    loss_with_positions,
    mean_of,
    net,
    of_mlp,
    of_sequence,
    other_on_the_last,
    placed_as,
    sequence_net,
    size_of,
    split_by_dtensor,
    strange_loss,
    sum_copies,
    sum_shared,
)
from torch import nn


@dataclass(frozen=True)
class Case:
    """A model, and what the doctor should say of it.

    Attributes:
        build: makes the model, on one rank (None) or for the ranks of a group.
        kind: class of the fault; "" for a sound run.
        modules: right answers; empty for a sound run.
        options: of ``diagnosed``.
        ranks: number of ranks.
    """

    build: Callable[[Group], nn.Module]
    kind: str = ""
    modules: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2


_HALVES = torch.arange(4 * WIDTH).chunk(2)

FAULTS: dict[str, Case] = {
    "input gradient of the first column not summed": Case(
        lambda group: net(nn.Sequential(Column(WIDTH, 16, group, sums=False), nn.Tanh(), Row(16, WIDTH, group))),
        "never summed",
        ("1.0",),
    ),
    "input gradient of one of three columns not summed": Case(
        lambda group: net(nn.LayerNorm(WIDTH), Attention(group, unsummed="value")), "never summed", ("2.value",)
    ),
    "gather whose backward slices": Case(
        lambda group: sequence_net(group, up={"gathers": "slices"}), "never summed", ("1.layers.1",), SEQUENCE
    ),
    "one of several gathers slices": Case(
        lambda group: sequence_net(group, Attention(group, gathers=True, unsummed="key")),
        "never summed",
        ("1.key",),
        {"sum_gradients": of_sequence(lambda name: "output.bias" in name or not name.startswith("1."))},
    ),
    "bias on every rank": Case(of_mlp(down={"bias_of": "every rank"}), "scaled", ("2.layers.3",)),
    "residual on every rank": Case(lambda group: net(ResidualInside(group)), "scaled", ("1", "1.down")),
    "bias before a sum outside of the layer": Case(
        lambda group: net(ResidualInside(group, bias=True, residual=False)), "scaled", ("1", "1.down")
    ),
    "row shards swapped": Case(
        of_mlp(down={"columns": (_HALVES[1], _HALVES[0])}), "misplaced", ("2.layers.3", "2.layers.3.weight")
    ),
    "column shards swapped": Case(
        of_mlp(up={"rows": (_HALVES[1], _HALVES[0])}),
        "misplaced",
        ("2.layers.1", "2.layers.1.weight", "2.layers.1.bias"),
    ),
    "joint weight split as one": Case(
        lambda group: net(Gated(group, lambda rank, size: torch.arange(8 * WIDTH).chunk(size)[rank])),
        "misplaced",
        ("1.up", "1.up.weight", "1.up.bias", "1"),
    ),
    "positions restart inside": Case(
        lambda group: sequence_net(group, restarts=True, is_joint=True), "positions", ("0",), SEQUENCE
    ),
    "strange loss": Case(lambda group: WithLoss(group, strange_loss), "unexplained", ("loss",), INSIDE),
    "gradient behind an identity dropout": Case(lambda group: net(Dropped(group, times=3)), "scaled", ("1.down", "1")),
    "rows of the vocabulary not summed": Case(
        lambda group: nn.Sequential(Tokens(group, lambda x, group: x), mlp(group), nn.Linear(WIDTH, VOCAB)),
        "never summed",
        ("0",),
    ),
    "gradients of replicas not summed": Case(
        lambda group: net(mlp(None)),
        "never summed",
        ("2.weight", "2.bias", "2"),
        {"loss_of": loss_of_sum, "sum_gradients": of_sequence(lambda name: not name.startswith("2."))},
    ),
    "gradients of replicas not averaged": Case(
        lambda group: net(mlp(None)),
        "scaled",
        ("2.weight", "2.bias", "2", ""),
        {
            "loss_of": lambda model, ids, labels, group: size_of(group) * loss_of_sum(model, ids, labels, group),
            "sum_gradients": of_sequence(),
        },
    ),
    "linear layer of another seed": Case(
        lambda group: net(mlp(group), other_on_the_last(nn.Linear(WIDTH, WIDTH), group)), "drifted", ("2", "2.weight")
    ),
    "angles of positions restart": Case(
        lambda group: sequence_net(group, Turned(group, restarts=True)),
        "positions",
        ("1.angles",),
        {"sum_gradients": of_sequence()},
    ),
    "replicas read the same samples": Case(
        lambda group: net(mlp(None)), "samples", ("",), {"loss_of": loss_of_same_samples, "sum_gradients": averaged}
    ),
    "gradient of a weight times 1.69": Case(
        lambda group: net(WrongGradient(group, 1.69)), "scaled", ("1.linear.weight", "1.linear")
    ),
    "gradient of a weight that is updated by hand": Case(
        lambda group: net(WrongGradient(group, 1.69)), "scaled", ("1.linear.weight", "1.linear"), {"by_hand": True}
    ),
    "whole gradients that DTensor adds": Case(
        split_by_dtensor, "scaled", ("1.weight", "1"), {"sum_gradients": placed_as("partial")}
    ),
    "partial gradients that DTensor does not add": Case(
        split_by_dtensor, "never summed", ("1.weight", "1"), {"sum_gradients": placed_as("whole")}
    ),
    "gradients of copies not summed": Case(
        lambda group: net(Attention(group)), "never summed", ("1.value.weight", "1.value.bias"), ranks=4
    ),
}

SOUND: dict[str, Case] = {
    "parts of the sequence by DTensor": Case(split_by_dtensor),
    "ids of parts of the sequence": Case(
        lambda group: sequence_net(group, cut=False), options=SEQUENCE | {"loss_of": loss_of_parts}
    ),
    "positions as an argument of replicas": Case(
        lambda group: WithPositions(), options={"loss_of": loss_with_positions, "sum_gradients": averaged}
    ),
    "joint query, key and value of unequal heads": Case(lambda group: net(Joint(group))),
    "tied weights": Case(lambda group: Tied(group)),
    "vocabulary split in uneven parts": Case(
        lambda group: nn.Sequential(Tokens(group), mlp(group), nn.Linear(WIDTH, VOCAB)), ranks=3
    ),
    "two key-value heads of three ranks": Case(
        lambda group: net(Attention(group, heads=6)), options={"sum_gradients": sum_shared}, ranks=3
    ),
    "half precision": Case(of_mlp(), options={"dtype": torch.float16}),
    "parts of the sequence in bf16": Case(
        lambda group: sequence_net(group), options=SEQUENCE | {"dtype": torch.bfloat16}
    ),
    "angles of positions": Case(
        lambda group: sequence_net(group, Turned(group, restarts=False)), options={"sum_gradients": of_sequence()}
    ),
    "updated by hand": Case(of_mlp(), options={"by_hand": True}),
    "without gradients()": Case(of_mlp(), options={"calls_gradients": False}),
    "replicas without gradients()": Case(
        lambda group: WithLoss(None, lambda logits, labels, _: mean_of(logits, labels)),
        options={"loss_of": loss_of_replica, "sum_gradients": averaged, "calls_gradients": False},
    ),
    "copies of key-value heads": Case(
        lambda group: net(Attention(group)), options={"sum_gradients": sum_copies}, ranks=4
    ),
    "parts of the sequence": Case(lambda group: sequence_net(group), options=SEQUENCE),
    "loss of replicas": Case(
        lambda group: WithLoss(None, lambda logits, labels, _: mean_of(logits, labels)),
        options={"loss_of": loss_of_replica, "sum_gradients": averaged},
    ),
    "attention": Case(lambda group: net(Attention(group))),
    "gated": Case(lambda group: net(Gated(group))),
    "heads in another order": Case(
        lambda group: net(mlp(group, up={"rows": (_HALVES[1], _HALVES[0])}, down={"columns": (_HALVES[1], _HALVES[0])}))
    ),
    "uneven": Case(lambda group: net(Residual(Column(WIDTH, 13, group), nn.GELU(), Row(13, WIDTH, group)))),
    "identity dropout": Case(lambda group: net(Dropped(group))),
}


def check(case: Case, group: dist.ProcessGroup, folder: Path) -> None:
    diagnosis = diagnosed(case.build, group, folder, **case.options)
    if diagnosis is None:
        return
    if not case.kind:
        assert diagnosis.is_sound, [finding.line() for finding in diagnosis.findings]
        return
    first = diagnosis.first
    assert first is not None
    assert (first.kind, first.module in case.modules) == (case.kind, True), first.line()


def of_ranks(cases: dict[str, Case], ranks: int) -> list[str]:
    return [name for name, case in cases.items() if case.ranks == ranks]


@pytest.mark.ranks(2)
@pytest.mark.sample(12)
@pytest.mark.parametrize("name", of_ranks(FAULTS, 2))
def test_a_fault_has_its_class_and_module(name, group, tmp_path):
    check(FAULTS[name], group, tmp_path)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", of_ranks(FAULTS, 4))
def test_a_fault_of_four_ranks_has_its_class_and_module(name, group, tmp_path):
    check(FAULTS[name], group, tmp_path)


@pytest.mark.ranks(2)
@pytest.mark.sample(8)
@pytest.mark.parametrize("name", of_ranks(SOUND, 2))
def test_a_right_run_is_sound(name, group, tmp_path):
    check(SOUND[name], group, tmp_path)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", of_ranks(SOUND, 3))
def test_a_right_run_of_three_ranks_is_sound(name, group, tmp_path):
    check(SOUND[name], group, tmp_path)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", of_ranks(SOUND, 4))
def test_a_right_run_of_four_ranks_is_sound(name, group, tmp_path):
    check(SOUND[name], group, tmp_path)
