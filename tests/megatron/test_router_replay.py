"""RouterReplay: choices of a model's routers that are recorded, and replayed instead of others."""

import pytest
import torch
from harness.parity import assert_bit_equal

from shardwise import parallel_state
from shardwise.core.errors import DataError
from shardwise.megatron.config import TransformerConfig
from shardwise.megatron.core.transformer.router_replay import RouterReplay, RouterReplayAction
from shardwise.megatron.layer_specs import get_gpt_layer_local_spec
from shardwise.megatron.models.gpt import GPTModel
from shardwise.megatron.moe import TopKRouter


@pytest.mark.ranks(2)
@pytest.mark.parametrize("ep", [1, 2])
def test_recorded_choices_are_those_of_another_model_that_replays_them(group, ep):
    RouterReplay.clear_global_router_replay_instances()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ep)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=12,
        num_attention_heads=2,
        num_moe_experts=4,
        moe_router_topk=2,
        expert_model_parallel_size=ep,
        add_bias_linear=False,
        use_cpu_initialization=True,
        params_dtype=torch.float64,
        moe_enable_routing_replay=True,
    )
    torch.manual_seed(3)
    model = GPTModel(config, get_gpt_layer_local_spec(num_experts=4), 23, 8).eval()
    ids = torch.arange(16).view(2, 8) + group.rank()
    call = (ids, torch.arange(8), None)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    expected = model(*call)
    recorded = RouterReplay.get_recorded_data()
    assert [each.shape for each in recorded] == [(16, 2)] * 2
    with torch.no_grad():
        for layer in model.decoder.layers:
            layer.mlp.router.weight.neg_()
    other = model(*call)
    changed = RouterReplay.get_recorded_data()
    assert not torch.equal(changed[0].sort().values, recorded[0].sort().values)
    RouterReplay.set_replay_data(recorded)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    assert not torch.equal(model(*call), other)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
    again = model(*call)
    with torch.no_grad():
        for layer in model.decoder.layers:
            layer.mlp.router.weight.neg_()
    assert not torch.equal(again, expected)
    RouterReplay.set_replay_data(recorded)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    assert_bit_equal(model(*call), expected)
    RouterReplay.clear_global_router_replay_action()
    assert_bit_equal(model(*call), expected)
    RouterReplay.set_replay_data([each[:3] for each in recorded])
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    with pytest.raises(DataError, match=r"shape \[3, 2\] of the experts, and the tokens need shape \[16, 2\]"):
        model(*call)
    with pytest.raises(DataError, match="1 tensors for 2 routers"):
        RouterReplay.set_replay_data(recorded[:1])
    RouterReplay.clear_global_indices()
    assert RouterReplay.get_recorded_data() == [None, None]


@pytest.mark.ranks(1)
def test_a_router_by_its_logits_and_scores(group):
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=1, hidden_size=6, num_attention_heads=2, num_moe_experts=5, moe_router_topk=2, add_bias_linear=False
    )
    router = TopKRouter(config)
    assert router.router_replay is None
    tokens = torch.randn(3, 4, 6)
    for actual, expected in zip(router.routing(tokens @ router.weight.t()), router(tokens), strict=True):
        torch.testing.assert_close(actual, expected)
    replay = RouterReplay()
    scores = torch.rand(7, 5)
    replay.set_router_replay_action(RouterReplayAction.RECORD)
    values, chosen = replay.get_replay_topk(scores, 2)
    assert_bit_equal(values, scores.topk(2).values)
    assert replay.get_recorded_indices() is chosen
    replay.set_target_indices(torch.ones(7, 2, dtype=torch.int32))
    replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    values, chosen = replay.get_replay_topk(scores, 2, default_compute_topk=lambda scores, topk, *_: scores.topk(topk))
    assert chosen.unique().tolist() == [1]
    assert_bit_equal(values, scores[:, 1:2].expand(7, 2).contiguous())
    replay.clear_router_replay_action()
    assert_bit_equal(replay.get_replay_topk(scores, 2)[1], scores.topk(2).indices)
