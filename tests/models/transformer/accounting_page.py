"""What the tests of the accounting share: the tables of ``docs/accounting.md``, and the layers that they are about."""

from __future__ import annotations

import itertools
from fractions import Fraction
from pathlib import Path

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from shardwise.core.initialization import Normal
from shardwise.megatron.config import TransformerConfig
from shardwise.models.transformer.layer import TransformerLayer, TransformerLayerSpec
from shardwise.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from shardwise.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from shardwise.tensor_parallel.random import CheckpointWithoutOutput, checkpoint

PAGE = Path(__file__).parents[3] / "docs" / "accounting.md"

# All different, so that none can stand for another; what is split is a multiple of 4.
S, B, H, FFN, A, D, V = 8, 3, 20, 44, 16, 6, 52
GROUPS = 8

SECTIONS = {"kept": "## Bytes kept for the backward", "collectives": "## Collectives", "gpu": "## A layer on a GPU"}


def table(first_column, section="kept"):
    """Rows of the first table of a section whose header starts so: from a row's name, its other cells by column."""
    lines = PAGE.read_text().splitlines()
    lines = lines[lines.index(SECTIONS[section]) :]
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
    return lambda logits: vocab_parallel_cross_entropy(logits, target, tp_group=group, **options)


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
