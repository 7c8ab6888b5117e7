"""In a group that sums over parts the loss has the same bits at every number of ranks, small and large."""

import pytest
import torch
from harness.parity import assert_bit_equal

from shardwise.core.errors import ConfigError
from shardwise.core.topology import Topology
from shardwise.exact import sum_in_parts
from shardwise.nn.loss.cross_entropy import vocab_parallel_cross_entropy
from shardwise.nn.loss.options import LossOptions
from shardwise.nn.loss.vocabulary import combine

PARTS = 4


def loss_and_gradient(topology, logits, target):
    group = topology.group("tp")
    sum_in_parts(group, PARTS)
    own = logits.chunk(group.size(), dim=1)[group.rank()].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(own, target, group=group, vocab_size=logits.size(1), label_smoothing=0.1)
    loss.backward(torch.linspace(0.5, 1.5, loss.numel()))
    return loss.detach(), own.grad


# With as many ranks as parts too, and with enough logits for compiled code, though no part has enough.
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("shape", [(7, 40), (40, 8192)])
def test_the_loss_and_its_gradient(group, shape):
    torch.manual_seed(0)
    logits, target = 3 * torch.randn(shape), torch.randint(shape[1], shape[:1])
    topologies = [Topology.create(tp=size) for size in (1, group.size())]
    expected, found = (loss_and_gradient(topology, logits, target) for topology in topologies)
    assert_bit_equal(found[0], expected[0], name="loss")
    own = expected[1].chunk(group.size(), dim=1)[group.rank()].contiguous()
    assert_bit_equal(found[1], own, name="gradient")
    for topology in topologies:
        topology.destroy()


@pytest.mark.ranks(2)
def test_ids_that_ranks_do_not_divide_at_parts_are_refused(group):
    topology = Topology.create(tp=2)
    with pytest.raises(ConfigError, match=r"over 42 ids is cut into 4 parts, .* \(\[\(0, 21\), \(21, 42\)\]\) are not"):
        loss_and_gradient(topology, torch.randn(7, 42), torch.zeros(7, dtype=torch.int64))
    topology.destroy()


def test_statistics_of_some_tokens_have_the_bits_of_all():
    ranges = [(first, first + 5) for first in range(0, 40, 5)]
    every = torch.randn(len(ranges), 48, 4, generator=torch.Generator().manual_seed(0)).abs()
    ignored, options = torch.zeros(48, dtype=torch.bool), LossOptions(label_smoothing=0.1)
    whole = combine(every, ranges, ignored, options)
    for start in range(0, 48, 12):
        some = combine(every[:, start : start + 12].contiguous(), ranges, ignored[:12], options)
        assert_bit_equal(some.loss, whole.loss[start : start + 12], name="loss")
