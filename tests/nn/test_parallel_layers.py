"""The engine's layers against ``torch.nn``'s, made from the same state of the generator."""

import copy

import pytest
import torch
from harness.parity import assert_bit_equal, assert_close_to, assert_unmodified
from torch import nn

from shardwise.core.errors import ShardingError, WeightError
from shardwise.core.sharding import balanced_sizes, intervals_of_sizes
from shardwise.nn import ColumnLinear, RowLinear, VocabEmbedding

S, B, IN, OUT = 13, 2, 7, 11


def made(factory, seed=5):
    torch.manual_seed(seed)
    return factory()


def shards(tensor, dim, group, sizes=None):
    return tensor.split(list(sizes or balanced_sizes(tensor.size(dim), group.size())), dim)[group.rank()]


def assert_layers_agree(layer, dense, x, dense_x, part, group, *, weight_dim, out_part):
    """Output, gradient of the input, and this rank's part of the weight's gradient."""
    with assert_unmodified(x):
        y, expected = layer(x), dense(dense_x)
    assert_close_to(y, out_part(expected), rtol_of_norm=1e-13)
    gradient = torch.randn_like(expected)
    y.backward(out_part(gradient).contiguous())
    expected.backward(gradient)
    assert_close_to(x.grad, part(dense_x.grad), rtol_of_norm=1e-13)
    assert_close_to(layer.weight.grad, shards(dense.weight.grad, weight_dim, group), rtol_of_norm=1e-13)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_column_linear_is_a_part_of_linear(group, bias, sequence_parallel):
    s = S if not sequence_parallel else 4 * group.size()
    layer = made(
        lambda: ColumnLinear(IN, OUT, bias, group=group, sequence_parallel=sequence_parallel, dtype=torch.float64)
    )
    dense = made(lambda: nn.Linear(IN, OUT, bias, dtype=torch.float64))
    assert_bit_equal(layer.weight.data, shards(dense.weight.data, 0, group))
    if bias:
        assert_bit_equal(layer.bias.data, shards(dense.bias.data, 0, group))
    dense_x = torch.randn(s, B, IN, dtype=torch.float64, requires_grad=True)

    def part(tensor):
        return shards(tensor, 0, group) if sequence_parallel else tensor

    x = part(dense_x).detach().clone().requires_grad_()
    assert_layers_agree(
        layer, dense, x, dense_x, part, group, weight_dim=0, out_part=lambda tensor: shards(tensor, -1, group)
    )
    whole = layer.gather(layer(x.detach()))
    assert_close_to(whole, dense(dense_x), rtol_of_norm=1e-13)


@pytest.mark.ranks(1, 2)
def test_outputs_may_be_written_to(group):
    width, options = group.size() * 6, {"group": group, "dtype": torch.float64}
    parallel = made(
        lambda: nn.Sequential(
            ColumnLinear(IN, width, **options), nn.ReLU(inplace=True), RowLinear(width, OUT, **options)
        )
    )
    dtype = {"dtype": torch.float64}
    dense = made(lambda: nn.Sequential(nn.Linear(IN, width, **dtype), nn.ReLU(), nn.Linear(width, OUT, **dtype)))
    x, dense_x = (made(lambda: torch.randn(S, B, IN, dtype=torch.float64)).requires_grad_() for _ in range(2))
    y, expected = parallel(x), dense(dense_x)
    y *= 2
    y.square().sum().backward()
    (expected * 2).square().sum().backward()
    assert_close_to(x.grad, dense_x.grad, rtol_of_norm=1e-13)
    assert_close_to(parallel[0].bias.grad, shards(dense[0].bias.grad, 0, group), rtol_of_norm=1e-13)
    for sections in (1, 2):
        layer = made(lambda sections=sections: ColumnLinear(IN, width, sections=sections, **options))
        x.grad = dense_x.grad = None
        gathered, whole = layer.gather(layer(x)), dense[0](dense_x) + 1
        gathered += 1
        assert_close_to(gathered, whole, rtol_of_norm=1e-14, name=f"{sections} sections")
        gathered.square().sum().backward()
        whole.square().sum().backward()
        assert_close_to(x.grad, dense_x.grad, rtol_of_norm=1e-13)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_row_linear_is_a_part_of_linear(group, bias, sequence_parallel):
    layer = made(
        lambda: RowLinear(IN, OUT, bias, group=group, sequence_parallel=sequence_parallel, dtype=torch.float64)
    )
    dense = made(lambda: nn.Linear(IN, OUT, bias, dtype=torch.float64))
    assert_bit_equal(layer.weight.data, shards(dense.weight.data, 1, group))
    if bias:
        assert_bit_equal(layer.bias.data, dense.bias.data)
    dense_x = torch.randn(S, B, IN, dtype=torch.float64, requires_grad=True)

    def part(tensor):
        return shards(tensor, -1, group)

    def out_part(tensor):
        return shards(tensor, 0, group) if sequence_parallel else tensor

    x = part(dense_x).detach().clone().requires_grad_()
    assert_layers_agree(layer, dense, x, dense_x, part, group, weight_dim=1, out_part=out_part)
    assert_close_to(out_part(dense(dense_x)), layer(layer.scatter(dense_x.detach())), rtol_of_norm=1e-13)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_vocab_embedding_is_a_part_of_embedding(group, sequence_parallel):
    layer = made(lambda: VocabEmbedding(101, 6, group=group, sequence_parallel=sequence_parallel, dtype=torch.float64))
    dense = made(lambda: nn.Embedding(101, 6, dtype=torch.float64))
    assert_bit_equal(layer.weight.data, shards(dense.weight.data, 0, group))
    ids = torch.randint(101, (B, S))
    # The first and the last id of each rank are among them.
    edges = [
        edge for start, stop in intervals_of_sizes(balanced_sizes(101, group.size())) for edge in (start, stop - 1)
    ]
    ids[0, : len(edges)] = torch.tensor(edges)
    y, expected = layer(ids), dense(ids)
    if sequence_parallel:
        expected = shards(expected.transpose(0, 1), 0, group)
    assert_bit_equal(y, expected.contiguous())
    gradient = torch.randn(B, S, 6, dtype=torch.float64)
    dense(ids).backward(gradient)
    y.backward(shards(gradient.transpose(0, 1), 0, group) if sequence_parallel else gradient)
    assert_close_to(layer.weight.grad, shards(dense.weight.grad, 0, group), rtol_of_norm=1e-14)


@pytest.mark.ranks(2)
def test_sizes_given_and_inputs_of_another_width(group):
    layer = ColumnLinear(IN, OUT, group=group, sizes=[9, 2])
    assert layer(torch.zeros(3, 1, IN)).size(-1) == [9, 2][group.rank()]
    with pytest.raises(ShardingError, match=r"\[3, 1, 6\]; rank \d of 2 needs 7 features"):
        layer(torch.zeros(3, 1, 6))
    with pytest.raises(ShardingError, match="sum to 11"):
        ColumnLinear(IN, OUT, group=group, sizes=[9, 3])
    without = ColumnLinear(IN, OUT, False, group=group, own_weight=False)
    with pytest.raises(WeightError, match="pass a weight to forward"):
        without(torch.zeros(3, 1, IN))
    with pytest.raises(WeightError, match=r"has shape \[1, 7\]"):
        without(torch.zeros(3, 1, IN), torch.zeros(1, IN))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [ColumnLinear, RowLinear])
def test_delayed_weight_gradients_are_the_same(group, kind):
    width = IN if kind is ColumnLinear else balanced_sizes(IN, 2)[group.rank()]
    x = torch.randn(S, B, width, dtype=torch.float64)
    if kind is ColumnLinear:
        torch.distributed.broadcast(x, 0, group=group)
    at_once = made(lambda: kind(IN, OUT, group=group, dtype=torch.float64))
    later = made(lambda: kind(IN, OUT, group=group, dtype=torch.float64, delay_weight_gradient=True))
    for layer in (at_once, later):
        for _ in range(2):
            layer(x).square().sum().backward()
    assert later.weight.grad is None
    copied = copy.deepcopy(later)
    copied.backward_dw()
    assert copied.weight.grad is None, "a copy has gradients of its own, and none waits"
    later.backward_dw()
    assert_close_to(later.weight.grad, at_once.weight.grad, rtol_of_norm=1e-14)
    later.backward_dw()
    assert_close_to(later.weight.grad, at_once.weight.grad, rtol_of_norm=1e-14)
