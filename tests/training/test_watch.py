"""Waits over the backend and between stages are watched like those in shared memory (see also ``tests/hostile``)."""

import pytest
from training.stopped import check_stopped_rank_is_named

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("split", "place"),
    [("--parallel.tp", "all_reduce of (layer .*|the backward pass)"), ("--parallel.pp", "(receive|send|all_reduce)")],
)
def test_a_stopped_rank_over_gloo(tmp_path, split, place):
    check_stopped_rank_is_named(tmp_path, split, "2", place=place, SHARDWISE_SHARED_MEMORY="0")
