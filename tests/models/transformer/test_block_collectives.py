"""The collectives of each block are those of the table in ``docs/memory.md``."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from accounting_page import (
    B,
    Recomputed,
    RecomputedByTorch,
    S,
    V,
    WithoutTheOutputOfGelu,
    column,
    config_of,
    embedding,
    evaluate,
    input_of,
    layer,
    loss,
    table,
)

from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.random import seed_streams, streams
from shardwise.models.transformer.attention import SelfAttention
from shardwise.models.transformer.mlp import MLP


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_collectives(group, dtype):
    measured = {}
    seed_streams(3, group.rank())
    for sequence_parallel in (False, True):
        config = config_of(group, sequence_parallel, dtype)
        blocks = {
            "MLP": MLP(config, group),
            "attention": SelfAttention(config, 1, group),
            "layer": layer(group, config),
            "layer, dropout on the residual": layer(
                group, config_of(group, sequence_parallel, dtype, hidden_dropout=0.25)
            ),
        }
        heads = {
            "embedding": (embedding(group, config), torch.randint(V, (B, S))),
            "output layer": (column(group, config, V, bias=False), input_of(config, group)),
        }
        if not sequence_parallel:
            logits = input_of(config, group, V // group.size(), whole_sequence=True)
            heads |= {
                "loss": (loss(group), logits),
                "loss, label smoothing": (loss(group, label_smoothing=0.1), logits),
                "loss, without the size of the vocabulary": (loss(group, vocab_size=None), logits),
            }
        suffix = ", sequence parallel" if sequence_parallel else ""
        for name, block in blocks.items():
            measured[name + suffix] = {
                **launched(block, input_of(config, group)),
                "recomputed": launched(Recomputed(block), input_of(config, group))["backward"],
            }
        for name, (function, input_) in heads.items():
            measured[name + suffix] = launched(function, input_)
    streams().reset()
    rows = table("block", section="collectives")
    assert measured.keys() == rows.keys()
    wrong = []
    for name, of_passes in measured.items():
        for when, launches in of_passes.items():
            stated = collectives(rows[name][when], group, dtype)
            if launches != stated:
                wrong.append(f"{name}, {when}: {dict(launches)}, not {dict(stated)}")
        assert all(cell == "" for when, cell in rows[name].items() if when not in of_passes)
    assert wrong == []


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
def test_other_recomputation(group, sequence_parallel):
    config = config_of(group, sequence_parallel)
    mlp = MLP(config, group)
    plain = launched(mlp, input_of(config, group))
    # Of what lies between the collectives: none is added.
    assert launched(WithoutTheOutputOfGelu(mlp), input_of(config, group)) == plain
    # By PyTorch's own: those of the forward are repeated.
    by_torch = launched(RecomputedByTorch(mlp), input_of(config, group))
    assert by_torch == {"forward": plain["forward"], "backward": plain["forward"] + plain["backward"]}


def launched(function, input_):
    """Collectives of forward and backward: how many of each name and number of bytes."""
    with CollectiveCounter() as forward:
        output = function(input_)
        output = output[0] if isinstance(output, tuple) else output
        output = output.float().sum()
    with CollectiveCounter() as backward:
        output.backward()
    return {
        when: Counter((launch.name, launch.num_bytes) for launch in counter.launches)
        for when, counter in (("forward", forward), ("backward", backward))
    }


def collectives(cell, group, dtype):
    """A cell of the page in numbers; on one rank nothing is sent."""
    entries = [] if cell == "nothing" else cell.split(", ")
    stated = Counter()
    for entry in entries:
        number, name, formula = re.fullmatch(r"`(\d+) × (\w+) (.+)`", entry).groups()  # noqa: RUF001
        stated[name, evaluate(formula, group, dtype)] += int(number)
    return stated if group.size() > 1 else Counter()
