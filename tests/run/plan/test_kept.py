"""The formulas of what the forward keeps: those of the page, and what whole models keep, byte for byte."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from harness.kept_bytes import Kept
from models.transformer import accounting_page as page
from run.plan.planned_models import KINDS, RECOMPUTATIONS, UNEVEN, B, S, described, workload_of

from shardwise.core.random import seed_streams
from shardwise.core.topology import Groups
from shardwise.models.recomputation import RECOMPUTE_MODULES, Recomputation
from shardwise.run.plan import step as kept
from shardwise.run.plan.parameters import stage_chunks
from shardwise.run.plan.step import LocalSizes
from shardwise.storage.huggingface import build_model, model_config

NOTHING = Recomputation()


def page_share(t, sequence_parallel, dtype, *, groups=page.A):
    model = described("gpt2", num_query_groups=groups, sizes=page_sizes())
    e, splits = dtype.itemsize, sequence_parallel
    return LocalSizes.of(model, s=page.S, b=page.B, e=e, tp=t, rank=0, splits_sequence=splits)


def page_sizes():
    sizes = {"num_attention_heads": page.A, "hidden_size": page.H, "ffn_hidden_size": page.FFN}
    return sizes | {"vocab_size": page.V, "kv_channels": page.D}


def parts(t, sequence_parallel, dtype):
    """Every row of the page's table of parts."""
    x = page_share(t, sequence_parallel, dtype)
    grouped = page_share(t, sequence_parallel, dtype, groups=page.GROUPS)
    one = page_share(t, sequence_parallel, dtype, groups=t)
    kind = "fp32" if dtype == torch.float32 else "bf16"
    return {
        "LayerNorm": kept.norm(x, "LayerNorm"),
        f"RMSNorm, {kind}": kept.norm(x, "RMSNorm"),
        "column-parallel linear": kept.column_linear(x),
        "GELU": kept.activation(x, gated=False),
        "SwiGLU": kept.activation(x, gated=True),
        "row-parallel linear": kept.row_linear(x, x.f),
        "attention core": kept.attention_core(x),
        "attention core, grouped queries": kept.attention_core(grouped),
        "attention core, one group on each rank": kept.attention_core(one),
        "attention core, rotary": kept.attention_core(x, is_rotary=True) + x.e * x.s * x.d,
        f"attention core, dropout, {kind}": kept.attention_core(x, dropout=True),
        "residual dropout": kept.residual_dropout(x),
        "residual addition": 0,
        "embedding": kept.embedding(x),
        "loss": kept.loss(x),
        "loss, without the size of the vocabulary": kept.loss(x),
    }


def blocks(t, sequence_parallel, dtype):
    """Rows of its table of blocks, of which plans are made."""
    x = page_share(t, sequence_parallel, dtype)
    model = described("gpt2", sizes=page_sizes())
    plain = workload_of(model, dtype)
    dropping = workload_of(described("gpt2", sizes=page_sizes(), hidden_dropout=0.25), dtype, dropout_is_global=False)
    rows = {
        "MLP": kept.mlp(x, plain, NOTHING),
        "MLP, GELU recomputed": kept.mlp(x, plain, Recomputation("selective", modules=("mlp_act",))),
        "MLP, recomputed": kept.mlp(x, plain, Recomputation("selective", modules=("mlp",))),
        "attention": kept.column_linear(x) + kept.attention_core(x),
        "layer": kept.layer(x, plain, NOTHING),
        "layer, dropout on the residual": kept.layer(x, dropping, NOTHING),
        "layer, recomputed": kept.layers(x, plain, Recomputation("full"), range(1)),
    }
    selective = {
        f"layer, {module} recomputed": kept.layer(x, plain, Recomputation("selective", modules=(module,)))
        for module in RECOMPUTE_MODULES
    }
    return rows | selective


@pytest.mark.parametrize("t", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("column", ["without", "with"])
def test_the_formulas_are_those_of_the_page(t, dtype, column):
    group = SimpleNamespace(size=lambda: t)
    other = "bf16" if dtype == torch.float32 else "fp32"
    for first, computed, left_out in (
        ("part", parts(t, column == "with", dtype), {f"RMSNorm, {other}", f"attention core, dropout, {other}"}),
        ("block", blocks(t, column == "with", dtype), {"layer, recomputed, its input distributed"}),
    ):
        rows = page.table(first)
        stated = {
            name: page.evaluate(cells[column], group, dtype, g=page.GROUPS)
            for name, cells in rows.items()
            if name not in left_out
        }
        assert computed == stated


def measured(model, config, group):
    """Bytes that a micro-batch keeps."""
    torch.default_generator.manual_seed(1)
    built = build_model(model, config, groups=Groups(tp=group))
    for param in built.parameters():
        param.main_grad = torch.zeros(param.shape)
    built.train()
    ids = torch.randint(model.vocab_size, (B, S))
    with Kept(built) as tensors:
        loss = built(ids, labels=ids).sum()
    num_bytes = tensors.num_bytes
    loss.backward()
    return num_bytes


def check(group, model, dtype, *, recomputation=NOTHING, sequence_parallel=False, fuses=False, rule="global"):
    seed_streams(3, group.rank(), rng=rule)
    fields = {"params_dtype": dtype, "sequence_parallel": sequence_parallel, "fuse_output_layer_and_loss": fuses}
    fields |= {"gradient_accumulation_fusion": True} | {"recompute": recomputation}
    found = measured(model, model_config(model, **fields), group)
    workload = workload_of(model, dtype, fuses_loss=fuses, dropout_is_global=rule == "global")
    splits = sequence_parallel and group.size() > 1
    e, t = dtype.itemsize, group.size()
    x = LocalSizes.of(model, s=S, b=B, e=e, tp=t, rank=group.rank(), splits_sequence=splits)
    ((whole,),) = stage_chunks(model, 1)
    stated = kept.part(x, workload, recomputation, whole)
    if recomputation.granularity == "full" and recomputation.num_layers * 2 > model.num_layers > 2:
        # What all layers read is alive, and no layer that is not recomputed keeps it for autograd.
        stated -= kept.shared_by_layers(x, workload) * (recomputation.method == "uniform")
    elif recomputation.recomputes("core_attn") and model.window_size is not None:
        stated -= e * S * S
    assert found == stated, (model, dtype, recomputation, sequence_parallel, fuses, rule)


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["fp32", "bf16", "fp64"])
def test_whole_models(group, dtype):
    for kind in KINDS if dtype != torch.float64 else ("gpt2", "olmo2"):
        for fuses in (False, True):
            check(group, described(kind), dtype, fuses=fuses, sequence_parallel=fuses)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_dropout_of_both_rules(group):
    for kind in ("gpt2", "llama", "qwen3"):
        for rule in ("global", "per_rank"):
            model = described(kind, hidden_dropout=0.25, attention_dropout=0.25)
            check(group, model, torch.bfloat16, rule=rule, sequence_parallel=True)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", RECOMPUTATIONS)
def test_recomputation(group, name):
    for kind in ("gpt2", "mistral", "qwen3"):
        check(group, described(kind), torch.bfloat16, recomputation=RECOMPUTATIONS[name], sequence_parallel=True)


@pytest.mark.slow
@pytest.mark.ranks(3)
def test_sizes_that_the_ranks_do_not_divide(group):
    for kind in ("gpt2", "llama", "qwen3", "bloom"):
        for sequence_parallel in (False, True):
            check(group, described(kind, sizes=UNEVEN), torch.float32, sequence_parallel=sequence_parallel)
