"""What each layer keeps for its backward is, byte for byte, what the tables in ``docs/memory.md`` say."""

from __future__ import annotations

import pytest
import torch
from accounting_page import (
    COLUMNS,
    FFN,
    A,
    D,
    Recomputed,
    RecomputedByTorch,
    assert_as_stated,
    blocks,
    config_of,
    evaluate,
    input_of,
    layer,
    parts,
    table,
)
from harness.kept_bytes import kept_by

from shardwise.core.random import seed_streams, streams
from shardwise.models.transformer.attention import SelfAttention
from shardwise.models.transformer.mlp import MLP

SEQUENCE_PARALLEL = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.mark.ranks(1, 2, 4)
@SEQUENCE_PARALLEL
@DTYPES
@pytest.mark.parametrize(("first_column", "cases"), [("part", parts), ("block", blocks)], ids=["parts", "blocks"])
def test_every_row_is_what_is_kept(group, sequence_parallel, dtype, first_column, cases):
    measured = {
        name: kept_by(function, *inputs, **options)
        for name, (function, inputs, options) in cases(group, sequence_parallel, dtype).items()
    }
    streams().reset()
    assert_as_stated(measured, first_column, sequence_parallel, group, dtype)


@pytest.mark.ranks(2)
@SEQUENCE_PARALLEL
def test_pytorch_s_recomputation_keeps_the_same(group, sequence_parallel):
    config = config_of(group, sequence_parallel)
    block = layer(group, config)
    seed_streams(3, group.rank())
    ours, by_torch = (kept_by(cls(block), input_of(config, group)) for cls in (Recomputed, RecomputedByTorch))
    streams().reset()
    assert by_torch == ours


@pytest.mark.ranks(3)
def test_uneven_shares(group):
    config = config_of(group)
    mlp, attention = MLP(config, group), SelfAttention(config, 1, group)
    # What `f/t` and `a/t` are here.
    own = {"f": 3 * mlp.linear_fc2.local_features, "a": 3 * len(attention.local_heads.queries_of_groups)}
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
