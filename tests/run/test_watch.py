"""Waits between stages are watched like collectives.

Collectives over the backend are cut off in ``hostile/test_hosts.py``, those in shared memory in ``test_hangs.py``.
"""

import pytest
from run.stopped import check_stopped_rank_is_named

pytestmark = pytest.mark.slow


@pytest.mark.matrix
def test_a_stopped_stage_over_gloo(tmp_path):
    check_stopped_rank_is_named(
        tmp_path, "--parallel.pp", "2", place="(receive|send|all_reduce)", SHARDWISE_SHARED_MEMORY="0"
    )
