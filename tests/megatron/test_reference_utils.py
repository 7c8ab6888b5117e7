"""Functions that programs import from Megatron's ``utils``."""

import pytest
import torch
from harness.parity import assert_bit_equal

from shardwise import parallel_state
from shardwise.errors import ShardingError, TopologyError
from shardwise.megatron import utils


def test_without_a_group():
    assert utils.get_pg_size() == 1
    assert utils.get_pg_rank() == 0
    assert utils.get_tensor_model_parallel_group_if_none(None, check_initialized=False) is None
    with pytest.raises(TopologyError, match="not initialised"):
        utils.get_tensor_model_parallel_group_if_none(None)


@pytest.mark.ranks(2)
def test_with_a_group(group):
    assert (utils.get_pg_size(group), utils.get_pg_rank(group)) == (2, group.rank())
    assert utils.get_tensor_model_parallel_group_if_none(group) is group
    parallel_state.initialize_model_parallel(2, expert_tensor_parallel_size=1)
    tensor_parallel = utils.get_tensor_model_parallel_group_if_none(None)
    assert tensor_parallel is parallel_state.get_tensor_model_parallel_group()
    assert utils.get_tensor_model_parallel_group_if_none(None, is_expert=True).size() == 1


@pytest.mark.ranks(3)
def test_checkpoint_entries(group):
    whole = torch.arange(14.0).view(7, 2)
    sizes = [3, 2, 2]
    own = whole.split(sizes)[group.rank()]
    entry = utils.make_tp_sharded_tensor_for_checkpoint(own, "w", sizes=sizes, tp_group=group)
    assert entry.global_shape == (7, 2)
    assert_bit_equal(entry.layout.take(whole, group.rank()), own)
    with pytest.raises(ShardingError, match=r"w: sizes \[3, 4\] do not fit"):
        utils.make_tp_sharded_tensor_for_checkpoint(own, "w", sizes=[3, 4], tp_group=group)
    replicated = utils.make_sharded_tensor_for_checkpoint(whole, "b", ((0, 1, 4),), tp_group=group)
    assert replicated.global_shape == (4, 7, 2)
    assert replicated.is_replica == (group.rank() > 0)


def test_viewless_tensors():
    base = torch.randn(3, 4, requires_grad=True)
    whole = base * 1
    assert utils.make_viewless_tensor(whole, True, True) is whole
    view = whole[0]
    viewless = utils.make_viewless_tensor(view, requires_grad=True, keep_graph=True)
    assert viewless._base is None
    assert viewless.data_ptr() == view.data_ptr()
    viewless.sum().backward()
    assert_bit_equal(base.grad, torch.tensor([[1.0] * 4, [0.0] * 4, [0.0] * 4]))
    apart = utils.make_viewless_tensor(view, requires_grad=False, keep_graph=False)
    assert apart._base is None
    assert not apart.requires_grad
    assert utils.assert_viewless_tensor([apart, 3]) == [apart, 3]
    with pytest.raises(ShardingError, match=r"shape \[4\] is a view of one of shape \[3, 4\].*here"):
        utils.assert_viewless_tensor([view], "here")
    utils.safely_set_viewless_tensor_data(apart, torch.zeros(2))
    assert apart.tolist() == [0, 0]
    with pytest.raises(ShardingError, match=r"its data was to be replaced by shape \[2\]"):
        utils.safely_set_viewless_tensor_data(view, torch.zeros(2))
