"""Weights in 8 and 4 bits: torchao's codes, alike at every number of ranks, and products with what they stand for."""

from __future__ import annotations

import copy

import pytest
import torch
from harness.groups import alone
from harness.parity import assert_bit_equal, assert_close_to, gather_shards

from shardwise.core.errors import ConfigError
from shardwise.core.sequence_view import SequenceView
from shardwise.core.sharding import ParamLayout, balanced_range
from shardwise.nn import ColumnLinear, RowLinear, quantization
from shardwise.nn.quantization import QuantizedTensor, levels_on, quantize_shard

KINDS = ("int8", "nf4")
# Rows and columns that nothing divides: 150 columns are three blocks of nf4, the last of 22.
ROWS, COLUMNS = 23, 150


def weight_of(rows=ROWS, columns=COLUMNS, dtype=torch.float32):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight[3] = 0
    return weight


def quantize_alone(kind, weight, group):
    return quantize_shard(kind, weight, ParamLayout.replicated(weight.shape, 1), alone(group))


@pytest.mark.ranks(1, 2, 3)
def test_codes_do_not_depend_on_the_ranks(group, monkeypatch):
    # Several blocks of rows, at this size too.
    monkeypatch.setattr(quantization, "_AT_ONCE", 4 * COLUMNS)
    for kind in KINDS:
        whole = quantize_alone(kind, weight_of(), group).dequantize()
        for dim in (0, 1):
            layout = ParamLayout.split((ROWS, COLUMNS), dim, group.size())
            part = quantize_shard(kind, layout.take(weight_of(), group.rank()), layout, group)
            assert part.shape == layout.local_shape(group.rank())
            assert_bit_equal(gather_shards(part.dequantize(), layout, group), whole, name=f"{kind} {dim}")
            bits = 8 * part.num_bytes / max(1, part.numel())
            assert bits < (8, 4)[kind == "nf4"] + 6


@pytest.mark.ranks(1)
def test_int8_is_that_of_torchao(group):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    for dtype in (torch.float32, torch.bfloat16):
        linear = torch.nn.Linear(COLUMNS, ROWS, bias=False, dtype=dtype)
        linear.weight = torch.nn.Parameter(weight_of(dtype=dtype))
        quantize_(linear, Int8WeightOnlyConfig())
        ours = quantize_alone("int8", weight_of(dtype=dtype), group)
        assert_bit_equal(ours.codes, linear.weight.qdata, name="codes")
        assert_bit_equal(ours.scales.flatten(), linear.weight.scale.flatten(), name="scales")


@pytest.mark.ranks(1)
def test_nf4_has_the_codes_of_torchao(group):
    """Which stores scales in 8 bits: its values differ from ours by that much."""
    from torchao.quantization import to_nf4

    weight = weight_of(32, 256)[4:]
    theirs = to_nf4(weight, 64, 16)
    ours = quantize_alone("nf4", weight, group)
    assert_bit_equal(ours.codes.flatten(), theirs.quantized_data, name="codes")
    assert_close_to(ours.dequantize(), theirs.get_original_weight(), rtol_of_norm=5e-3)
    # No value is further from what stands for it than half of the widest gap between levels.
    gap = levels_on(weight.device).diff().max() / 2
    largest = weight.view(-1, 64).abs().amax(1, keepdim=True).expand(-1, 64).reshape(weight.shape)
    assert bool(((ours.dequantize() - weight).abs() <= gap * largest * (1 + 1e-6)).all())


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_layers_multiply_by_what_the_codes_stand_for(group, sequence_parallel, monkeypatch):
    monkeypatch.setattr(quantization, "_AT_ONCE", 5 * COLUMNS)
    sequence_parallel &= group.size() > 1
    s, b, t, rank = 7, 2, group.size(), group.rank()
    generator = torch.Generator().manual_seed(2)
    first, last = balanced_range(s, t, rank) if sequence_parallel else (0, s)
    for kind in KINDS:
        for row in (False, True):
            shape = (ROWS, COLUMNS) if row else (COLUMNS, ROWS)
            whole = quantize_alone(kind, weight_of(*shape, dtype=torch.float64), group)
            options = {"group": group, "sequence_parallel": sequence_parallel, "dtype": torch.float64}
            layer = (RowLinear if row else ColumnLinear)(shape[1], shape[0], True, **options)
            layout = layer.param_layouts["weight"]
            part = quantize_shard(kind, layout.take(weight_of(*shape, dtype=torch.float64), rank), layout, group)
            layer.weight = torch.nn.Parameter(part, requires_grad=False)
            bias = torch.randn(shape[0], dtype=torch.float64, generator=generator)
            layer.bias.data.copy_(layer.param_layouts["bias"].take(bias, rank))
            x = torch.randn(s, b, shape[1], dtype=torch.float64, generator=generator)
            grad = torch.randn(s, b, shape[0], dtype=torch.float64, generator=generator)
            dense = x.clone().requires_grad_()
            expected = torch.nn.functional.linear(dense, whole.dequantize(), bias)
            expected.backward(grad)
            features = slice(*balanced_range(shape[1], t, rank)) if row else slice(None)
            rows = slice(None) if row else slice(*balanced_range(shape[0], t, rank))
            tokens, outs = (slice(None), slice(first, last)) if row else (slice(first, last), slice(None))
            own = x[tokens][..., features].clone().requires_grad_()
            output = layer(own) if row else layer(own, sequence=SequenceView(s, group) if sequence_parallel else None)
            assert_close_to(output, expected[outs][..., rows], rtol_of_norm=1e-13)
            output.backward(grad[outs][..., rows])
            assert_close_to(own.grad, dense.grad[tokens][..., features], rtol_of_norm=1e-13)
            assert layer.weight.grad is None


@pytest.mark.ranks(1)
def test_a_quantised_weight_is_copied_moved_and_not_written_to(group):
    for kind in KINDS:
        part = torch.nn.Parameter(quantize_alone(kind, weight_of(), group), requires_grad=False)
        assert isinstance(part, torch.nn.Parameter)
        assert isinstance(part, QuantizedTensor)
        for other in (copy.deepcopy(part), part.clone(), part.to(torch.bfloat16), part.detach()):
            assert isinstance(other, QuantizedTensor)
            assert_bit_equal(other.dequantize().float(), part.dequantize().to(other.dtype).float(), name=kind)
        layer = torch.nn.Linear(3, 3)
        layer.weight = part
        layer.to(torch.bfloat16)
        assert_bit_equal(layer.weight.dequantize(), part.dequantize().bfloat16(), name="a module that is converted")
        layer.to("meta")
        assert layer.weight.codes.is_meta
        part = torch.nn.Parameter(quantize_alone(kind, weight_of(), group), requires_grad=False)
        assert copy.deepcopy(part).codes.data_ptr() != part.codes.data_ptr()
        assert_bit_equal(part + 1, part.dequantize() + 1, name="an operation")
        for write in (lambda part=part: part.zero_(), lambda part=part: part.copy_(weight_of())):
            with pytest.raises(ConfigError, match="is frozen: it cannot be written to"):
                write()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", KINDS)
def test_codes_do_not_depend_on_the_default_dtype(group, kind):
    weight = weight_of()
    expected = quantize_alone(kind, weight, group)
    quantization._levels.cache_clear()
    torch.set_default_dtype(torch.float64)
    made = quantize_alone(kind, weight, group)
    assert made.scales.dtype == torch.float32
    assert_bit_equal(made.dequantize(), expected.dequantize())
