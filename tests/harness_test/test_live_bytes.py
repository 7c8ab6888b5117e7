"""``LiveBytes`` counts what is alive, saved for backward or held by the program."""

import torch
from harness.live_bytes import LiveBytes


def test_it_counts_storages_and_not_tensors():
    with LiveBytes() as made:
        x = torch.ones(1024)
        view = x[:3].view(3, 1)
    assert made.count() == 4096
    del x
    assert made.count() == 4096
    view.untyped_storage().resize_(8)
    assert made.count() == 8
    del view
    assert made.count() == 0


def test_it_sees_what_autograd_saves():
    x = torch.ones(1024, requires_grad=True)
    with LiveBytes() as made:
        y = x.exp().sum()
    # The exponential, which only the graph holds, and the sum.
    assert made.count() == 4096 + 4
    y.backward()
    assert made.count() == 4096 + 4 - 4096
    # The gradient was made outside the block.
    assert x.grad.untyped_storage().nbytes() == 4096
