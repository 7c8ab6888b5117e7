"""Every option of the loss, and every pair of them, against the dense formula; errors within what the module states."""

import itertools

import pytest
import torch
from dense_formulas import assert_equals_dense, assert_gradient_shard, dense_loss, shard_of, transformed
from harness.parity import assert_close_to, assert_unmodified

from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.errors import ConfigError
from shardwise.core.topology import Topology
from shardwise.kernels import compiled as loss_cpu, dispatch
from shardwise.nn.loss import vocab_parallel_cross_entropy

VOCAB, PADDED = 13, 18
OPTIONS = {
    "smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 0.01},
    "softcap": {"softcap": 3.0},
    "temperature": {"temperature": 0.7},
    "ignore": {"ignore_index": 5},
    "padding": {"vocab_size": VOCAB, "padded_vocab_size": PADDED},
    "sum": {"reduction": "sum"},
    "mean": {"reduction": "mean"},
    "inplace": {"inplace_": True},
    "finite": {"check_finite": True},
}


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("first", OPTIONS)
def test_an_option_alone_and_with_each_other(group, first):
    target = torch.randint(VOCAB, (4, 2))
    target[0, 0], target[1, 1] = 5, -100
    for second in OPTIONS:
        options = OPTIONS[first] | OPTIONS[second]
        width = options.get("padded_vocab_size", VOCAB)
        whole = 2 * torch.randn(4, 2, width, dtype=torch.float64)
        # With an ignore_index of its own, -100 would be outside the vocabulary.
        chosen = target if "ignore_index" not in options else target.where(target != -100, 3)
        assert_equals_dense(group, whole, chosen, **options)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_all_options_together(group, reduction):
    options = {name: value for option in OPTIONS.values() for name, value in option.items()}
    target = torch.tensor([5, 0, 12, 7, 5, 1])
    for level in (0.0, 1e4, -1e4):
        whole = level + torch.randn(6, PADDED, dtype=torch.float64)
        # Far beyond the cap the logits have no gradient left, and the dense formula's is rounding.
        capless = options | ({"softcap": 2e4} if level else {})
        assert_equals_dense(
            group, whole, target, **(capless | {"reduction": reduction}), rtol=1e-11 if level else 1e-12
        )
    equal = torch.full((6, PADDED), 3.0, dtype=torch.float64)
    assert_equals_dense(group, equal, target, **(options | {"reduction": reduction}))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("compiled", [False, True], ids=["reference", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_errors_are_within_what_is_stated(group, dtype, compiled, monkeypatch):
    """The module's bounds, element by element; logits are taken as they are given, bf16 ones too."""
    if compiled:
        if loss_cpu.why_not("loss_cpu.c", dtype) is not None:
            pytest.skip(loss_cpu.why_not("loss_cpu.c", dtype))
        monkeypatch.setattr(dispatch.LOSS_CPU, "min_size", 1)
    u, k = 2.0**-24, 700
    target = torch.randint(k, (16,))
    for level, spread in itertools.product((0.0, 1e4, -1e4), (0.0, 1.0, 20.0)):
        whole = (level + spread * torch.randn(16, k)).to(dtype)
        for options in ({}, {"label_smoothing": 0.1}, {"temperature": 0.7}, {"softcap": 30.0}, {"z_loss": 1e-4}):
            expected = dense_loss(whole.double(), target, **options)
            logits = shard_of(whole, group)
            loss = vocab_parallel_cross_entropy(logits, target, group=group, vocab_size=k, **options).detach().double()
            y = transformed(whole.double(), options.get("softcap"), options.get("temperature", 1.0))
            largest = y.abs().amax(dim=1)
            bound = 10 * u * (1 + expected)
            if "temperature" in options or "softcap" in options:
                bound += 2 * u * largest
            if "z_loss" in options:
                bound += options["z_loss"] * 6 * u * largest**2
            excess = ((loss - expected).abs() / bound).amax()
            assert float(excess) <= 1.0, f"{options} at {level} with spread {spread}: {float(excess):.2f} of the bound"


@pytest.mark.ranks(4)
def test_the_mean_over_a_data_parallel_batch(group):
    """Shares of ranks add up to the mean over all their tokens, however unevenly these are ignored."""
    topology = Topology.create(tp=2)
    tp, dp = topology.group("tp"), topology.group("dp")
    whole = torch.randn(2, 5, 9, dtype=torch.float64)
    target = torch.randint(9, (2, 5))
    target[0, 1:] = -100
    reference = whole.clone().requires_grad_()
    expected = dense_loss(reference, target, reduction="mean")
    expected.backward()

    logits = shard_of(whole[dp.rank()], tp)
    with CollectiveCounter() as counter:
        share = vocab_parallel_cross_entropy(
            logits, target[dp.rank()], group=tp, vocab_size=9, reduction="mean", data_parallel_group=dp
        )
        share.backward()
    assert [(launch.name, launch.num_bytes) for launch in counter.launches] == [
        ("all_gather", 5 * 3 * 8),
        ("all_reduce", 8),
    ]
    total = share.detach().clone()
    torch.distributed.all_reduce(total, group=dp)
    assert_close_to(total, expected.detach(), rtol_of_norm=1e-12)
    assert_gradient_shard(logits.grad, reference.grad[dp.rank()], tp, 1e-12)
    # A rank whose tokens are all ignored has its share, 0, and no warning.
    target[0] = -100
    share = vocab_parallel_cross_entropy(
        logits, target[dp.rank()], group=tp, vocab_size=9, reduction="mean", data_parallel_group=dp
    )
    assert (share.item() == 0.0) == (dp.rank() == 0)
    topology.destroy()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("elements", [1, 1 << 20], ids=["compiled", "reference"])
def test_targets_of_any_integer_dtype(group, elements, monkeypatch):
    monkeypatch.setattr(dispatch.LOSS_CPU, "min_size", elements)
    whole, target = torch.randn(5, VOCAB), torch.tensor([3, -100, 12, 0, 7])
    results = []
    for dtype in (torch.int64, torch.int32, torch.int16):
        logits = shard_of(whole, group)
        loss = vocab_parallel_cross_entropy(logits, target.to(dtype), group=group, vocab_size=VOCAB, reduction="mean")
        loss.backward()
        results.append((loss.item(), logits.grad.tolist()))
    assert results[0] == results[1] == results[2]


@pytest.mark.ranks(2)
def test_a_loss_without_tokens_is_zero_and_says_so(group):
    for target in (torch.full((3,), -100), torch.empty(0, dtype=torch.long)):
        logits = torch.full((target.numel(), 4), torch.nan, requires_grad=True)
        with pytest.warns(UserWarning, match=rf"all {target.numel()} targets are -100, which is ignored") as caught:
            loss = vocab_parallel_cross_entropy(
                logits, target, group=group, vocab_size=8, reduction="mean", check_finite=True
            )
        assert len(caught) == 1
        assert loss.item() == 0.0
        loss.backward()
        # Whatever the logits of ignored tokens are.
        assert logits.grad.tolist() == torch.zeros_like(logits).tolist()
        assert vocab_parallel_cross_entropy(logits, target, group=group, vocab_size=8, reduction="sum").item() == 0.0


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0; it must be at least 0 and under 1"),
        ({"z_loss": -1e-4}, "z_loss is -0.0001; it must be at least 0 and finite"),
        ({"z_loss": float("nan")}, "z_loss is nan"),
        ({"softcap": 0.0}, "softcap is 0.0; it must be over 0 and finite"),
        ({"softcap": float("inf")}, "softcap is inf"),
        ({"temperature": -1.0}, "temperature is -1.0; it must be over 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"reduction": "average"}, "reduction is 'average'; choose one of none, mean, sum"),
    ],
)
def test_options_that_cannot_be_are_told(group, options, message):
    logits = torch.randn(3, 4)
    with assert_unmodified(logits), pytest.raises(ConfigError, match=message):
        vocab_parallel_cross_entropy(
            logits, torch.randint(8, (3,)), group=group, vocab_size=8, inplace_=True, **options
        )
