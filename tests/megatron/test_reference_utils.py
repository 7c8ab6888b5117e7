"""Functions that programs import from Megatron's ``utils``."""

import pytest
import torch
import torch.nn.functional as F
from harness.parity import assert_bit_equal, assert_close_to

from shardwise import parallel_state
from shardwise.core.errors import ConfigError, ShardingError, TopologyError
from shardwise.megatron import utils
from shardwise.megatron.module import MegatronModule


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


def test_what_a_wrapped_model_has():
    inner, outer = MegatronModule(), torch.nn.Module()
    outer.module, inner.config, inner.absent, outer.config = inner, "settings", None, None
    assert utils.get_model_config(outer) == "settings"
    assert utils.get_attr_wrapped_model(outer, "config") is None
    assert utils.get_attr_wrapped_model(outer, "absent", return_model_obj=True) is inner
    assert utils.unwrap_model([outer]) == [inner]
    assert utils.unwrap_model(outer, (MegatronModule,)) is outer
    with pytest.raises(RuntimeError, match="a Module has no attribute 'other', nor what it wraps"):
        utils.get_attr_wrapped_model(outer, "other")
    with pytest.raises(RuntimeError, match="give one model of the list"):
        utils.get_attr_wrapped_model([outer], "config")


def test_the_factors_of_a_weight_s_gradient():
    gradient, input_ = torch.randn(2, 3, 4).transpose(0, 1), torch.randn(3, 2, 5)
    left, right = utils.prepare_input_tensors_for_wgrad_compute(gradient, input_)
    assert left.is_contiguous()
    assert_close_to(left.t() @ right, torch.einsum("sbo,sbi->oi", gradient, input_), rtol_of_norm=1e-6)
    flat = torch.randn(4, 6).t()
    assert utils.prepare_input_tensors_for_wgrad_compute(flat, flat)[0].is_contiguous()


def test_masks_and_activations():
    assert utils.get_default_causal_mask(3).tolist() == [[False, True, True], [False, False, True], [False] * 3]
    # Two queries at the positions 2 and 3, which see one position before themselves.
    window = utils.get_sliding_window_causal_mask(2, 4, (1, 0))
    assert window.tolist() == [[True, False, False, True], [True, True, False, False]]
    scores = torch.ones(1, 2)
    assert utils.attention_mask_func(scores, torch.tensor([[True, False]])) is scores
    assert scores.tolist() == [[-10000.0, 1.0]]
    x = torch.linspace(-3, 3, 7, dtype=torch.float64)
    assert_close_to(utils.erf_gelu(x), F.gelu(x), rtol_of_norm=1e-12)
    for tanh_gelu in (utils.gelu_impl, utils.openai_gelu):
        assert_close_to(tanh_gelu(x), F.gelu(x, approximate="tanh"), rtol_of_norm=1e-12)
    layer = utils.get_linear_layer(3, 2, torch.nn.init.ones_)
    assert (layer.weight.tolist(), layer.bias.tolist()) == ([[1.0] * 3] * 2, [0.0] * 2)
    windowed = [
        utils.is_layer_window_attention((4, 0), frequency, 3) for frequency in (None, 3, 2, [1, 0, 1], [1, 1, 0])
    ]
    assert windowed == [True, False, True, True, False]
    assert not utils.is_layer_window_attention(None, 2, 3)


@pytest.mark.ranks(2)
def test_the_entries_of_a_module_of_a_program(group):
    parallel_state.initialize_model_parallel(2)
    state = {"weight": torch.ones(3, 2), "bias": torch.ones(3), "a._extra_state": None}
    entries = utils.make_sharded_tensors_for_checkpoint(state, "m.", {"weight": 0}, ((0, 1, 4),))
    assert {key: entry.global_shape for key, entry in entries.items()} == {"m.weight": (4, 6, 2), "m.bias": (4, 3)}
    assert [entry.is_replica for entry in entries.values()] == [False, group.rank() > 0]
    with pytest.raises(ConfigError, match=r"ShardedObject 'm\.a\._extra_state' would be stored pickled"):
        utils.make_sharded_tensors_for_checkpoint({"a._extra_state": object()}, "m.")
    entries = utils.sharded_state_dict_default(torch.nn.Linear(2, 3), "n.")
    assert {key: entry.global_shape for key, entry in entries.items()} == {"n.weight": (3, 2), "n.bias": (3,)}
    metadata = {"dp_cp_group": group}
    assert utils.ensure_metadata_has_dp_cp_group(metadata) is metadata
    found = utils.ensure_metadata_has_dp_cp_group(None)["dp_cp_group"]
    assert found is parallel_state.get_data_parallel_group(with_context_parallel=True)
