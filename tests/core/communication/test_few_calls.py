"""How many of our functions lie between the call of a layer and its communication."""

from __future__ import annotations

import pytest
import torch
from harness.calls import calls_until

from shardwise.nn import ColumnLinear


def is_transport(function: str) -> bool:
    file = function.partition(":")[0]
    return file.startswith("core/communication/transports/") and not file.endswith("transports/__init__.py")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("grad", [True, False])
def test_from_a_column_layer_to_the_transport(group, grad):
    layer = ColumnLinear(6, 10, group=group, sequence_parallel=True)
    input_ = torch.randn(4, 2, 6, requires_grad=grad)
    with torch.set_grad_enabled(grad):
        # What is set up once for a group is not on the way.
        layer(input_)
        called = calls_until(is_transport, lambda: layer(input_))
    assert called[0] == "nn/column.py:ColumnLinear.forward"
    assert len(called) <= 10, chr(10).join(called)
