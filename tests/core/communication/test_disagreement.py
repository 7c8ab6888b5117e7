"""Ranks that disagree where no shape tells: exchanged rows, ids, and what gloo would sum without a word."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from harness.parity import assert_bit_equal, assert_unmodified

from shardwise.core.communication import context, transports
from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.communication.collectives import all_reduce, all_to_all
from shardwise.core.communication.transports.channel import SLOT_BYTES
from shardwise.core.errors import DesyncError, ShardingError, VocabularyError
from shardwise.megatron.config import ModelParallelConfig
from shardwise.tensor_parallel import VocabParallelEmbedding, vocab_parallel_cross_entropy


@contextmanager
def fails_alike(error, match, group):
    """The body raises, on every rank the same, and leaves every rank in step."""
    with pytest.raises(error, match=match) as info:
        yield
    messages = [None] * group.size()
    dist.all_gather_object(messages, str(info.value), group=group)
    assert len(set(messages)) == 1


@pytest.mark.ranks(2)
def test_a_tensor_of_as_many_numbers_but_another_shape(group, monkeypatch):
    monkeypatch.setattr(transports, "channel_of", lambda _: None)
    own = dist.new_group([0, 1])
    shape = [(4, 4), (2, 8)][group.rank()]
    # What gloo does by itself, and why there is something to validate.
    assert all_reduce(torch.ones(shape), group=own).shape == shape
    context.validate_calls(own)
    with fails_alike(DesyncError, r"rank 0 has 'all_reduce \[4, 4\] float32 .*rank 1 has 'all_reduce \[2, 8\]", group):
        all_reduce(torch.ones(shape), group=own)


@pytest.mark.ranks(2)
def test_calls_are_compared_within_a_block_alone_and_not_counted(group, monkeypatch):
    monkeypatch.setattr(transports, "channel_of", lambda _: None)
    own, other = dist.new_group([0, 1]), dist.new_group([0, 1])
    shape = [(4, 4), (2, 8)][group.rank()]
    with context.validated_calls([own]):
        with fails_alike(DesyncError, "ranks disagree on the collective to be made", group):
            all_reduce(torch.ones(shape), group=own)
        with CollectiveCounter() as counter:
            all_reduce(torch.ones(3), group=own)
        assert [launch.name for launch in counter.launches] == ["all_reduce"]
        assert all_reduce(torch.ones(shape), group=other).shape == shape
    assert all_reduce(torch.ones(shape), group=own).shape == shape
    # What is compared for good stays so.
    context.validate_calls(own)
    with context.validated_calls([own]):
        pass
    with fails_alike(DesyncError, "ranks disagree on the collective to be made", group):
        all_reduce(torch.ones(shape), group=own)


@pytest.mark.ranks(3)
def test_rows_that_another_rank_does_not_expect(group):
    group = dist.new_group([0, 1, 2])
    # By gloo alone what is missing is left as it is found, and what is too much ends the process.
    context.validate_calls(group)
    sent = [[1, 2, 0], [0, 1, 1], [2, 0, 1]]
    expected = [[1, 0, 2], [3, 1, 0], [0, 1, 1]]
    me = group.rank()
    x = torch.ones(sum(sent[me]), 2)
    with fails_alike(
        DesyncError, r"rank 0 sends 2 rows to rank 1, which expects 3; input_sizes are \[\[1, 2, 0\]", group
    ):
        all_to_all(x, group=group, output_sizes=expected[me], input_sizes=sent[me])
    with fails_alike(DesyncError, "disagree", group):
        all_to_all(torch.ones(3, 2 + me // 2), group=group)


@pytest.mark.ranks(3)
def test_sizes_of_an_exchange_that_cannot_be(group):
    me = group.rank()
    x = torch.ones(4, 2)
    with pytest.raises(ShardingError, match=r"4 rows over 3 ranks: they do not divide; pass output_sizes"):
        all_to_all(x, group=group)
    for output_sizes in ([4], [-1, 1, 1], [1, 1, 1]):
        with pytest.raises(ShardingError, match=rf"all_to_all on rank {me} of 3: output_sizes .* must be 3 counts"):
            all_to_all(x, group=group, output_sizes=output_sizes, input_sizes=[int(r == me) + 1 for r in range(3)])
    with pytest.raises(ShardingError, match=r"all_to_all's rows: sizes \[1, 1, 1\] must be 3 counts"):
        all_to_all(x, group=group, output_sizes=[1, 1, 1], input_sizes=[1, 1, 1])
    with pytest.raises(ShardingError, match=r"shape \[\] has no dimension 0"):
        all_to_all(torch.tensor(1.0), group=group)


@pytest.mark.ranks(2)
def test_shared_memory_compares_rows_unasked(group):
    if transports.transport_name(group, torch.device("cpu")) != "shared memory":
        pytest.skip("without shared memory only validated calls are compared")
    me = group.rank()
    with fails_alike(DesyncError, "rank 0 sends 1 rows to rank 1, which expects 2", group):
        all_to_all(torch.ones(2), group=group, output_sizes=[[1, 1], [2, 1]][me], input_sizes=[1, 1])
    assert all_to_all(torch.full((2,), me), group=group).tolist() == [0, 1]


@pytest.mark.ranks(3)
def test_an_exchange_of_several_chunks(group):
    t, me = group.size(), group.rank()
    # Rows for some ranks fill many lanes, for others a part of one; dtype and strides vary.
    wide = SLOT_BYTES // 8 // t
    rows = [[0, 3, 1], [2, 0, 5], [1, 1, 1]]
    for dtype, width in ((torch.float64, wide // 2 + 7), (torch.bool, 3)):
        every = [(torch.arange(sum(rows[r]) * width).view(width, -1) % 251 + r).to(dtype).t() for r in range(t)]
        with assert_unmodified(*every):
            result = all_to_all(
                every[me], group=group, output_sizes=[rows[r][me] for r in range(t)], input_sizes=rows[me]
            )
        assert_bit_equal(result, torch.cat([every[r].split(rows[r])[me] for r in range(t)]))


@pytest.mark.ranks(2)
def test_an_id_that_is_wrong_on_one_rank(group):
    own = dist.new_group([0, 1])
    context.validate_calls(own)
    target = torch.tensor([0, 99 if group.rank() == 1 else 1])
    embedding = VocabParallelEmbedding(
        8, 3, init_method=torch.nn.init.ones_, config=ModelParallelConfig(), tp_group=own
    )
    with fails_alike(VocabularyError, r"target 99 at position \[1\]", group):
        vocab_parallel_cross_entropy(torch.ones(2, 4), target, tp_group=own)
    with fails_alike(VocabularyError, r"token id 99 at position \[1\]", group):
        embedding(target)
    assert embedding(torch.tensor([7])).tolist() == [[1.0] * 3]
