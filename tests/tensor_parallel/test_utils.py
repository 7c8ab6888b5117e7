"""Splitting tensors and vocabularies."""

import pytest
import torch
from harness.parity import assert_bit_equal

from shardwise.errors import ShardingError
from shardwise.tensor_parallel.utils import VocabUtility, split_tensor_along_last_dim


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
