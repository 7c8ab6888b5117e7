"""The exact norm is the same whichever data-parallel rank has which elements, and that of the whole gradient."""

import itertools
import math

import pytest
import torch

from shardwise.core.communication.trees import sum_in_parts
from shardwise.core.sharding import ParamLayout
from shardwise.core.topology import Topology
from shardwise.training.gradients import Division
from shardwise.training.optimizer.exact_grad_norm import exact_squares

LAYOUTS = (
    ParamLayout.split((96, 1000), 0, 1, stride=2),
    ParamLayout.split((300, 137), 1, 1),
    ParamLayout.replicated((5000,), 1),
    ParamLayout.split((8,), 0, 1),
)


@pytest.mark.ranks(4)
def test_whoever_has_which_elements(group):
    alone = Topology.create(tp=1).group("tp")
    sum_in_parts(alone, 8)
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(layout.global_shape, generator=generator) for layout in LAYOUTS]
    options = {"group": alone, "pp_group": None, "number": 8}
    whole = exact_squares([(x, layout, None) for x, layout in zip(gradients, LAYOUTS, strict=True)], **options)
    squares = torch.cat([x.double().square().flatten() for x in gradients]).tolist()
    assert whole == pytest.approx(math.fsum(squares), rel=1e-15)
    for cuts in range(2):
        edges = [sorted(torch.randint(x.numel() + 1, (3,), generator=generator).tolist()) for x in gradients]
        if not cuts:
            edges = [[0, x.numel(), x.numel()] for x in gradients]
        shared = [shared_out(*given, group) for given in zip(gradients, LAYOUTS, edges, strict=True)]
        assert exact_squares(shared, **options) == whole
    # A row that is shorter than the others, by itself, whose sum depends on its order.
    layout, last = ParamLayout.replicated((4096 + 45,), 1), torch.zeros(4096 + 45)
    last[4096], last[4096 + 32 :] = 1, 2.0**-27
    expected = exact_squares([(last, layout, None)], **options)
    assert exact_squares([shared_out(last, layout, [4099, 4100, 4139], group)], **options) == expected


def shared_out(gradient, layout, edges, group):
    """What a rank has of a gradient; what is others' must not be read."""
    intervals = tuple(itertools.pairwise([0, *edges, gradient.numel()]))
    low, high = intervals[group.rank()]
    held = torch.full_like(gradient, float("nan"))
    held.view(-1)[low:high] = gradient.view(-1)[low:high]
    return held, layout, Division(group, intervals)
