"""The exact norm is the same whichever data-parallel rank has which elements, and that of the whole gradient."""

import itertools
import math

import pytest
import torch

from shardwise.communication.trees import sum_in_parts
from shardwise.data_parallel import Division
from shardwise.optimizer.exact_norm import exact_norm
from shardwise.sharding import ParamLayout
from shardwise.topology import Topology

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
    options = {"tp_group": alone, "pp_group": None}
    whole = exact_norm([(x, layout, None) for x, layout in zip(gradients, LAYOUTS, strict=True)], **options)
    squares = torch.cat([x.double().square().flatten() for x in gradients]).tolist()
    assert whole == pytest.approx(math.sqrt(math.fsum(squares)), rel=1e-15)
    for cuts in range(3):
        shared = []
        for gradient, layout in zip(gradients, LAYOUTS, strict=True):
            places = torch.randint(gradient.numel() + 1, (3,), generator=generator).sort()[0].tolist()
            edges = [0, *(places if cuts else [0, gradient.numel(), gradient.numel()]), gradient.numel()]
            low, high = edges[group.rank()], edges[group.rank() + 1]
            # What is others' must not be read.
            held = torch.full_like(gradient, float("nan"))
            held.view(-1)[low:high] = gradient.view(-1)[low:high]
            shared.append((held, layout, Division(group, tuple(itertools.pairwise(edges)))))
        assert exact_norm(shared, **options) == whole
