"""Layers for inference equal a norm and the training layer, fused or not, and make the collectives that they say."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from harness.parity import assert_bit_equal, assert_close_to, assert_unmodified, gather_all
from torch import nn

from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.communication.context import context_of
from shardwise.core.communication.symmetric_memory import GlobalSymmetricMemoryBuffer, symmetric_buffer_of
from shardwise.core.errors import ConfigError, ShardingError
from shardwise.core.sequence_view import SequenceView
from shardwise.core.sharding import balanced_range, balanced_sizes
from shardwise.kernels.norms import reduce_norm_
from shardwise.nn import ColumnLinear, RowLinear, inference
from shardwise.nn.inference import InferenceColumnLinear, InferenceNormColumnLinear, InferenceRowLinear, sharing
from shardwise.nn.norm import NormFunction, RMSNorm, ZeroCenteredLayerNorm, ZeroCenteredRMSNorm

# Sizes that no number of ranks above 1 divides.
S, B, H, FFN = 13, 2, 7, 11
NORMS = (nn.LayerNorm, RMSNorm, ZeroCenteredLayerNorm, ZeroCenteredRMSNorm)
# Of the dense result's largest element: what a sum of few products loses in the dtype, some of it per rank.
BOUNDS = {torch.float64: 1e-12, torch.float32: 4e-6, torch.bfloat16: 4e-2}
CASES = [
    (dtype, *case)
    for dtype in BOUNDS
    for case in ((nn.LayerNorm, True, S), (RMSNorm, False, S), (ZeroCenteredRMSNorm, True, 1))
]


def rows_of(tensor, group, sequence_parallel):
    """This rank's shard of the sequence."""
    if not sequence_parallel:
        return tensor
    return tensor.split(balanced_sizes(tensor.size(0), group.size()))[group.rank()].contiguous()


def norm_of(kind, dtype=torch.float64):
    norm = kind(H, eps=1e-5, dtype=dtype)
    for param in norm.parameters():
        nn.init.normal_(param)
    return norm


def half_block(group, *, kind=nn.LayerNorm, bias=True, sequence_parallel=True, dtype=torch.float64):
    """Norm, column-parallel and row-parallel layer of training, the same on every number of ranks."""
    torch.manual_seed(3)
    options = {"bias": bias, "group": group, "sequence_parallel": sequence_parallel, "dtype": dtype}
    return norm_of(kind, dtype), ColumnLinear(H, FFN, **options), RowLinear(FFN, H, **options)


def trained(half, x, s):
    """What training computes, inside the residual stream."""
    norm, column, row = half
    with torch.no_grad():
        return x + row(F.gelu(column(norm(x), sequence=SequenceView(s, column.group))))


@torch.no_grad()
def compare(actual, expected):
    """Within the bound of the dtype, on every rank alike; an empty shard has nothing to compare."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert not actual.requires_grad
    if actual.numel():
        scale = float(expected.double().abs().max())
        assert float((actual.double() - expected.double()).abs().max()) <= BOUNDS[actual.dtype] * scale


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_layers_equal_norm_and_training_layers(group, sequence_parallel):
    """At lengths that the ranks do not divide, with fewer positions than ranks too."""
    for dtype, kind, bias, s in CASES:
        half = norm, column, row = half_block(
            group, kind=kind, bias=bias, sequence_parallel=sequence_parallel, dtype=dtype
        )
        x = rows_of(torch.randn(s, B, H, dtype=torch.float64).to(dtype), group, sequence_parallel)
        up, down = InferenceNormColumnLinear.of(norm, column), InferenceRowLinear.of(row)
        with assert_unmodified(x), torch.no_grad():
            inner = up(x, sequence=SequenceView(s, group))
            compare(inner, column(norm(x), sequence=SequenceView(s, group)))
            compare(down(F.gelu(inner)), row(F.gelu(inner)))
            compare(down(F.gelu(inner), x), trained(half, x, s))


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_fused_half_blocks_equal_training_ones_with_one_all_reduce_each(group, sequence_parallel):
    for dtype, kind, bias, s in CASES:
        halves = [
            half_block(group, kind=kind, bias=bias, sequence_parallel=sequence_parallel, dtype=dtype) for _ in range(3)
        ]
        ups = [InferenceNormColumnLinear.of(norm, column) for norm, column, _ in halves]
        last = NormFunction.of(norm_of(kind, dtype))
        following = [*(up.norm for up in ups[1:]), last]
        downs = [
            InferenceRowLinear.of(row, next_norm=norm) for (_, _, row), norm in zip(halves, following, strict=True)
        ]
        for up in ups[1:]:
            up.skip_norm_and_all_gather = True
        x = rows_of(torch.randn(s, B, H, dtype=torch.float64).to(dtype), group, sequence_parallel)
        expected = hidden = x
        with CollectiveCounter() as counter, assert_unmodified(x):
            for up, down in zip(ups, downs, strict=True):
                hidden = down(F.gelu(up(hidden, sequence=SequenceView(s, group))), hidden)
        for half in halves:
            expected = trained(half, expected, s)
        compare(hidden, expected)
        if group.size() == 1:
            assert not counter.launches
            continue
        first = ["all_gather"] if sequence_parallel else []
        assert [launch.name for launch in counter.launches] == first + ["all_reduce"] * 3
        # The whole normed result lies in the buffer, the same on every rank.
        memory = symmetric_buffer_of(group, x.device)
        left = memory.take()
        assert left.normed.data_ptr() == memory.maybe_get_tensor((s, B, H), dtype)["tensor"].data_ptr()
        compare(rows_of(left.normed, group, sequence_parallel), last(expected))
        for other in gather_all(left.normed, group):
            assert_bit_equal(other, left.normed)


@pytest.mark.ranks(2, 3)
def test_without_memory_for_it_fused_mode_gives_the_same(group, monkeypatch):
    """As where a prompt is longer than the buffer: one layer adds the residual, the next norms it."""
    monkeypatch.setattr(
        GlobalSymmetricMemoryBuffer, "maybe_get_tensor", lambda self, shape, dtype: {"tensor": None, "handle": None}
    )
    halves = [half_block(group), half_block(group)]
    ups = [InferenceNormColumnLinear.of(norm, column) for norm, column, _ in halves]
    down = InferenceRowLinear.of(halves[0][2], next_norm=ups[1].norm)
    ups[1].skip_norm_and_all_gather = True
    x = rows_of(torch.randn(S, B, H, dtype=torch.float64), group, True)
    hidden = down(F.gelu(ups[0](x, sequence=SequenceView(S, group))), x)
    compare(hidden, trained(halves[0], x, S))
    norm, column, _ = halves[1]
    with torch.no_grad():
        compare(ups[1](hidden, sequence=SequenceView(S, group)), column(norm(hidden), sequence=SequenceView(S, group)))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_layers_made_by_themselves_start_as_the_training_layers(group, normalization):
    options = {"group": group, "sequence_parallel": True, "dtype": torch.float64}
    torch.manual_seed(5)
    alone = InferenceNormColumnLinear(H, FFN, normalization=normalization, eps=1e-3, **options)
    torch.manual_seed(5)
    column = ColumnLinear(H, FFN, **options)
    assert_bit_equal(alone.weight.data, column.weight.data)
    assert_bit_equal(alone.bias.data, column.bias.data)
    norm = {"LayerNorm": nn.LayerNorm, "RMSNorm": RMSNorm}[normalization](H, eps=1e-3, dtype=torch.float64)
    x = rows_of(torch.randn(S, B, H, dtype=torch.float64), group, True)
    with torch.no_grad():
        compare(alone(x, sequence=SequenceView(S, group)), column(norm(x), sequence=SequenceView(S, group)))
    names = {"weight", "bias", "layer_norm_weight"} | ({"layer_norm_bias"} if normalization == "LayerNorm" else set())
    assert set(alone.sharded_state_dict()) == set(alone.state_dict()) == names
    assert f"normalization={normalization}, eps=0.001" in repr(alone)
    with pytest.raises(ConfigError, match="normalization is 'BatchNorm'"):
        InferenceNormColumnLinear(H, FFN, normalization="BatchNorm", **options)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_as_a_function_is_the_norm(group, kind):
    norm, x = norm_of(kind), torch.randn(5, H, dtype=torch.float64)
    with torch.no_grad():
        assert_bit_equal(NormFunction.of(norm)(x), norm(x))


@pytest.mark.ranks(2)
def test_a_view_shares_the_weights(group):
    norm, column, row = half_block(group)
    up, down = InferenceNormColumnLinear.of(norm, column), InferenceRowLinear.of(row)
    assert up.weight is column.weight
    assert up.layer_norm_weight is norm.weight
    assert down.weight is row.weight
    # The norm's parameters are the norm's, and are not stored twice.
    assert set(up.state_dict()) == {"weight", "bias"}
    assert column.training
    assert not up.training
    with torch.no_grad():
        column.weight.add_(1.0)
    assert_bit_equal(up.weight.data, column.weight.data)


@contextlib.contextmanager
def refused(error, match):
    """An error on every rank, before any communication."""
    with CollectiveCounter() as counter, pytest.raises(error, match=match):
        yield
    assert not counter.launches


@pytest.mark.ranks(2)
def test_what_layers_cannot_take(group):
    norm, column, row = half_block(group)
    up, down = InferenceNormColumnLinear.of(norm, column), InferenceRowLinear.of(row)
    x = torch.randn(3, B, H, dtype=torch.float64)
    inner = torch.randn(6, B, row.local_features, dtype=torch.float64)
    with refused(ShardingError, r"shape \[3, 2, 6\]; rank \d of 2 needs 7 features"):
        up(x[..., :6])
    with refused(ShardingError, r"needs \d features in the last dimension"):
        down(inner[..., :-1])
    for layer, row_of_features in ((up, x[0, 0]), (down, inner[0, 0])):
        with refused(ShardingError, r"the input has shape \[\d\]; give it a sequence and features"):
            layer(row_of_features)
    with refused(ConfigError, r"input is torch.float32 and the layer's weight torch.float64"):
        up(x.float())
    with refused(ConfigError, r"input is torch.int64 and the layer's weight torch.float64"):
        down(inner.long())
    with refused(ShardingError, r"residual has shape \[6, 2, 7\]; rank \d of 2 needs \[3, 2, 7\]"):
        down(inner, torch.zeros(6, B, H, dtype=torch.float64))
    down.next_norm = up.norm
    with refused(ConfigError, "there is none; pass it to forward, or call _set_residual before"):
        down(inner)
    with refused(ConfigError, "residual is torch.float32 and the input torch.float64"):
        down(inner, x.float())
    # A residual that was set is for one call.
    down.residual = x
    down(inner)
    with refused(ConfigError, "there is none"):
        down(inner)
    symmetric_buffer_of(group, x.device).take()
    up.skip_norm_and_all_gather = True
    with refused(ConfigError, "no row-parallel layer of this group has left a normed input for this call"):
        up(x)
    down(inner, x)
    with refused(ShardingError, r"left a normed input of shape \[6, 2, 7\] .* is given \[2, 2, 7\]"):
        up(x[:2])
    other = InferenceNormColumnLinear.of(norm_of(nn.LayerNorm), column)
    other.skip_norm_and_all_gather = True
    down(inner, x)
    with refused(ConfigError, "has applied another norm than this one's"):
        other(x)
    # What was taken is gone, so it is not taken for another layer's.
    with refused(ConfigError, "no row-parallel layer"):
        up(x)
    with refused(ConfigError, "is made from a ColumnLinear, and this layer is of another class, RowLinear"):
        InferenceNormColumnLinear.of(norm, row)
    with refused(ConfigError, "Identity is not one of the norms"):
        InferenceNormColumnLinear.of(nn.Identity(), column)


@pytest.mark.ranks(2)
def test_a_column_layer_without_a_norm_takes_what_was_left(group):
    norm, _, row = half_block(group)
    plain = InferenceColumnLinear(H, FFN, group=group, sequence_parallel=True, dtype=torch.float64)
    down = InferenceRowLinear.of(row, next_norm=NormFunction.of(norm))
    x = torch.randn(3, B, H, dtype=torch.float64)
    with torch.no_grad():
        assert_bit_equal(plain(x), sharing(plain, ColumnLinear)(x))
        hidden = down(torch.randn(6, B, row.local_features, dtype=torch.float64), x)
        expected = plain(norm(hidden))
    plain.skip_norm_and_all_gather = True
    assert_close_to(plain(hidden), expected, rtol_of_norm=1e-14)


@pytest.mark.ranks(2, 3)
def test_the_path_through_symmetric_memory_is_given_what_it_needs(group, monkeypatch):
    """Its kernel's definition, on the buffers of all ranks; what each writes then lies in all of them."""

    def emulated(handle, addresses, start, residual, bias, weight, norm_bias, eps):
        memory = symmetric_buffer_of(group, residual.device)
        assert (handle, addresses) == (memory.handle, "addresses")
        flat = memory.maybe_get_tensor((S * B, H), residual.dtype)["tensor"]
        buffers = gather_all(flat, group)
        rows = residual.reshape(-1, H)
        new = reduce_norm_(buffers, start, rows, bias, weight, norm_bias, eps)
        for rank, buffer in enumerate(gather_all(buffers[0], group)):
            first, last = balanced_range(S, group.size(), rank)
            flat[first * B : last * B] = buffer[first * B : last * B]
        return new.view(residual.shape)

    monkeypatch.setattr(GlobalSymmetricMemoryBuffer, "is_symmetric", True)
    monkeypatch.setattr(GlobalSymmetricMemoryBuffer, "addresses", "addresses")
    context_of(group).symmetric_buffers.clear()
    monkeypatch.setattr(inference, "runs_fused", lambda buffer: True)
    monkeypatch.setattr(inference, "fused_reduce_norm_", emulated)
    for kind, bias in ((nn.LayerNorm, True), (RMSNorm, False), (ZeroCenteredRMSNorm, True)):
        half = half_block(group, kind=kind, bias=bias)
        up = InferenceNormColumnLinear.of(*half[:2])
        down = InferenceRowLinear.of(half[2], next_norm=up.norm)
        x = rows_of(torch.randn(S, B, H, dtype=torch.float64), group, True)
        hidden = down(F.gelu(up(x, sequence=SequenceView(S, group))), x)
        compare(hidden, trained(half, x, S))
        up.skip_norm_and_all_gather = True
        output = up(hidden)
        up.skip_norm_and_all_gather = False
        compare(output, up(hidden, sequence=SequenceView(S, group)))
        assert "exchange=fused, in symmetric memory" in repr(down)
    # One rank whose machine lacks what the kernel needs: none of them runs it.
    context_of(group).symmetric_buffers.clear()
    monkeypatch.setattr(inference, "runs_fused", lambda buffer: group.rank() > 0)
    compare(down(F.gelu(up(x, sequence=SequenceView(S, group))), x), trained(half, x, S))
    assert "exchange=fused, one all-reduce" in repr(down)
    # The buffer that was made here is not for other tests.
    context_of(group).symmetric_buffers.clear()


@pytest.mark.ranks(1, 2)
def test_repr_says_which_exchange(group):
    norm, _, row = half_block(group)
    context_of(group).symmetric_buffers.clear()
    down = InferenceRowLinear.of(row)
    unfused, chosen = ("none", "none") if group.size() == 1 else ("row_sequence", "fused, one all-reduce")
    assert f"exchange={unfused})" in repr(down)
    down.next_norm = NormFunction.of(norm)
    if group.size() > 1:
        assert "exchange=fused, chosen in the first call)" in repr(down)
    x = torch.zeros(2, B, H, dtype=torch.float64)
    down(torch.zeros(2 * group.size(), B, row.local_features, dtype=torch.float64), x)
    assert f"exchange={chosen})" in repr(down)


@pytest.mark.ranks(2)
def test_an_output_of_another_dtype(group):
    layer = InferenceColumnLinear(H, FFN, group=group, dtype=torch.bfloat16, output_dtype=torch.float32)
    x = torch.randn(S, B, H, dtype=torch.bfloat16)
    output = layer(x)
    output = output[0] if isinstance(output, tuple) else output
    assert output.dtype == torch.float32
    assert_close_to(output, F.linear(x.float(), layer.weight.float(), layer.bias.float()), rtol_of_norm=1e-6)
