"""The loss over a split vocabulary against the dense formula, written out in fp64."""

import pytest
import torch
import torch.nn.functional as F
from dense_formulas import assert_equals_dense, dense_loss, shard_of
from harness.parity import assert_bit_equal, assert_close_to, assert_unmodified, gather_all

from shardwise import parallel_state
from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.errors import ConfigError, ShardingError, VocabularyError
from shardwise.core.sharding import balanced_range, balanced_sizes
from shardwise.kernels import loss_reference
from shardwise.nn.loss.cross_entropy import vocab_parallel_cross_entropy
from shardwise.nn.loss.vocabulary import vocab_ranges
from shardwise.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy as public_cross_entropy


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("vocab_size", [101, 64, 3, 2])
def test_fp64_equals_dense(group, vocab_size, smoothing):
    # With 3 or 2 ids some of four ranks hold none.
    whole = 3 * torch.randn(5, 3, vocab_size, dtype=torch.float64)
    target = torch.randint(vocab_size, (5, 3))
    loss = assert_equals_dense(group, whole, target, label_smoothing=smoothing)
    for other in gather_all(loss, group):
        assert_bit_equal(other, loss, name="the loss of another rank")


@pytest.mark.ranks(1, 2, 3)
def test_ignored_targets_cost_nothing(group):
    whole = torch.randn(4, 6, 11, dtype=torch.float64)
    target = torch.randint(11, (4, 6))
    target[0, :3] = -100
    target[3] = -100
    loss = assert_equals_dense(group, whole, target, label_smoothing=0.2)
    assert loss[0, :3].tolist() == [0.0] * 3
    assert loss[3].tolist() == [0.0] * 6
    # One of the vocabulary's own ids may be ignored too, and every one of them.
    assert_equals_dense(group, whole, torch.randint(11, (4, 6)), ignore_index=7)
    assert assert_equals_dense(group, whole, torch.full((4, 6), -1), ignore_index=-1).abs().sum() == 0


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("smoothing", [0.05, 0.3])
def test_smoothing_is_pytorch_s_over_the_whole_vocabulary(group, smoothing):
    k = 13
    whole, target = torch.randn(6, k, dtype=torch.float64), torch.randint(k, (6,))
    # PyTorch spreads its share over all K ids, the target included: a of ours is a·K/(K-1) of theirs.
    expected = F.cross_entropy(whole, target, reduction="none", label_smoothing=smoothing * k / (k - 1))
    loss = assert_equals_dense(group, whole, target, label_smoothing=smoothing)
    assert_close_to(loss, expected, rtol_of_norm=1e-12)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_padding_takes_no_probability(group, smoothing):
    true, padded = 9, 16
    whole = torch.randn(5, padded, dtype=torch.float64)
    # Whatever is in the padding.
    whole[:, true:] = torch.tensor([50.0, -torch.inf, 1e300, 0.0, torch.nan, torch.inf, 7.0])
    target = torch.randint(true, (5,))
    reference = whole[:, :true].clone().requires_grad_()
    expected = dense_loss(reference, target, label_smoothing=smoothing)
    expected.sum().backward()
    for overwrite in (False, True):
        logits = shard_of(whole, group)
        loss = vocab_parallel_cross_entropy(
            logits,
            target,
            group=group,
            label_smoothing=smoothing,
            vocab_size=true,
            padded_vocab_size=padded,
            inplace_=overwrite,
        )
        loss.sum().backward()
        assert_close_to(loss.detach(), expected.detach(), rtol_of_norm=1e-12)
        start, stop = balanced_range(padded, group.size(), group.rank())
        gradient = F.pad(reference.grad, (0, padded - true))[:, start:stop]
        assert_close_to(logits.grad, gradient, rtol_of_norm=1e-11, name="gradient")
    if group.size() > 2:
        with pytest.raises(VocabularyError, match=r"target 9 at position \[0\] is outside the vocabulary of 9"):
            vocab_parallel_cross_entropy(logits, target * 0 + 9, group=group, vocab_size=9, padded_vocab_size=padded)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_logits_of_any_size(group, dtype):
    k = 101
    rtol = 1e-12 if dtype == torch.float64 else 2e-6
    target = torch.randint(k, (8,))
    target[0], target[-1] = 0, k - 1
    spread = torch.randn(8, k, dtype=dtype)
    for level in (1e4, -1e4):
        # Far from zero the loss must not lose the digits that the largest logit takes: 1e4 + 5 - 1e4.
        assert_equals_dense(group, level + spread, target, rtol=rtol)
        assert_equals_dense(group, level + spread, target, rtol=rtol, label_smoothing=0.1)
    # Far from each other, within a rank and between ranks.
    assert_equals_dense(group, torch.where(torch.rand(8, k) < 0.5, -1e4, 1e4).to(dtype) + spread, target, rtol=rtol)
    assert_equals_dense(group, torch.linspace(-1e4, 1e4, k, dtype=dtype).expand(8, k), target, rtol=rtol)
    # The target alone far above: no loss at all, and no gradient.
    confident = spread.scatter(1, target[:, None], 1e4)
    logits = shard_of(confident, group)
    loss = vocab_parallel_cross_entropy(logits, target, group=group, vocab_size=k)
    loss.sum().backward()
    assert loss.tolist() == [0.0] * 8
    assert float(logits.grad.abs().max()) == 0.0


@pytest.mark.ranks(1, 2, 3)
def test_rows_of_equal_logits(group):
    k = 10
    for value in (0.0, 1e4, -3e38):
        whole = torch.full((4, k), value)
        loss = assert_equals_dense(group, whole, torch.tensor([0, 3, 6, 9]), rtol=1e-6)
        assert_close_to(loss, torch.full((4,), 10.0).log(), rtol_of_norm=1e-6)


@pytest.mark.ranks(1, 2, 3)
def test_forbidden_ids_are_minus_infinity(group):
    whole = torch.randn(4, 12, dtype=torch.float64)
    # On two and three ranks a whole shard of the first row is forbidden.
    whole[0, :6] = -torch.inf
    whole[1, ::2] = -torch.inf
    target = torch.tensor([7, 3, 0, 11])
    expected = F.cross_entropy(whole, target, reduction="none")
    logits = shard_of(whole, group)
    loss = vocab_parallel_cross_entropy(logits, target, group=group, vocab_size=12)
    loss.sum().backward()
    assert_close_to(loss.detach(), expected, rtol_of_norm=1e-12)
    reference = whole.clone().requires_grad_()
    F.cross_entropy(reference, target, reduction="sum").backward()
    start, stop = balanced_range(12, group.size(), group.rank())
    assert_close_to(logits.grad, reference.grad[:, start:stop].contiguous(), rtol_of_norm=1e-12)
    # A target that cannot be costs infinitely much, on every rank.
    loss = vocab_parallel_cross_entropy(logits.detach(), torch.tensor([0, 3, 0, 11]), group=group, vocab_size=12)
    assert loss[0].item() == torch.inf


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(
    ("dtype", "rtol"),
    # The loss is computed in fp32 whatever the logits are; of bf16 and fp16 logits, the given values are the truth.
    [(torch.float32, 1e-6), (torch.bfloat16, 1e-6), (torch.float16, 1e-6)],
    ids=["fp32", "bf16", "fp16"],
)
@pytest.mark.parametrize("overwrite", [False, True], ids=["", "overwrite"])
def test_lower_precisions(group, dtype, rtol, overwrite):
    whole = (4 * torch.randn(7, 2, 101)).to(dtype)
    target = torch.randint(101, (7, 2))
    for smoothing in (0.0, 0.1):
        assert_equals_dense(group, whole, target, rtol=rtol, label_smoothing=smoothing, inplace_=overwrite)


@pytest.mark.ranks(2)
def test_given_up_logits_become_the_gradient(group):
    for dtype in (torch.float64, torch.bfloat16):
        logits = shard_of(torch.randn(3, 8).to(dtype), group)
        target = torch.randint(8, (3,))
        loss = vocab_parallel_cross_entropy(logits * 1, target, group=group, vocab_size=8)
        (plain,) = torch.autograd.grad(loss.sum(), logits)
        given_up = logits * 1
        loss = vocab_parallel_cross_entropy(given_up, target, group=group, vocab_size=8, inplace_=True)
        (gradient,) = torch.autograd.grad(loss.sum(), given_up, retain_graph=True)
        assert gradient.data_ptr() == given_up.data_ptr()
        assert_bit_equal(gradient, plain)
        # They are gone, so a second backward must not take them for logits.
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss.sum(), given_up)


@pytest.mark.ranks(2)
def test_a_kept_graph_can_be_used_again(group):
    logits = shard_of(torch.randn(3, 8), group)
    loss = vocab_parallel_cross_entropy(logits, torch.randint(8, (3,)), group=group, vocab_size=8).sum()
    (first,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (second,) = torch.autograd.grad(loss, logits, retain_graph=True)
    assert_bit_equal(first, second)
    gradient = torch.autograd.grad(loss**2, logits, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(("dtype", "word"), [(torch.float32, 4), (torch.bfloat16, 4), (torch.float64, 8)], ids=str)
@pytest.mark.parametrize(("smoothing", "numbers"), [(0.0, 3), (0.1, 4)])
def test_one_collective_of_a_few_bytes(group, dtype, word, smoothing, numbers):
    tokens = 35
    logits = shard_of(torch.randn(5, 7, 50).to(dtype), group)
    target = torch.randint(50, (5, 7))
    with CollectiveCounter() as forward:
        loss = vocab_parallel_cross_entropy(logits, target, group=group, label_smoothing=smoothing, vocab_size=50)
    assert [launch.name for launch in forward.launches] == ["all_gather"]
    assert forward.num_bytes == tokens * numbers * word
    with CollectiveCounter() as backward:
        loss.sum().backward()
    assert backward.launches == []


@pytest.mark.ranks(1, 2)
def test_rows_in_many_blocks(group, monkeypatch):
    # Blocks of 1, 2, 3 ... rows of this rank's columns.
    whole, target = torch.randn(11, 21, dtype=torch.float64), torch.randint(21, (11,))
    for elements in (1, 25, 33, 64, 1 << 18):
        monkeypatch.setattr(loss_reference, "BLOCK_ELEMENTS", elements)
        assert_equals_dense(group, whole, target, label_smoothing=0.1)
        assert_equals_dense(group, whole.bfloat16(), target, rtol=1e-6)


@pytest.mark.ranks(2)
def test_logits_of_any_strides_and_shape(group):
    target = torch.randint(9, (4, 3))
    sizes = balanced_sizes(9, 2)
    mine = slice(sum(sizes[: group.rank()]), sum(sizes[: group.rank() + 1]))
    whole = torch.randn(4, 3, 9, dtype=torch.float64)
    expected = dense_loss(whole, target)
    reference = whole.clone().requires_grad_()
    dense_loss(reference, target).sum().backward()
    local = whole[..., mine]
    for logits in (
        local,
        local.transpose(0, 1).contiguous().transpose(0, 1),
        local.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    ):
        for overwrite in (False, True):
            leaf = logits.clone(memory_format=torch.preserve_format).requires_grad_()
            loss = vocab_parallel_cross_entropy(leaf, target, group=group, vocab_size=9, inplace_=overwrite)
            loss.sum().backward()
            assert_close_to(loss.detach(), expected, rtol_of_norm=1e-12)
            assert_close_to(leaf.grad, reference.grad[..., mine].contiguous(), rtol_of_norm=1e-12)
    # One token, and none.
    one = vocab_parallel_cross_entropy(local[0, 0], target[0, 0], group=group, vocab_size=9)
    assert_close_to(one, expected[0, 0], rtol_of_norm=1e-12)
    none = local[:0].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(none, target[:0], group=group, vocab_size=9)
    loss.sum().backward()
    assert loss.shape == (0, 3)
    assert none.grad.shape == none.shape


@pytest.mark.ranks(1, 2, 3)
def test_targets_outside_are_told_on_every_rank(group):
    logits = shard_of(torch.randn(2, 3, 9), group)
    target = torch.tensor([[0, 1, 2], [3, 999, 8]])
    with pytest.raises(VocabularyError, match=r"target 999 at position \[1, 1\] is outside the vocabulary of 9 ids"):
        vocab_parallel_cross_entropy(logits, target, group=group, vocab_size=9)
    target[1, 1] = -100
    with pytest.raises(VocabularyError, match=r"target -100 .*and is not ignore_index -1"):
        vocab_parallel_cross_entropy(logits, target, group=group, vocab_size=9, ignore_index=-1)
    # Unchecked, such a target is no silent number.
    target[1, 1] = 9
    loss = vocab_parallel_cross_entropy(logits, target, group=group, vocab_size=9, validate=False)
    assert loss[1, 1].item() == torch.inf


@pytest.mark.ranks(3)
def test_shapes_that_do_not_fit_are_told(group):
    rank = group.rank()
    logits, target = torch.randn(4, 3), torch.randint(9, (4,))
    with pytest.raises(ShardingError, match=r"logits \[4, 3\] and target \[4, 1\] must agree"):
        vocab_parallel_cross_entropy(logits, target.view(4, 1), group=group, vocab_size=9)
    message = rf"rank {rank} of 3 has 3 logits .* vocabulary of 15 is 5; pass vocab_size"
    with pytest.raises(ShardingError, match=message):
        vocab_parallel_cross_entropy(logits, target, group=group, vocab_size=15)
    with pytest.raises(ShardingError, match="padded_vocab_size"):
        vocab_parallel_cross_entropy(logits, target, group=group, vocab_size=12, padded_vocab_size=9)
    for smoothing in (-0.1, 1.0, float("nan")):
        with pytest.raises(ConfigError, match=f"label_smoothing is {smoothing}; it must be"):
            vocab_parallel_cross_entropy(logits, target, group=group, vocab_size=9, label_smoothing=smoothing)
    one = torch.randn(4, int(rank == 0))
    with pytest.raises(ConfigError, match=r"label_smoothing is 0.1 over 1 ids; .*at least 2 ids"):
        vocab_parallel_cross_entropy(one, target * 0, group=group, label_smoothing=0.1, vocab_size=1)


@pytest.mark.ranks(3)
def test_ranges_of_the_vocabulary(group):
    sizes = [34, 34, 33]
    assert vocab_ranges(sizes[group.rank()], 101, None, group) == [(0, 34), (34, 68), (68, 101)]
    # Padded to 120, of which the last rank holds the rest.
    assert vocab_ranges(40, 81, 120, group) == [(0, 40), (40, 80), (80, 81)]
    assert vocab_ranges(40, 80, 120, group) == [(0, 40), (40, 80), (80, 80)]
    with pytest.raises(ConfigError, match="vocab_size is None; pass the number of ids of the whole vocabulary"):
        vocab_ranges(40, None, None, group)


@pytest.mark.ranks(2)
def test_the_public_door(group):
    whole, target = torch.randn(3, 2, 10), torch.randint(10, (3, 2))
    logits = shard_of(whole, group)
    expected = vocab_parallel_cross_entropy(logits, target, group=group, vocab_size=10, label_smoothing=0.1)
    assert_bit_equal(public_cross_entropy(logits, target, 0.1, group), expected)
    parallel_state.initialize_model_parallel(2)
    with assert_unmodified(logits):
        loss = public_cross_entropy(logits, target, 0.1, vocab_size=10, ignore_index=-1, padded_vocab_size=10)
        loss.sum().backward()
    assert_bit_equal(loss.detach(), expected.detach())
    with pytest.raises(VocabularyError, match="target 10"):
        public_cross_entropy(logits, target * 0 + 10)
