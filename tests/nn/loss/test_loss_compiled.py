"""The loss family under ``torch.compile(fullgraph=True)``: one graph, and the numbers of eager mode."""

import pytest
import torch
from dense_formulas import shard_of
from harness.parity import assert_close_to

from shardwise.nn.loss import (
    vocab_parallel_argmax,
    vocab_parallel_cross_entropy,
    vocab_parallel_entropy,
    vocab_parallel_kl_div,
    vocab_parallel_topk,
)

# The compiler itself does what this warning of PyTorch's warns of.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_one_graph_with_the_numbers_of_eager_mode(group):
    whole, teacher = torch.randn(2, 6, 18, dtype=torch.float64)
    target = torch.tensor([3, -100, 12, 0, 7, 7])
    options = {"group": group, "vocab_size": 13, "padded_vocab_size": 18}
    teacher = shard_of(teacher, group).detach()

    def every(logits):
        loss = vocab_parallel_cross_entropy(
            logits,
            target,
            label_smoothing=0.1,
            z_loss=1e-3,
            softcap=5.0,
            temperature=0.8,
            reduction="mean",
            inplace_=True,
            check_finite=True,
            **options,
        )
        entropy = vocab_parallel_entropy(logits, temperature=0.8, **options)
        divergence = vocab_parallel_kl_div(logits, teacher, **options)
        values, ids = vocab_parallel_topk(logits, 3, **options)
        total = loss + (entropy * 2 + divergence * 3).sum() + (values * torch.arange(3)).sum()
        return total, ids, vocab_parallel_argmax(logits, **options)

    results = []
    for function in (every, torch.compile(every, fullgraph=True, backend="aot_eager")):
        logits = shard_of(whole, group)
        total, ids, largest = function(logits)
        (gradient,) = torch.autograd.grad(total, logits)
        results.append((total.detach(), gradient, ids.double(), largest.double()))
    for compiled, eager in zip(*results, strict=True):
        assert_close_to(compiled, eager, rtol_of_norm=1e-13)
