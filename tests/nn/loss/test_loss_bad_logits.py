"""What is wrong with logits or targets is told alike on every rank, with rank and position."""

from functools import partial

import pytest
import torch
from dense_formulas import dense_loss, shard_of
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import tensor_parallel
from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.errors import DesyncError, DivergenceError
from shardwise.core.topology import Topology
from shardwise.exact import sum_in_parts
from shardwise.nn.loss import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy


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


def linear(shard, target, *, group, plan="auto", **options):
    """Output layer and loss in one: the weight is the logits, and each token picks its own column of it.

    What is -inf is so for all tokens, by the bias.
    """
    eye = torch.eye(target.numel(), dtype=shard.dtype).view(*target.shape, -1)
    logits = shard.reshape(-1, shard.size(-1))
    bias = logits[0].masked_fill(logits[0] != -torch.inf, 0.0)
    weight = logits.masked_fill(logits == -torch.inf, 0.0).t()
    return vocab_parallel_linear_cross_entropy(eye, weight, target, bias=bias, group=group, plan=plan, **options)


def as_megatron(shard, target, *, group, vocab_size, **options):
    return tensor_parallel.vocab_parallel_cross_entropy(shard, target, tp_group=group, **options)


LOSSES = {
    "logits": vocab_parallel_cross_entropy,
    "linear, local logits": partial(linear, plan="local_logits"),
    "linear, chunked": partial(linear, plan="chunked"),
    "without a size": as_megatron,
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", LOSSES)
def test_targets_that_differ_between_the_ranks_are_an_error_on_all(group, name):
    whole, last = torch.randn(2, 3, 12, dtype=torch.float64), group.size() - 1
    run = partial(LOSSES[name], shard_of(whole, group), group=group, vocab_size=12)
    same = torch.tensor([[0, 11, 5], [-100, 3, 7]])
    # Of one token: two ranks have its target, no rank, or one and another ignores it, or one alone ignores it.
    for on_first, on_last in ((0, 11), (11, 0), (0, -100), (11, -100), (-100, 11), (-100, 0)):
        target = same.clone()
        target[1, 2] = on_first if group.rank() < last else on_last
        message = rf"different targets: at token \[1, 2\] rank 0 has {on_first}, rank {last} has {on_last}; ranks that"
        for options in ({}, {"check_finite": True, "validate": False}, {"label_smoothing": 0.1, "reduction": "mean"}):
            with pytest.raises(DesyncError, match=message):
                run(target, **options)
    assert run(same).isfinite().all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", LOSSES)
def test_only_targets_that_no_rank_or_several_have_are_compared(group, name):
    whole, target = torch.randn(4, 12, dtype=torch.float64), torch.tensor([0, -100, 11, 4])
    with CollectiveCounter() as counter:
        loss = LOSSES[name](shard_of(whole, group), target, group=group, vocab_size=12)
    assert [launch.name for launch in counter.launches] == ["all_gather"]
    assert loss.tolist() == pytest.approx(dense_loss(whole, target).tolist())
    # A target that is forbidden costs infinitely much, on all ranks alike.
    whole[:, 11] = -torch.inf
    logits = shard_of(whole, group)
    with CollectiveCounter() as counter:
        loss = LOSSES[name](logits, target, group=group, vocab_size=12)
    assert [launch.name for launch in counter.launches] == ["all_gather"] * 2
    assert loss.tolist() == pytest.approx(dense_loss(whole, target).tolist())
    assert loss[2].item() == torch.inf


@pytest.mark.ranks(2)
def test_exact_parts_compare_their_targets_too(group):
    group = Topology.create(tp=2).group("tp")
    sum_in_parts(group, 4)
    whole, target = torch.randn(3, 12), torch.tensor([0, -100, 11])
    logits = shard_of(whole, group)
    loss = vocab_parallel_cross_entropy(logits, target, group=group, vocab_size=12)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx(dense_loss(whole, target).tolist(), rel=1e-5)
    assert logits.grad[1].abs().sum().item() == 0.0
    target[0] += 6 * group.rank()
    with pytest.raises(DesyncError, match=r"different targets: at token \[0\] rank 0 has 0, rank 1 has 6"):
        vocab_parallel_cross_entropy(logits, target, group=group, vocab_size=12)
    whole[2, 7] = torch.nan
    with pytest.raises(DivergenceError, match=r"at token \[2\] the logit of id 7 on rank 1 is nan"):
        check(whole, torch.tensor([0, -100, 11]), group)


class Looks(TorchDispatchMode):
    """Counts how often the host reads a number of a tensor."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **kwargs or {})


@pytest.mark.ranks(2)
def test_logits_and_targets_are_looked_at_together(group):
    """On a GPU each look is a wait."""
    whole, target = torch.randn(4, 10), torch.tensor([9, 8, -100, 0])
    for check_finite, looks in ((True, 1), (False, 0)):
        with Looks() as counted:
            vocab_parallel_cross_entropy(
                shard_of(whole, group), target, group=group, vocab_size=10, validate=False, check_finite=check_finite
            )
        assert counted.number == looks
