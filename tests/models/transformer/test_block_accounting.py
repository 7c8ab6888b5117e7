"""What each layer keeps for its backward is, byte for byte, what the tables in ``docs/accounting.md`` say."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from accounting_page import (
    FFN,
    GROUPS,
    A,
    B,
    D,
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
    row,
    table,
)
from harness.kept_bytes import kept_by
from torch import nn

from shardwise.core.random import seed_streams, streams
from shardwise.core.sequence_view import SequenceView
from shardwise.models.recomputation import RECOMPUTE_MODULES
from shardwise.models.transformer.attention import SelfAttention
from shardwise.models.transformer.layer import ResidualDropout, make_norm
from shardwise.models.transformer.mlp import MLP
from shardwise.models.transformer.rotary import RotaryEmbedding

SEQUENCE_PARALLEL = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
COLUMNS = {False: "without", True: "with"}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


class Given(nn.Module):
    """In place of the projection to queries, keys and values: returns what it was given."""

    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, *_, **__):
        return self.output


class KeepsItsInput(nn.Module):
    """In place of the output projection."""

    def __init__(self, dtype):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, input_):
        return input_ * self.scale


def core(group, config):
    """Attention between its two projections, whose input is one tensor of queries, keys and values."""
    attention = SelfAttention(config, 1, group)
    width = attention.linear_qkv.local_features
    attention.linear_qkv = Given(input_of(config, group, width, whole_sequence=True))
    attention.linear_proj = KeepsItsInput(config.params_dtype)
    return attention


def swiglu(inner):
    gate, up = inner.chunk(2, dim=-1)
    return F.silu(gate) * up


def measured_parts(group, sequence_parallel, dtype):
    """The bytes of every row of the table of parts."""

    def config(**options):
        return config_of(group, sequence_parallel, dtype, **options)

    t = group.size()
    plain = config()
    between = input_of(plain, group)
    inner = input_of(plain, group, FFN // t, whole_sequence=True)
    rotary = RotaryEmbedding(D)(torch.arange(S), dtype)
    kind = "fp32" if dtype == torch.float32 else "bf16"
    seed_streams(3, group.rank())
    measured = {
        "LayerNorm": kept_by(make_norm(plain), between),
        f"RMSNorm, {kind}": kept_by(make_norm(config(normalization="RMSNorm")), between),
        "column-parallel linear": kept_by(column(group, plain), between),
        "GELU": kept_by(F.gelu, inner),
        "SwiGLU": kept_by(swiglu, input_of(plain, group, 2 * FFN // t, whole_sequence=True)),
        "row-parallel linear": kept_by(row(group, plain), inner),
        "attention core": kept_by(core(group, plain), between),
        "attention core, grouped queries": kept_by(core(group, config(num_query_groups=GROUPS)), between),
        "attention core, one group on each rank": kept_by(core(group, config(num_query_groups=t)), between),
        "attention core, rotary": kept_by(core(group, plain), between, rotary=rotary),
        f"attention core, dropout, {kind}": kept_by(core(group, config(attention_dropout=0.25)), between),
        "residual dropout": kept_by(
            ResidualDropout(0.25), between, sequence=SequenceView(S, group if sequence_parallel else None)
        ),
        "residual addition": kept_by(torch.add, between, input_of(plain, group)),
        "embedding": kept_by(embedding(group, plain), torch.randint(V, (B, S))),
        "loss": kept_by(loss(group), input_of(plain, group, V // t, whole_sequence=True)),
        "loss, without the size of the vocabulary": kept_by(
            loss(group, vocab_size=None), input_of(plain, group, V // t, whole_sequence=True)
        ),
    }
    streams().reset()
    return measured


@pytest.mark.ranks(1, 2, 4)
@SEQUENCE_PARALLEL
@DTYPES
def test_parts(group, sequence_parallel, dtype):
    rows = table("part")
    measured = measured_parts(group, sequence_parallel, dtype)
    other = "bf16" if dtype == torch.float32 else "fp32"
    rows.pop(f"attention core, dropout, {other}")
    rows.pop(f"RMSNorm, {other}")
    assert_as_stated(measured, rows, COLUMNS[sequence_parallel], group, dtype, g=GROUPS)


def assert_as_stated(measured, rows, column, group, dtype, **letters):
    """Every row is measured, and equals the formula in its column."""
    assert measured.keys() == rows.keys()
    stated = {name: evaluate(cells[column], group, dtype, **letters) for name, cells in rows.items()}
    wrong = {name: f"{number}, not {stated[name]}" for name, number in measured.items() if number != stated[name]}
    assert not wrong


@pytest.mark.ranks(1, 2, 4)
@SEQUENCE_PARALLEL
@DTYPES
def test_blocks(group, sequence_parallel, dtype):
    config = config_of(group, sequence_parallel, dtype)
    dropping = config_of(group, sequence_parallel, dtype, hidden_dropout=0.25)
    mlp, block = MLP(config, group), layer(group, config)
    seed_streams(3, group.rank())
    measured = {
        "MLP": kept_by(mlp, input_of(config, group)),
        "MLP, GELU recomputed": kept_by(WithoutTheOutputOfGelu(mlp), input_of(config, group)),
        "MLP, recomputed": kept_by(Recomputed(mlp), input_of(config, group)),
        "attention": kept_by(SelfAttention(config, 1, group), input_of(config, group)),
        "layer": kept_by(block, input_of(config, group)),
        "layer, dropout on the residual": kept_by(layer(group, dropping), input_of(config, group)),
        "layer, recomputed": kept_by(Recomputed(block), input_of(config, group)),
    }
    for module in RECOMPUTE_MODULES:
        selective = {"recompute_granularity": "selective", "recompute_modules": [module]}
        parts = layer(group, config_of(group, sequence_parallel, dtype, **selective))
        measured[f"layer, {module} recomputed"] = kept_by(parts, input_of(config, group))
    streams().reset()
    rows = table("block")
    distributed = rows.pop("layer, recomputed, its input distributed")
    assert_as_stated(measured, rows, COLUMNS[sequence_parallel], group, dtype)
    # PyTorch's own keeps the same.
    assert kept_by(RecomputedByTorch(block), input_of(config, group)) == measured["layer, recomputed"]
    if not config.sequence_parallel:
        # With sequence parallelism there is nothing that all ranks hold.
        assert distributed["with"] == ""
        number = kept_by(Recomputed(block, distribute=True, group=group), input_of(config, group))
        assert number == evaluate(distributed["without"], group, dtype)


@pytest.mark.ranks(3)
def test_uneven_shares(group):
    config = config_of(group)
    mlp, attention = MLP(config, group), SelfAttention(config, 1, group)
    # What `f/t` and `a/t` are here.
    own = {"f": 3 * mlp.linear_fc2.local_features, "a": 3 * attention.num_local_groups}
    assert (FFN % 3, A % 3) == (2, 1)
    rows = table("block")
    for name, block in (("MLP", mlp), ("attention", attention)):
        assert kept_by(block, input_of(config, group)) == evaluate(rows[name]["without"], group, **own)


@pytest.mark.ranks(1, 2, 4)
@SEQUENCE_PARALLEL
def test_a_layer_of_the_paper(group, sequence_parallel):
    """Its formula and the differences that the page gives reasons for sum to what is measured."""
    sizes = {"hidden_size": A * D, "ffn_hidden_size": 4 * A * D, "hidden_dropout": 0.25}
    config = config_of(group, sequence_parallel, torch.bfloat16, **sizes)
    seed_streams(3, group.rank())
    block = layer(group, config)
    measured = kept_by(block, input_of(config, group))
    recomputed = kept_by(Recomputed(block), input_of(config, group))
    streams().reset()
    paper, differences = table("layer of the paper"), table("difference")
    column_name = COLUMNS[sequence_parallel]

    def stated(cells):
        return evaluate(cells[column_name], group, torch.bfloat16, h=A * D, f=4 * A * D)

    different = {name: stated(cells) for name, cells in differences.items()}
    assert measured == stated(paper["everything kept"]) + sum(different.values())
    # Without the attention weights: selective recomputation, but for what the paper neglects.
    assert stated(paper["attention core recomputed"]) == (
        stated(paper["everything kept"]) + different["no attention weights"]
    )
    # With sequence parallelism ours keeps its part of the input; the paper's every rank all of it.
    part = group.size() if sequence_parallel else 1
    assert part * recomputed == stated(paper["layer recomputed"])
