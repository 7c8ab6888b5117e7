"""Log-probabilities, entropy, divergence, argmax and top-k over a split vocabulary against PyTorch over a whole one."""

import pytest
import torch
import torch.nn.functional as F
from dense_formulas import assert_gradient_shard, shard_of, transformed
from harness.parity import assert_bit_equal, assert_close_to, assert_unmodified

from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.errors import ConfigError, ShardingError, VocabularyError
from shardwise.kernels import loss_reference
from shardwise.nn.loss import (
    vocab_parallel_argmax,
    vocab_parallel_cross_entropy,
    vocab_parallel_entropy,
    vocab_parallel_kl_div,
    vocab_parallel_log_probs,
    vocab_parallel_topk,
)

OPTIONS = [{}, {"temperature": 0.7}, {"softcap": 2.0}, {"temperature": 1.5, "softcap": 4.0}]


def dense_log_probs(logits, **options):
    return F.log_softmax(transformed(logits, **options), dim=-1)


def dense_entropy(logits, **options):
    log_p = dense_log_probs(logits, **options)
    # -inf times 0 is 0 here.
    return -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(dim=-1)


def dense_kl_div(logits, teacher, **options):
    log_p, log_q = dense_log_probs(logits, **options), dense_log_probs(teacher, **options)
    forbidden = log_q == -torch.inf
    return (log_q.exp() * (log_q.masked_fill(forbidden, 0.0) - log_p.masked_fill(forbidden, 0.0))).sum(dim=-1)


def assert_same(group, ours, dense, whole, *, rtol=1e-12, padded=None, **options):
    """``ours(*shards)`` equals ``dense(*whole)``, and so do the gradients of each argument."""
    k = whole[0].size(-1)
    references = [x.double().clone().requires_grad_() for x in whole]
    expected = dense(*references, **options)
    incoming = torch.rand(expected.shape, dtype=torch.float64)
    expected.backward(incoming)
    # Whatever is in the padding.
    shards = [shard_of(F.pad(x, (0, (padded or k) - k), value=50.0), group) for x in whole]
    with assert_unmodified(*shards):
        result = ours(*shards, group=group, vocab_size=k, padded_vocab_size=padded, **options)
        result.backward(incoming.to(result.dtype))
    assert result.dtype == torch.promote_types(whole[-1].dtype, torch.float32)
    assert_close_to(result.detach().double(), expected.detach(), rtol_of_norm=rtol, name=f"result with {options}")
    for shard, reference in zip(shards, references, strict=True):
        assert shard.grad.dtype == shard.dtype
        bound = max(rtol, 2 * torch.finfo(shard.dtype).eps) if rtol > 1e-12 else rtol
        assert_gradient_shard(shard.grad, F.pad(reference.grad, (0, (padded or k) - k)), group, bound)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("padded", [None, 18], ids=["", "padded"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equal_to_the_whole_vocabulary(group, options, padded, monkeypatch):
    # Blocks of a row or two.
    monkeypatch.setattr(loss_reference, "BLOCK_ELEMENTS", 9)
    options = options | {"padded": padded}
    whole, teacher = 3 * torch.randn(2, 4, 2, 13, dtype=torch.float64)
    ids = torch.randint(13, (4, 2))

    def log_probs(x, **k):
        return vocab_parallel_log_probs(x, ids, **k)

    def dense(x, **k):
        return dense_log_probs(x, **k).gather(-1, ids.unsqueeze(-1)).squeeze(-1)

    assert_same(group, log_probs, dense, [whole], **options)
    assert_same(group, vocab_parallel_entropy, dense_entropy, [whole], **options)
    assert_same(group, vocab_parallel_kl_div, dense_kl_div, [whole, teacher], **options)


@pytest.mark.ranks(1, 3)
def test_large_equal_and_rounded_logits(group):
    for level in (1e4, -1e4):
        whole, teacher = level + 3 * torch.randn(2, 6, 13, dtype=torch.float64)
        # One digit fewer: the dense formulas add numbers near 1e4 to such near 1.
        assert_same(group, vocab_parallel_entropy, dense_entropy, [whole], rtol=1e-11)
        assert_same(group, vocab_parallel_kl_div, dense_kl_div, [whole, teacher], rtol=1e-11)
    equal = torch.full((2, 13), 1e4)
    entropy = vocab_parallel_entropy(shard_of(equal, group), group=group, vocab_size=13)
    assert_close_to(entropy.detach(), torch.full((2,), 13.0).log(), rtol_of_norm=1e-6)
    assert vocab_parallel_kl_div(*(shard_of(equal, group),) * 2, group=group, vocab_size=13).tolist() == [0.0, 0.0]
    # In fp32 the result is computed of bf16 logits taken as they are.
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        whole, teacher = (3 * torch.randn(2, 6, 13)).to(dtype)
        assert_same(group, vocab_parallel_entropy, dense_entropy, [whole], rtol=2e-6)
        assert_same(group, vocab_parallel_kl_div, dense_kl_div, [whole, teacher], rtol=2e-6)
        # A teacher of another precision.
        assert_same(group, vocab_parallel_kl_div, dense_kl_div, [whole, teacher.float()], rtol=2e-6)


@pytest.mark.ranks(1, 2, 3)
def test_forbidden_ids_have_no_part(group):
    whole, teacher = torch.randn(2, 3, 12, dtype=torch.float64)
    # On two and three ranks a whole shard of the first row is forbidden.
    whole[0, :6] = -torch.inf
    whole[1, ::2] = -torch.inf
    teacher[:2] = teacher[:2].masked_fill(whole[:2] == -torch.inf, -torch.inf)
    teacher[2, 5:] = -torch.inf
    for logits, of_teacher in ((whole, teacher), (torch.randn(3, 12, dtype=torch.float64), teacher)):
        shard = shard_of(logits, group)
        entropy = vocab_parallel_entropy(shard, group=group, vocab_size=12)
        assert_close_to(entropy.detach(), dense_entropy(logits), rtol_of_norm=1e-12)
        entropy.sum().backward()
        assert bool(shard.grad.isfinite().all())
        shards = [shard_of(x, group) for x in (logits, of_teacher)]
        divergence = vocab_parallel_kl_div(*shards, group=group, vocab_size=12)
        assert_close_to(divergence.detach(), dense_kl_div(logits, of_teacher), rtol_of_norm=1e-12)
        divergence.sum().backward()
        assert all(bool(x.grad.isfinite().all()) for x in shards)
    # What the teacher wants and the prediction forbids.
    shards = shard_of(whole, group), shard_of(torch.ones(3, 12), group)
    divergence = vocab_parallel_kl_div(*shards, group=group, vocab_size=12)
    assert divergence[:2].tolist() == [torch.inf, torch.inf]
    assert bool(divergence[2].isfinite())


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_topk_and_argmax(group, dtype):
    true, padded = 11, 17
    whole = torch.randn(5, 2, padded).to(dtype)
    whole[..., true:] = 99.0
    dense = whole[..., :true]
    for k in (1, 4, 11):
        logits = shard_of(whole, group)
        with assert_unmodified(logits):
            values, ids = vocab_parallel_topk(logits, k, group=group, vocab_size=true, padded_vocab_size=padded)
            weights = torch.rand(values.shape).to(values.dtype)
            (values * weights).sum().backward()
        expected = dense.topk(k, dim=-1).values
        assert_bit_equal(values.detach(), expected.to(torch.promote_types(dtype, torch.float32)))
        assert_bit_equal(dense.gather(-1, ids), expected)
        gradient = torch.zeros(whole.shape).to(dtype).scatter(-1, ids, weights.to(dtype))
        assert_gradient_shard(logits.grad, gradient, group, 0.0)
    ids = vocab_parallel_argmax(logits.detach(), group=group, vocab_size=true, padded_vocab_size=padded)
    assert_bit_equal(ids, dense.argmax(dim=-1))


@pytest.mark.ranks(1, 2, 3)
def test_of_equal_logits_the_smallest_id_is_first(group):
    whole = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, 2.0, 1.0], [4.0] * 7, [-torch.inf] * 7])
    logits = shard_of(whole, group)
    values, ids = vocab_parallel_topk(logits, 7, group=group, vocab_size=7)
    assert ids.tolist() == [[1, 2, 4, 3, 5, 0, 6], list(range(7)), list(range(7))]
    assert values[0].tolist() == [3.0, 3.0, 3.0, 2.0, 2.0, 1.0, 1.0]
    assert vocab_parallel_argmax(logits, group=group, vocab_size=7).tolist() == [1, 0, 0]


@pytest.mark.ranks(4)
def test_shards_without_ids(group):
    whole = torch.randn(3, 2, dtype=torch.float64)
    assert_same(group, vocab_parallel_entropy, dense_entropy, [whole])
    assert_same(group, vocab_parallel_kl_div, dense_kl_div, [whole, whole.flip(0)])
    logits = shard_of(whole, group)
    values, ids = vocab_parallel_topk(logits, 2, group=group, vocab_size=2)
    values.sum().backward()
    assert_bit_equal(ids, whole.argsort(dim=1, descending=True))
    assert_bit_equal(logits.grad, torch.ones_like(logits))
    assert_bit_equal(vocab_parallel_argmax(logits, group=group, vocab_size=2), whole.argmax(dim=1))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(("dtype", "word"), [(torch.bfloat16, 4), (torch.float64, 8)], ids=str)
def test_one_collective_of_a_few_bytes(group, dtype, word):
    tokens, k = 35, 3
    logits = shard_of(torch.randn(5, 7, 50).to(dtype), group)
    ids = torch.randint(50, (5, 7))
    options = {"group": group, "vocab_size": 50}
    for function, numbers in (
        (lambda: vocab_parallel_log_probs(logits, ids, **options), 3),
        (lambda: vocab_parallel_entropy(logits, **options), 3),
        (lambda: vocab_parallel_kl_div(logits, logits.detach(), **options), 5),
        (lambda: vocab_parallel_topk(logits, k, **options)[0], 2 * k),
        (lambda: vocab_parallel_argmax(logits, **options), 2),
    ):
        with CollectiveCounter() as forward:
            result = function()
        assert [launch.name for launch in forward.launches] == ["all_gather"]
        assert forward.num_bytes == tokens * numbers * word
        if result.requires_grad:
            with CollectiveCounter() as backward:
                result.sum().backward()
            assert backward.launches == []


@pytest.mark.ranks(1, 2)
def test_what_is_returned_may_be_written_to(group):
    whole, teacher, ids = torch.randn(3, 2, 7).double(), torch.randn(3, 2, 7).double(), torch.randint(7, (3, 2))
    options = {"group": group, "vocab_size": 7}
    for loss in (
        lambda logits: vocab_parallel_cross_entropy(logits, ids, **options),
        lambda logits: vocab_parallel_log_probs(logits, ids, **options),
        lambda logits: vocab_parallel_entropy(logits, **options),
        lambda logits: vocab_parallel_kl_div(logits, shard_of(teacher, group).detach(), **options),
        lambda logits: vocab_parallel_kl_div(shard_of(teacher, group), logits, **options),
        lambda logits: vocab_parallel_topk(logits, 4, **options)[0],
    ):
        logits, written = shard_of(whole, group), shard_of(whole, group)
        (loss(logits) * 3).sum().backward()
        found = loss(written)
        found *= 3
        found.sum().backward()
        assert_bit_equal(written.grad, logits.grad)


@pytest.mark.ranks(2)
def test_mistakes_are_told(group):
    logits = torch.randn(3, 4)
    with pytest.raises(VocabularyError, match=r"target 8 at position \[2\] is outside the vocabulary of 8 ids"):
        vocab_parallel_log_probs(logits, torch.tensor([0, 1, 8]), group=group, vocab_size=8)
    with pytest.raises(ShardingError, match=r"logits \[3, 4\] and teacher_logits \[3, 5\] must have the same shape"):
        vocab_parallel_kl_div(logits, torch.randn(3, 5), group=group, vocab_size=8)
    for k in (0, 9):
        with pytest.raises(ConfigError, match=rf"k is {k}; it must be at least 1 and at most the 8 ids"):
            vocab_parallel_topk(logits, k, group=group, vocab_size=8)
    for function in (vocab_parallel_entropy, vocab_parallel_argmax, lambda x, **o: vocab_parallel_topk(x, 1, **o)):
        with pytest.raises(ShardingError, match=r"has 3 logits per token, but its balanced share .* of 9 is [45]"):
            function(logits[:, :3], group=group, vocab_size=9)
    with pytest.raises(ConfigError, match="temperature is 0"):
        vocab_parallel_entropy(logits, group=group, vocab_size=8, temperature=0.0)
