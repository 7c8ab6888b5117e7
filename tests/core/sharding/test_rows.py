"""Which rows of a tensor each of several ranks holds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from shardwise.core.sharding.balanced import (
    first_row,
    interval_of_rows,
    intervals_of_rows,
    local_rows,
    set_group_of_rows_,
)


@pytest.mark.parametrize(("rows", "ranks"), [(7, 3), (4, 4), (5, 4), (1, 2), (0, 2), (12, 1)])
def test_rows_are_those_of_chunks(rows, ranks):
    tensor = torch.arange(rows * 6).view(rows, 3, 2)
    chunks = tensor.chunk(ranks)
    for rank in range(ranks):
        param = tensor.clone()
        set_group_of_rows_(param, SimpleNamespace(size=lambda: ranks, rank=lambda rank=rank: rank))
        start, stop = interval_of_rows(param)
        expected = chunks[rank] if rank < len(chunks) else tensor[:0]
        assert torch.equal(tensor.flatten()[start:stop], expected.flatten())
        assert first_row(param) * 6 == start
        assert intervals_of_rows(param)[rank] == (start, stop)


def test_a_plain_tensor_is_whole():
    tensor = torch.ones(3, 2)
    assert local_rows(tensor) is tensor
    assert (first_row(tensor), interval_of_rows(tensor), intervals_of_rows(tensor)) == (0, None, ((0, 6),))
