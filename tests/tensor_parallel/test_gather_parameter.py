"""A whole parameter from the ranks' parts."""

import pytest
import torch
from harness.parity import assert_bit_equal, assert_unmodified

from shardwise.core.sharded_state import gather_parameter
from shardwise.core.sharding import ParamLayout


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64], ids=str)
def test_every_layout(group, dtype):
    t, me = group.size(), group.rank()
    whole = (100 * torch.randn(14, 10)).to(dtype)
    layouts = [ParamLayout.split((14, 10), dim, t, stride=stride) for dim in (0, 1) for stride in (1, 2)]
    layouts.append(ParamLayout.split((14, 10), 0, t, sizes=[14] + [0] * (t - 1)))
    layouts.append(ParamLayout((14, 10), 0, (((7, 14), (0, 7)),) * t, t))
    layouts.append(ParamLayout.replicated((14, 10), t))
    for layout in layouts:
        local = layout.take(whole, me)
        with assert_unmodified(local):
            gathered = gather_parameter(local, layout, group=group)
        expected = whole if layout.dim is None or t > 1 else layout.take(whole, 0)
        assert_bit_equal(gathered, expected)
        assert gathered.data_ptr() != local.data_ptr()


@pytest.mark.ranks(2)
def test_strides_of_a_rank_are_its_own(group):
    """Such as the gradient of a weight that is used transposed."""
    whole = torch.randn(6, 5)
    layout = ParamLayout.split((6, 5), 0, 2)
    local = layout.take(whole, group.rank()).t().contiguous().t()
    with assert_unmodified(local):
        gathered = gather_parameter(local, layout, group=group)
    assert_bit_equal(gathered, whole)


@pytest.mark.ranks(1, 2)
def test_no_part_in_autograd(group):
    whole = torch.randn(4, 3)
    for layout in (ParamLayout.split((4, 3), 0, group.size()), ParamLayout.replicated((4, 3), group.size())):
        param = torch.nn.Parameter(layout.take(whole, group.rank()).clone())
        gathered = gather_parameter(param, layout, group=group)
        assert not gathered.requires_grad
        assert gathered.grad_fn is None
        # A copy, on one rank too.
        gathered.zero_()
        assert_bit_equal(param.detach(), layout.take(whole, group.rank()))
