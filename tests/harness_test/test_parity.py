"""The comparisons fail where they must."""

import pytest
import torch
from harness.parity import assert_bit_equal, assert_close_to, assert_unmodified, gather_shards

from shardwise.core.errors import ShardingError
from shardwise.core.sharding import ParamLayout

INF, NAN = float("inf"), float("nan")


def test_close_to_measures_against_the_norm():
    expected = torch.tensor([3.0, 4.0, 0.0])
    assert_close_to(expected + torch.tensor([0.0, 0.0, 4.9e-3]), expected, rtol_of_norm=1e-3)
    with pytest.raises(AssertionError) as info:
        assert_close_to(expected + torch.tensor([0.0, 0.0, 5.1e-3]), expected, rtol_of_norm=1e-3, name="grad")
    assert str(info.value).startswith(
        "grad: error 1.020e-03 of the norm 5.000e+00, more than 1.000e-03; worst at [2]: 0.0051"
    )
    assert str(info.value).endswith("expected 0.0")


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        ([NAN, 1.0], [1.0, 1.0]),
        ([1.0, 1.0], [NAN, 1.0]),
        ([NAN, 1.0], [NAN, 1.0]),
        ([INF, 1.0], [1.0, 1.0]),
        ([1.0, 1.0], [INF, 1.0]),
        ([-INF, 1.0], [INF, 1.0]),
        ([1e-30, 0.0], [0.0, 0.0]),
    ],
)
def test_close_to_fails(actual, expected):
    with pytest.raises(AssertionError, match=r"worst at \[0\]"):
        assert_close_to(torch.tensor(actual), torch.tensor(expected), rtol_of_norm=0.5)


@pytest.mark.parametrize("values", [[], [0.0, 0.0], [INF, -INF, 1.0]])
def test_close_to_passes_at_equality(values):
    assert_close_to(torch.tensor(values), torch.tensor(values), rtol_of_norm=0.0)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.int64, torch.bool]
)
def test_close_to_takes_every_dtype(dtype):
    expected = torch.tensor([[1, 0], [1, 1]], dtype=dtype)
    actual = expected.clone()
    assert_close_to(actual, expected, rtol_of_norm=0.0)
    actual[0, 1] = 1
    with pytest.raises(AssertionError, match=r"worst at \[0, 1\]"):
        assert_close_to(actual, expected, rtol_of_norm=0.1)


@pytest.mark.parametrize("compare", [assert_bit_equal, lambda a, e: assert_close_to(a, e, rtol_of_norm=1.0)])
@pytest.mark.parametrize("actual", [torch.ones(1, 2), torch.ones(2, dtype=torch.float64)], ids=["shape", "dtype"])
def test_shape_and_dtype_must_agree(compare, actual):
    with pytest.raises(AssertionError, match=r"expected \[2\] of torch.float32"):
        compare(actual, torch.ones(2))


def test_bit_equal():
    assert_bit_equal(torch.tensor([NAN, INF, -0.0]), torch.tensor([NAN, INF, -0.0]))
    assert_bit_equal(torch.tensor(1.0), torch.tensor(1.0))
    assert_bit_equal(torch.ones(0, 3), torch.ones(0, 3))
    assert_bit_equal(torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t().contiguous())
    with pytest.raises(AssertionError, match=r"1 of 1 elements differ; first at \[\]: 1.0, expected 2.0"):
        assert_bit_equal(torch.tensor(1.0), torch.tensor(2.0))
    with pytest.raises(AssertionError, match=r"2 of 4 elements differ; first at \[0, 1\]: -0.0, expected 0.0"):
        assert_bit_equal(torch.tensor([[1.0, -0.0], [1.0, 2.0]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]]))


def test_unmodified():
    x, y = torch.ones(3), torch.ones(3, requires_grad=True)
    with assert_unmodified(x, y=y):
        (x + y).sum().backward()
    with pytest.raises(AssertionError, match=r"tensor 0 was modified: 1 of 3 elements differ"), assert_unmodified(x):
        x[1] = 2
    with pytest.raises(AssertionError, match=r"h was written to: its version went from 1 to 2"), assert_unmodified(h=x):
        x.copy_(x.clone())
    with pytest.raises(AssertionError, match=r"tensor 0 was modified"), assert_unmodified(x):
        # Through .data no version is counted.
        x.data[0] = 5
    with pytest.raises(ZeroDivisionError), assert_unmodified(x):
        x[1] = 1 / 0
    with torch.inference_mode():
        z = torch.ones(1)
        with assert_unmodified(z):
            z.add(1)
        with pytest.raises(AssertionError, match="was modified"), assert_unmodified(z):
            z.add_(1)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dim", [0, 1])
def test_gather_shards(group, dim, stride):
    whole = torch.randn(10, 14)
    layout = ParamLayout.split(whole.shape, dim, group.size(), stride=stride)
    local = layout.take(whole, group.rank()).requires_grad_()
    gathered = gather_shards(local, layout, group)
    assert_bit_equal(gathered, whole)
    assert not gathered.requires_grad
    replicated = ParamLayout.replicated(whole.shape, group.size())
    assert_bit_equal(gather_shards(whole, replicated, group), whole)


@pytest.mark.ranks(2)
def test_gather_shards_compares_replicas(group):
    local = torch.full((2,), float(group.rank()))
    for layout in (ParamLayout.replicated([2], 2), ParamLayout((2,), 0, (((0, 2),), ((0, 2),)), 2)):
        with pytest.raises(AssertionError, match=r"against its replicas on other ranks: 2 of 2 elements differ"):
            gather_shards(local, layout, group)
        assert gather_shards(local, layout, group, check_replicas=False).tolist() == [0.0, 0.0]


@pytest.mark.ranks(2)
def test_gather_shards_rejects_a_wrong_shape_on_every_rank(group):
    with pytest.raises(ShardingError, match=r"shard of rank 1 has shape \[3\], expected \[2\]"):
        gather_shards(torch.ones(2 + group.rank()), ParamLayout.split([4], 0, 2), group)
