"""Splitting tensors and vocabularies."""

import pytest
import torch
from harness.parity import assert_bit_equal, assert_unmodified

from shardwise import parallel_state
from shardwise.core.errors import ShardingError, TopologyError
from shardwise.tensor_parallel.utils import (
    VocabUtility,
    gather_split_1d_tensor,
    split_tensor_along_last_dim,
    split_tensor_into_1d_equal_chunks,
)


@pytest.mark.parametrize("n", [8, 7, 2])
def test_no_element_is_lost(n):
    tensor = torch.randn(3, n)
    for count in (1, 2, 3):
        parts = split_tensor_along_last_dim(tensor, count)
        for part, expected in zip(parts, tensor.tensor_split(count, -1), strict=True):
            assert torch.equal(part, expected)
            assert part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        assert_bit_equal(torch.cat(parts, -1), tensor)


def test_contiguous_chunks_are_copies():
    tensor = torch.randn(3, 8)
    for part in split_tensor_along_last_dim(tensor, 2, contiguous_split_chunks=True):
        assert part.is_contiguous()
        part.zero_()
    assert tensor.any()


def test_a_number_of_parts_that_cannot_be():
    with pytest.raises(ShardingError, match="cannot split 8 elements over 0 ranks"):
        split_tensor_along_last_dim(torch.randn(3, 8), 0)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("shape", [(4, 6), (5, 7), (3,), (1,), (), (0, 3)])
def test_chunks_are_equal_and_gather_to_the_whole(group, shape):
    parallel_state.initialize_model_parallel(group.size())
    whole = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)
    numel, size = whole.numel(), -(-whole.numel() // group.size())
    with assert_unmodified(whole):
        for new_buffer in (False, True):
            chunk = split_tensor_into_1d_equal_chunks(whole, new_buffer)
            assert chunk.shape == (size,)
            shares = chunk.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
            assert shares <= (not new_buffer) or numel == 0
            mine = whole.flatten()[group.rank() * size :][:size]
            assert_bit_equal(chunk[: mine.numel()], mine)
            assert not chunk[mine.numel() :].any()
            assert_bit_equal(gather_split_1d_tensor(chunk, numel=numel), whole.flatten())
            gathered = gather_split_1d_tensor(chunk, group)
            assert gathered.shape == (size * group.size(),)
            assert_bit_equal(gathered[:numel], whole.flatten())


@pytest.mark.ranks(2)
def test_chunks_of_a_tensor_that_is_not_contiguous(group):
    whole = torch.randn(4, 6).t()
    chunk = split_tensor_into_1d_equal_chunks(whole, tp_group=group)
    assert_bit_equal(gather_split_1d_tensor(chunk, group).view(6, 4), whole)
    # A chunk of any shape, as long as each rank's is of as many elements; the result is flat.
    rows = whole[3 * group.rank() : 3 * group.rank() + 3]
    assert not rows.is_contiguous()
    assert_bit_equal(gather_split_1d_tensor(rows, group), whole.flatten())
    even = torch.randn(4, 6)
    view = split_tensor_into_1d_equal_chunks(even, tp_group=group)
    assert view.untyped_storage().data_ptr() == even.untyped_storage().data_ptr()


@pytest.mark.ranks(2)
def test_chunks_that_cannot_be(group):
    with pytest.raises(TopologyError, match="no group was given"):
        split_tensor_into_1d_equal_chunks(torch.ones(4))
    with pytest.raises(ShardingError, match="a chunk of 3 elements is not one of 2 equal chunks of 8 elements"):
        gather_split_1d_tensor(torch.ones(3), group, numel=8)


@pytest.mark.parametrize(("vocab", "t"), [(64, 4), (101, 3), (50257, 8), (2, 3)])
def test_ranges_of_the_vocabulary(vocab, t):
    ranges = [VocabUtility.vocab_range_from_global_vocab_size(vocab, rank, t) for rank in range(t)]
    assert [i for first, last in ranges for i in range(first, last)] == list(range(vocab))
    assert sorted({last - first for first, last in ranges}, reverse=True)[0] <= -(-vocab // t)
    size = vocab // t
    equal = [VocabUtility.vocab_range_from_per_partition_vocab_size(size, rank, t) for rank in range(t)]
    assert equal == [(rank * size, rank * size + size) for rank in range(t)]
    with pytest.raises(ShardingError, match=f"rank {t} is not one of {t} ranks"):
        VocabUtility.vocab_range_from_global_vocab_size(vocab, t, t)
