"""Ranks that would compute with other bits are refused."""

import pytest
import torch

from shardwise.core.errors import ConfigError
from shardwise.run.exact.environment import arithmetic, check_arithmetic


def test_what_decides_is_known():
    found = arithmetic(torch.device("cpu"))
    assert found["PyTorch"] == torch.__version__
    assert found["its instructions"]


@pytest.mark.ranks(2)
def test_ranks_that_differ_are_refused(group, monkeypatch):
    check_arithmetic(torch.device("cpu"), group=group)
    if group.rank() == 1:
        monkeypatch.setenv("SHARDWISE_ONEDNN", "0")
    with pytest.raises(ConfigError, match="SHARDWISE_ONEDNN is None on rank 0 and 0 on rank 1; make them the same"):
        check_arithmetic(torch.device("cpu"), group=group)
