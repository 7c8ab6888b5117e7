"""Functions for a program's own layers that predict further tokens, and for its own routers."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from shardwise.core.errors import ConfigError
from shardwise.megatron.core.transformer.multi_token_prediction import (
    MoEAuxLossAutoScaler,
    MTPLossAutoScaler,
    MTPLossLoggingHelper,
    compute_routing_scores_for_aux_loss,
    group_limited_topk,
    roll_tensor,
    topk_routing_with_score_function,
)
from shardwise.megatron.packed_seq_params import PackedSeqParams


def test_each_sequence_moves_to_the_front():
    rolled, total = roll_tensor(torch.tensor([[1, 2, 3], [4, 5, 6]]))
    assert (rolled.tolist(), total) == ([[2, 3, 0], [5, 6, 0]], 16)
    rolled, _ = roll_tensor(torch.tensor([[1], [2]]), dims=0)
    assert rolled.tolist() == [[2], [0]]
    packed = PackedSeqParams(cu_seqlens_q=torch.tensor([0, 2, 5]))
    rolled, _ = roll_tensor(torch.arange(1, 6).view(1, 5), packed_seq_params=packed)
    assert rolled.tolist() == [[2, 0, 4, 5, 0]]
    with pytest.raises(ConfigError, match="got shifts 1"):
        roll_tensor(rolled, shifts=1)


def test_a_loss_rides_on_an_output():
    output, loss = torch.ones(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    for kind in (MTPLossAutoScaler, MoEAuxLossAutoScaler):
        result = kind.apply(output, 5 * loss)
        assert result.tolist() == [1.0] * 3
        result.sum().backward()
    MTPLossAutoScaler.set_loss_scale(torch.tensor(0.5))
    try:
        MTPLossAutoScaler.apply(output, loss).sum().backward()
        MoEAuxLossAutoScaler.apply(output, loss).sum().backward()
    finally:
        MTPLossAutoScaler.set_loss_scale(1.0)
    assert output.grad.tolist() == [4.0] * 3
    assert loss.grad == 5 + 5 + 0.5 + 1


@pytest.mark.ranks(2)
def test_losses_of_layers_are_logged(group):
    written = []
    for layer in (0, 1, 1, None):
        MTPLossLoggingHelper.save_loss_to_tracker(torch.tensor(1.0 + group.rank()), layer, 2, avg_group=group)
    writer = SimpleNamespace(add_scalar=lambda name, value, step: written.append((name, float(value), step)))
    total = {"mtp_1 loss": torch.tensor(1.0)}
    MTPLossLoggingHelper.track_mtp_metrics(0.5, 7, writer, total_loss_dict=total)
    assert written == [("mtp_1 loss", 0.75, 7), ("mtp_2 loss", 1.5, 7)]
    assert total["mtp_1 loss"] == 1.75
    assert MTPLossLoggingHelper.tracker == {}
    MTPLossLoggingHelper.save_loss_to_tracker(torch.tensor(1.0), 0, 1, reduce_group=dist.group.WORLD)
    MTPLossLoggingHelper.reduce_loss_in_tracker()
    assert MTPLossLoggingHelper.tracker["values"].tolist() == [2.0]
    MTPLossLoggingHelper.clean_loss_in_tracker()


def test_scores_of_experts():
    scores = torch.tensor([[0.1, 0.2, 0.5, 0.0, 0.3, 0.31]])
    values, experts = group_limited_topk(scores, 2, 1, 6, 3, 1)
    assert (values.tolist(), experts.tolist()) == (scores[0, [5, 4]].view(1, 2).tolist(), [[5, 4]])
    logits = torch.randn(4, 5)
    for function, dense in (("softmax", logits.softmax(-1)), ("sigmoid", logits.sigmoid())):
        padding = torch.tensor([False, True, False, False])
        chosen, found = compute_routing_scores_for_aux_loss(logits, 2, function, padding_mask=padding)
        expected = dense / dense.sum(-1, keepdim=True)
        torch.testing.assert_close(found, expected * ~padding[:, None])
        assert chosen.sum(-1).tolist() == [2, 0, 2, 2]
    with pytest.raises(ConfigError, match="score_function is 'relu'"):
        compute_routing_scores_for_aux_loss(logits, 2, "relu")


@pytest.mark.parametrize("groups", [{}, {"num_groups": 3, "group_topk": 1}], ids=["", "groups"])
def test_weights_of_chosen_experts(groups):
    logits = torch.randn(4, 6)
    for options, scores in (
        ({}, logits),
        ({"use_pre_softmax": True}, logits.softmax(-1)),
        ({"score_function": "sigmoid"}, logits.sigmoid()),
        ({"score_function": "sigmoid", "expert_bias": torch.arange(6.0)}, logits.sigmoid()),
    ):
        considered = scores + options.get("expert_bias", 0)
        if groups:
            best = considered.view(4, 3, 2).sum(-1).argmax(-1)
            chosen = torch.stack([2 * best, 2 * best + 1], 1)
        else:
            chosen = considered.topk(2).indices
        weights = scores.gather(1, chosen)
        if options.get("score_function") == "sigmoid":
            weights = weights / weights.sum(-1, keepdim=True)
        elif not options:
            weights = weights.softmax(-1)
        found, is_chosen = topk_routing_with_score_function(logits, 2, scaling_factor=2.0, **groups, **options)
        torch.testing.assert_close(found, torch.zeros(4, 6).scatter(1, chosen, 2 * weights))
        assert is_chosen.nonzero()[:, 1].view(4, 2).tolist() == chosen.sort().values.tolist()
    with pytest.raises(ConfigError, match="score_function is 'relu'"):
        topk_routing_with_score_function(logits, 2, score_function="relu")
