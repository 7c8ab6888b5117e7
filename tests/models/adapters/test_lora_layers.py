"""Linear layers with adapters equal dense ones: outputs, input gradients, gradients of every factor."""

import warnings

import pytest
import torch
from harness.groups import alone
from harness.parity import assert_bit_equal, assert_close_to, assert_unmodified, gather_shards
from torch import nn

from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.errors import ConfigError
from shardwise.core.initialization import Normal
from shardwise.core.random import seed_streams
from shardwise.core.sharded_state import sharded_state_dict
from shardwise.core.sharding import balanced_range, balanced_sizes
from shardwise.megatron.config import ModelParallelConfig
from shardwise.models.adapters.adapter import LoraAdapter
from shardwise.models.adapters.config import LoraConfig
from shardwise.models.adapters.lora_layers import LoraColumn, LoraLinear
from shardwise.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, named_param_layouts
from shardwise.training.gradients.finalize import finalize_gradients_
from shardwise.training.optimizer.grad_norm import global_grad_norm

# Sums over ranks are taken in another order than on one.
TIGHT = 1e-13
R, S, B, I = 3, 7, 2, 13  # noqa: E741 - the letters of the shapes
GROUPS, QUERIES, D = 5, 2, 3


def config_of(group, sequence_parallel, dtype=torch.float64):
    return ModelParallelConfig(
        params_dtype=dtype,
        tensor_model_parallel_size=group.size(),
        sequence_parallel=sequence_parallel and group.size() > 1,
    )


def qkv_sections():
    rows = torch.arange(GROUPS * (QUERIES + 2) * D).view(GROUPS, QUERIES + 2, D)
    return {"q": rows[:, :QUERIES].flatten(), "v": rows[:, QUERIES + 1].flatten()}


def column(group, kind, sequence_parallel=False, **options):
    config = config_of(group, sequence_parallel)
    if kind == "qkv":
        block = (QUERIES + 2) * D
        sizes = [n * block for n in balanced_sizes(GROUPS, group.size())]
        layer = ColumnParallelLinear(
            I, GROUPS * block, config=config, init_method=Normal(1.0), sizes=sizes, tp_group=group
        )
        return LoraLinear.add(layer, LoraConfig(r=R, **options), qkv_sections())
    layer = ColumnParallelLinear(
        I, 2 * 11, config=config, init_method=Normal(1.0), stride=2, bias=False, tp_group=group
    )
    sections = {"gate": torch.arange(11), "up": torch.arange(11, 22)} if kind == "gated" else {"whole": None}
    return LoraLinear.add(layer, LoraConfig(r=R, **options), sections)


def row(group, sequence_parallel=False, **options):
    config = config_of(group, sequence_parallel)
    layer = RowParallelLinear(
        I, 5, config=config, init_method=Normal(1.0), bias=True, input_is_parallel=True, skip_bias_add=False,
        tp_group=group,
    )  # fmt: skip
    return LoraLinear.add(layer, LoraConfig(r=R, **options), {"down": None})


def fill_(layer, group):
    """The same whole values at every layout, biases and B included; returns them by name."""
    wholes = {}
    for name, param, layout in named_param_layouts(layer, group.size()):
        wholes[name] = torch.randn(layout.global_shape, dtype=torch.float64)
        with torch.no_grad():
            param.copy_(layout.take(wholes[name], group.rank()))
    for param in layer.parameters():
        param.requires_grad_(False)
    for param in layer.lora.parameters():
        param.requires_grad_(True)
    return wholes


def dense_output(wholes, x, sections, scaling):
    y = x @ wholes["weight"].T
    if "bias" in wholes:
        y = y + wholes["bias"]
    for name, section in sections.items():
        add = scaling * (x @ wholes[f"lora.{name}.lora_A"].T @ wholes[f"lora.{name}.lora_B"].T)
        rows = torch.arange(y.size(-1)) if section is None else section
        y = y.index_add(-1, rows, add)
    return y


def check_gradients(layer, wholes, group):
    finalize_gradients_(layer, tp_group=group, dp_group=alone(group))
    norm = torch.stack([wholes[name].grad.square().sum() for name in wholes if "lora" in name]).sum().sqrt()
    assert_close_to(global_grad_norm(layer, tp_group=group), norm, rtol_of_norm=TIGHT)
    for name, param, layout in named_param_layouts(layer, group.size()):
        if "lora" not in name:
            assert param.grad is None, f"{name} is frozen"
            continue
        assert_close_to(gather_shards(param.grad, layout, group), wholes[name].grad, rtol_of_norm=TIGHT, name=name)


SECTIONS = {
    "qkv": qkv_sections(),
    "gated": {"gate": torch.arange(11), "up": torch.arange(11, 22)},
    "whole": {"whole": None},
}


@pytest.mark.ranks(1, 2, 3, slow=(3,))
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_column_equals_dense(group, sequence_parallel):
    sequence_parallel &= group.size() > 1
    for kind, sections in SECTIONS.items():
        torch.manual_seed(7)
        layer = column(group, kind, sequence_parallel, lora_alpha=5)
        wholes = fill_(layer, group)
        x = torch.randn(S, B, I, dtype=torch.float64)
        dense_x = x.clone().requires_grad_()
        for name, whole in wholes.items():
            whole.requires_grad_("lora" in name)
        expected = dense_output(wholes, dense_x, sections, 5 / R)
        weight = torch.randn_like(expected)
        (expected * weight).sum().backward()

        first, last = balanced_range(S, group.size(), group.rank()) if sequence_parallel else (0, S)
        part = x[first:last].clone().requires_grad_()
        with assert_unmodified(part, *layer.parameters()):
            output, _ = layer(part, sequence_length=S if sequence_parallel else None)
        layout = layer.param_layouts["weight"]
        mine = torch.cat([torch.arange(*run) for run in layout.intervals[group.rank()]])
        assert_close_to(output, expected[..., mine], rtol_of_norm=TIGHT)
        (output * weight[..., mine]).sum().backward()
        assert_close_to(part.grad, dense_x.grad[first:last], rtol_of_norm=TIGHT)
        check_gradients(layer, wholes, group)


@pytest.mark.ranks(1, 2, 3, slow=(3,))
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_row_equals_dense(group, sequence_parallel):
    sequence_parallel &= group.size() > 1
    torch.manual_seed(7)
    layer = row(group, sequence_parallel, lora_alpha=4, use_rslora=True)
    wholes = fill_(layer, group)
    x = torch.randn(S, B, I, dtype=torch.float64)
    dense_x = x.clone().requires_grad_()
    for name, whole in wholes.items():
        whole.requires_grad_("lora" in name)
    expected = dense_output(wholes, dense_x, {"down": None}, 4 / R**0.5)
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()

    start, stop = balanced_range(I, group.size(), group.rank())
    part = x[..., start:stop].clone().requires_grad_()
    with assert_unmodified(part, *layer.parameters()):
        output, _ = layer(part)
    first, last = balanced_range(S, group.size(), group.rank()) if sequence_parallel else (0, S)
    assert_close_to(output, expected[first:last], rtol_of_norm=TIGHT)
    (output * weight[first:last]).sum().backward()
    assert_close_to(part.grad, dense_x.grad[..., start:stop], rtol_of_norm=TIGHT)
    check_gradients(layer, wholes, group)


@pytest.mark.ranks(2)
def test_what_travels(group):
    """Beside the layers' own: z and its gradient for columns, nothing for rows."""
    token_bytes = 2 * R * B * 8  # Of one position, by two adapters.
    for sequence_parallel in (False, True):
        layer = column(group, "qkv", sequence_parallel)
        fill_(layer, group)
        rows = balanced_sizes(S, 2)[group.rank()] if sequence_parallel else S
        part = torch.randn(rows, B, I, dtype=torch.float64, requires_grad=True)
        counts = []
        for enabled in (True, False):
            layer.lora_enabled = enabled
            with CollectiveCounter() as forward:
                output, _ = layer(part, sequence_length=S)
            with CollectiveCounter() as backward:
                output.sum().backward()
            counts.append((forward.num_bytes, backward.num_bytes, len(forward.launches), len(backward.launches)))
        (f1, b1, nf1, nb1), (f0, b0, nf0, nb0) = counts
        if sequence_parallel:
            assert (nf1 - nf0, nb1 - nb0) == (1, 1)
            # This rank's positions forward, all positions backward.
            assert (f1 - f0, b1 - b0) == (rows * token_bytes, S * token_bytes)
        else:
            assert (f1 - f0, b1 - b0) == (0, S * token_bytes)
            assert (nf1 - nf0, nb1 - nb0) == (0, 1)
        layer = row(group, sequence_parallel)
        fill_(layer, group)
        part = torch.randn(S, B, balanced_sizes(I, 2)[group.rank()], dtype=torch.float64, requires_grad=True)
        seen = set()
        for enabled in (True, False):
            layer.lora_enabled = enabled
            with CollectiveCounter() as counter:
                layer(part)[0].sum().backward()
            seen.add((counter.num_bytes, len(counter.launches)))
        assert len(seen) == 1


@pytest.mark.ranks(1, 2)
def test_merging_disabling_and_removing(group):
    for make, width in ((lambda: column(group, "gated"), I), (lambda: row(group), None)):
        torch.manual_seed(3)
        layer = make()
        fill_(layer, group)
        width = width or balanced_sizes(I, group.size())[group.rank()]
        x = torch.randn(S, B, width, dtype=torch.float64)
        before = layer.weight.clone()
        names = list(dict(layer.named_parameters()))
        adapted, _ = layer(x)
        layer.lora_enabled = False
        plain, _ = layer(x)
        assert (plain - adapted).norm() > 0.1 * plain.norm()
        layer.lora_enabled = True
        layer.merge_()
        layer.merge_()
        assert_close_to(layer(x)[0], adapted, rtol_of_norm=TIGHT)
        layer.unmerge_()
        layer.unmerge_()
        assert_close_to(layer.weight, before, rtol_of_norm=1e-15)
        assert_close_to(layer(x)[0], adapted, rtol_of_norm=TIGHT)
        assert set(sharded_state_dict(layer, group=group)) == set(names)
        layer.merge_()
        layer.remove()
        assert type(layer) in (ColumnParallelLinear, RowParallelLinear)
        assert_close_to(layer(x)[0], adapted, rtol_of_norm=TIGHT)
        assert [name for name in names if "lora" not in name] == list(dict(layer.named_parameters()))
        # A new B is 0.
        LoraLinear.add(layer, LoraConfig(r=2), {"again": None})
        assert_close_to(layer(x)[0], adapted, rtol_of_norm=TIGHT)


@pytest.mark.ranks(1, 2, 3, slow=(3,))
def test_initial_values_are_those_of_one_rank(group):
    torch.manual_seed(11)
    layers = [column(group, "qkv"), column(group, "gated"), row(group)]
    torch.manual_seed(11)
    one = alone(group)
    dense = [column(one, "qkv"), column(one, "gated"), row(one)]
    for layer, whole in zip(layers, dense, strict=True):
        for (name, param, layout), (_, expected) in zip(
            named_param_layouts(layer, group.size()), whole.named_parameters(), strict=True
        ):
            expected = expected.detach()
            assert_bit_equal(gather_shards(param.detach(), layout, group), expected, name=name)
            if name.endswith("lora_A"):
                assert float(expected.abs().max()) <= I**-0.5
                assert float(expected.std()) == pytest.approx((I * 3) ** -0.5, rel=0.3)
            elif name.endswith("lora_B"):
                assert not expected.any()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_is_the_same_at_every_layout(group, sequence_parallel):
    sequence_parallel &= group.size() > 1
    one = alone(group)
    x = torch.randn(S, B, I, dtype=torch.float64)
    results = []
    for where in (group, one):
        torch.manual_seed(5)
        layer = column(where, "qkv", sequence_parallel and where is group, lora_dropout=0.5)
        fill_(layer, where)
        torch.manual_seed(6)
        down = row(where, sequence_parallel and where is group, lora_dropout=0.5)
        fill_(down, where)
        seed_streams(1, where.rank(), rng="global")
        first, last = balanced_range(S, where.size(), where.rank()) if layer.sequence_parallel else (0, S)
        output, _ = layer(x[first:last], sequence_length=S)
        start, stop = balanced_range(I, where.size(), where.rank())
        results.append((gather_columns(output, layer, where), down(x[..., start:stop])[0]))
        assert not torch.equal(layer.eval()(x[first:last], sequence_length=S)[0], output)
    (split, split_down), (whole, whole_down) = results
    assert_close_to(split, whole, rtol_of_norm=TIGHT)
    first, last = balanced_range(S, group.size(), group.rank()) if sequence_parallel else (0, S)
    assert_close_to(split_down, whole_down[first:last], rtol_of_norm=TIGHT)


def gather_columns(output, layer, group):
    layout = layer.param_layouts["weight"]
    columns = type(layout)((layout.global_shape[0], S * B), 0, layout.intervals, layout.world_size)
    return gather_shards(output.flatten(0, 1).t(), columns, group)


@pytest.mark.ranks(2)
def test_half_precision_keeps_its_factors_in_fp32(group):
    config = config_of(group, False, torch.bfloat16)
    layer = ColumnParallelLinear(I, 22, config=config, init_method=Normal(0.1), tp_group=group)
    LoraLinear.add(layer, LoraConfig(r=R), {"whole": None})
    assert {param.dtype for param in layer.lora.parameters()} == {torch.float32}
    assert layer.weight.dtype == torch.bfloat16
    x = torch.randn(S, B, I, dtype=torch.bfloat16)
    output, _ = layer(x)
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    layer.merge_()
    assert layer.weight.dtype == torch.bfloat16


@pytest.mark.ranks(1)
def test_what_cannot_have_adapters(group):
    with pytest.raises(ConfigError, match="a Linear cannot have adapters"):
        LoraLinear.add(nn.Linear(3, 3), LoraConfig(), {"x": None})
    layer = column(group, "whole")
    assert isinstance(layer, LoraColumn)
    assert isinstance(layer.lora["whole"], LoraAdapter)
    with pytest.raises(ConfigError, match="has adapters already: whole"):
        LoraLinear.add(layer, LoraConfig(), {"x": None})


def test_impossible_settings():
    for options, message in (
        ({"r": 0}, "the LoRA rank is 0; it must be at least 1"),
        ({"lora_dropout": 1.0}, r"lora_dropout is 1\.0"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"target_modules": ()}, "name at least one"),
        ({"target_modules": "*_proj"}, "'\\*_proj' is no regular expression: nothing to repeat"),
        ({"alpha_pattern": {"q_proj": float("inf")}}, "the alpha of q_proj is inf; it must be from -65504"),
    ):
        with warnings.catch_warnings(), pytest.raises(ConfigError, match=message):
            LoraConfig(**options)
    assert LoraConfig(r=4, lora_alpha=16).scaling == 4
    assert LoraConfig(r=4, lora_alpha=16, use_rslora=True).scaling == 8
