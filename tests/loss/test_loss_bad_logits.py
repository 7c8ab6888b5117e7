"""Logits that are NaN: told alike on every rank, with rank and position, when the check is on."""

import pytest
import torch
from dense_formulas import shard_of

from shardwise.communication.accounting import CollectiveCounter
from shardwise.errors import DivergenceError
from shardwise.loss import vocab_parallel_cross_entropy


def check(whole, target, group, **options):
    return vocab_parallel_cross_entropy(
        shard_of(whole, group), target, group=group, vocab_size=whole.size(-1), check_finite=True, **options
    )


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_one_bad_logit_is_told_with_rank_and_position(group, dtype, value):
    whole = torch.randn(2, 3, 10).to(dtype)
    target = torch.randint(9, (2, 3))
    whole[1, 2, 9] = value
    last = group.size() - 1
    message = rf"^at token \[1, 2\] the logit of id 9 on rank {last} is {value}; the loss is NaN"
    with pytest.raises(DivergenceError, match=message):
        check(whole, target, group)
    # The first of several.
    whole[0, 1, 0] = torch.nan
    with pytest.raises(DivergenceError, match=r"^at token \[0, 1\] the logit of id 0 on rank 0 is nan"):
        check(whole, target, group)
    # Tokens that do not count may hold anything; they have no loss and no gradient.
    target[1, 2] = target[0, 1] = -100
    logits = shard_of(whole, group)
    loss = vocab_parallel_cross_entropy(logits, target, group=group, vocab_size=10, check_finite=True)
    loss.sum().backward()
    assert bool(loss.isfinite().all())
    assert bool(logits.grad.isfinite().all())
    assert logits.grad[1, 2].abs().sum().item() == 0.0


@pytest.mark.ranks(2)
def test_a_bad_target_logit_is_told_too(group):
    whole, target = torch.randn(4, 10), torch.tensor([1, 7, 3, 8])
    whole[3, 8] = torch.nan
    with pytest.raises(DivergenceError, match=r"token \[3\] the logit of id 8 on rank 1 is nan"):
        check(whole, target, group)


@pytest.mark.ranks(1, 2)
def test_forbidden_ids_are_allowed_unless_all_are(group):
    whole, target = torch.randn(4, 10), torch.tensor([9, 8, 7, 6])
    whole[0, :6] = -torch.inf
    assert bool(check(whole, target, group).isfinite().all())
    whole[2] = -torch.inf
    with pytest.raises(DivergenceError, match=r"^at token \[2\] every logit is -inf"):
        check(whole, target, group)


@pytest.mark.ranks(2)
def test_the_check_costs_no_collective_and_is_off_by_default(group):
    whole, target = torch.randn(4, 10), torch.randint(10, (4,))
    with CollectiveCounter() as counter:
        check(whole, target, group)
    assert [launch.name for launch in counter.launches] == ["all_gather"]
    whole[1, 1] = torch.nan
    loss = vocab_parallel_cross_entropy(shard_of(whole, group), target, group=group, vocab_size=10)
    assert loss.isnan().tolist() == [False, True, False, False]
