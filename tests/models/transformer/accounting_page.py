"""Shared by the tests of the accounting: the tables of its page in docs/, and the layers in them."""

from __future__ import annotations

import itertools
from fractions import Fraction
from pathlib import Path

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from shardwise.core.initialization import Normal
from shardwise.core.random import seed_streams
from shardwise.core.sequence_view import SequenceView
from shardwise.megatron.config import TransformerConfig
from shardwise.models.recomputation import RECOMPUTE_MODULES
from shardwise.models.transformer.attention import SelfAttention
from shardwise.models.transformer.layer import ResidualDropout, TransformerLayer, TransformerLayerSpec, make_norm
from shardwise.models.transformer.mlp import MLP
from shardwise.models.transformer.rotary import RotaryEmbedding
from shardwise.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from shardwise.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from shardwise.tensor_parallel.random import CheckpointWithoutOutput, checkpoint

PAGE = Path(__file__).parents[3] / "docs" / "memory.md"

# All different, so that none can stand for another; what is split is a multiple of 4.
S, B, H, FFN, A, D, V = 8, 3, 20, 44, 16, 6, 52
GROUPS = 8

COLUMNS = {False: "without", True: "with"}
SECTIONS = {
    "kept": "## Bytes kept for the backward",
    "collectives": "## Collectives",
    "state": "## Weights, gradients and optimizer state",
    "gpu": "## A layer on a GPU",
    "gpu step": "## A step on GPUs",
}


def page_of(section):
    """The text of the page, from the section's title on."""
    text = PAGE.read_text(encoding="utf-8")
    return text[text.index(f"\n{SECTIONS[section]}\n") + 1 :]


def table(first_column, section="kept"):
    """Rows of the first table of a section whose header starts so: from a row's name, its other cells by column."""
    lines = page_of(section).splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
    columns, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in itertools.takewhile(bool, lines[header:])
    ]
    return {name: dict(zip(columns[1:], cells, strict=True)) for name, *cells in rows}


def evaluate(formula, group, dtype=torch.float32, **changed):
    """A formula of the page in numbers; exact, and never a part of a byte."""
    letters = {"s": S, "b": B, "h": H, "f": FFN, "a": A, "g": A, "d": D, "v": V, "t": group.size()}
    letters |= {"e": dtype.itemsize} | changed
    expression = formula.replace("`", "").replace("·", "*").replace("²", "**2")
    value = eval(expression, {"__builtins__": {}}, {name: Fraction(size) for name, size in letters.items()})
    assert value == int(value), f"{formula} is {value}"
    return int(value)


def config_of(group, sequence_parallel=False, dtype=torch.float32, **options):
    sizes = {"num_layers": 1, "hidden_size": H, "num_attention_heads": A, "kv_channels": D, "ffn_hidden_size": FFN}
    sizes |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return TransformerConfig(
        **sizes | options,
        params_dtype=dtype,
        tensor_model_parallel_size=group.size(),
        # On one rank there is nothing to split.
        sequence_parallel=sequence_parallel and group.size() > 1,
    )


def input_of(config, group, width=None, *, whole_sequence=False):
    s = S if whole_sequence or not config.sequence_parallel else S // group.size()
    return torch.randn(s, B, width or config.hidden_size, dtype=config.params_dtype, requires_grad=True)


def row(group, config):
    return RowParallelLinear(
        FFN,
        H,
        config=config,
        init_method=Normal(1.0),
        bias=True,
        input_is_parallel=True,
        skip_bias_add=False,
        tp_group=group,
    )


def column(group, config, size=FFN, **options):
    return ColumnParallelLinear(H, size, config=config, init_method=Normal(1.0), tp_group=group, **options)


def embedding(group, config):
    reduce_scatter = config.sequence_parallel
    return VocabParallelEmbedding(
        V, H, init_method=Normal(1.0), reduce_scatter_embeddings=reduce_scatter, config=config, tp_group=group
    )


def loss(group, **options):
    target = torch.randint(V, (S, B))
    options = {"vocab_size": V} | options
    return lambda logits: vocab_parallel_cross_entropy(logits, target.clone(), tp_group=group, **options)


def layer(group, config):
    return TransformerLayer(config, TransformerLayerSpec(), 1, group)


class Recomputed(nn.Module):
    """A module inside ``checkpoint``."""

    def __init__(self, module, *, distribute=False, group=None):
        super().__init__()
        self.module, self.distribute, self.group = module, distribute, group

    def forward(self, input_):
        return checkpoint(self.module, self.distribute, input_, tp_group=self.group)


class RecomputedByTorch(Recomputed):
    """The same inside PyTorch's."""

    def forward(self, input_):
        return torch.utils.checkpoint.checkpoint(self.module, input_, use_reentrant=False)


class WithoutTheOutputOfGelu(nn.Module):
    """An MLP whose activation is recomputed together with what the row-parallel layer saves of it."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, hidden):
        inner = self.mlp.linear_fc1(hidden)
        recomputation = CheckpointWithoutOutput()
        output = self.mlp.linear_fc2(recomputation.checkpoint(F.gelu, inner))
        recomputation.discard_output_and_register_recompute(output)
        return output


class Given(nn.Module):
    """In place of the projection to queries, keys and values: returns a copy of what it was given."""

    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, *_, **__):
        return self.output.clone()


class KeepsItsInput(nn.Module):
    """In place of the output projection."""

    def __init__(self, dtype):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, input_, sequence=None):
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


def _case(function, *inputs, **options):
    return function, inputs, options


def parts(group, sequence_parallel, dtype):
    """The function, the inputs and the options of every row of the table of parts; seeds the random streams."""

    def config(**options):
        return config_of(group, sequence_parallel, dtype, **options)

    t = group.size()
    plain = config()
    between = input_of(plain, group)
    inner = input_of(plain, group, FFN // t, whole_sequence=True)
    rotary = RotaryEmbedding(D)(torch.arange(S), dtype)
    kind = "fp32" if dtype == torch.float32 else "bf16"
    seed_streams(3, group.rank())
    return {
        "LayerNorm": _case(make_norm(plain), between),
        f"RMSNorm, {kind}": _case(make_norm(config(normalization="RMSNorm")), between),
        "column-parallel linear": _case(column(group, plain), between),
        "GELU": _case(F.gelu, inner),
        "SwiGLU": _case(swiglu, input_of(plain, group, 2 * FFN // t, whole_sequence=True)),
        "row-parallel linear": _case(row(group, plain), inner),
        "attention core": _case(core(group, plain), between),
        "attention core, grouped queries": _case(core(group, config(num_query_groups=GROUPS)), between),
        "attention core, one group on each rank": _case(core(group, config(num_query_groups=t)), between),
        "attention core, rotary": _case(core(group, plain), between, rotary=rotary),
        f"attention core, dropout, {kind}": _case(core(group, config(attention_dropout=0.25)), between),
        "residual dropout": _case(
            ResidualDropout(0.25), between, sequence=SequenceView(S, group if sequence_parallel else None)
        ),
        "residual addition": _case(torch.add, between, input_of(plain, group)),
        "embedding": _case(embedding(group, plain), torch.randint(V, (B, S))),
        "loss": _case(loss(group), input_of(plain, group, V // t, whole_sequence=True)),
        "loss, without the size of the vocabulary": _case(
            loss(group, vocab_size=None), input_of(plain, group, V // t, whole_sequence=True)
        ),
    }


def blocks(group, sequence_parallel, dtype):
    """Those of every row of the table of blocks; seeds the random streams."""
    config = config_of(group, sequence_parallel, dtype)
    dropping = config_of(group, sequence_parallel, dtype, hidden_dropout=0.25)
    mlp, block = MLP(config, group), layer(group, config)
    seed_streams(3, group.rank())
    functions = {
        "MLP": mlp,
        "MLP, GELU recomputed": WithoutTheOutputOfGelu(mlp),
        "MLP, recomputed": Recomputed(mlp),
        "attention": SelfAttention(config, 1, group),
        "layer": block,
        "layer, dropout on the residual": layer(group, dropping),
        "layer, recomputed": Recomputed(block),
    }
    for module in RECOMPUTE_MODULES:
        selective = {"recompute_granularity": "selective", "recompute_modules": [module]}
        again = layer(group, config_of(group, sequence_parallel, dtype, **selective))
        functions[f"layer, {module} recomputed"] = again
    if not config.sequence_parallel:
        # With sequence parallelism there is nothing that all ranks hold.
        functions["layer, recomputed, its input distributed"] = Recomputed(block, distribute=True, group=group)
    return {name: _case(function, input_of(config, group)) for name, function in functions.items()}


def assert_as_stated(measured, first_column, sequence_parallel, group, dtype):
    """Every row of a table is measured, and equals the formula in its column."""
    other = "bf16" if dtype == torch.float32 else "fp32"
    column_name, rows = COLUMNS[sequence_parallel], table(first_column)
    stated = {
        name: evaluate(cells[column_name], group, dtype, g=GROUPS)
        for name, cells in rows.items()
        # A cell that does not apply is empty.
        if cells[column_name] and not name.endswith(f", {other}")
    }
    assert stated.keys() <= measured.keys() <= rows.keys()
    wrong = {name: f"{measured[name]}, not {number}" for name, number in stated.items() if measured[name] != number}
    assert wrong == {}, wrong
