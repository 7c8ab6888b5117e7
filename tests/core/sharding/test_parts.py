"""Parts of a dimension are refused by every rank, or by none."""

import pytest

from shardwise.core.errors import ConfigError
from shardwise.core.sharding import ParamLayout, local_parts


def test_every_rank_refuses_what_one_of_them_cannot_have():
    # The bounds of the last rank's shard are among the cuts into 8 parts, those of the others are not.
    layout = ParamLayout.split((32_003,), 0, 4)
    messages = set()
    for rank in range(4):
        with pytest.raises(ConfigError, match="the largest exact_parts that works is 4") as caught:
            local_parts(layout, rank, 8, what="the vocabulary")
        messages.add(str(caught.value))
    assert len(messages) == 1
    assert [len(local_parts(layout, rank, 4, what="the vocabulary")) for rank in range(4)] == [1] * 4
