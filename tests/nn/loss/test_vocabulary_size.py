"""The size of the vocabulary: required below the compatible name; checked between the ranks where it is not given."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from harness.operators import Operators
from harness.parity import assert_bit_equal, assert_close_to, gather_all
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.communication.collectives import all_reduce
from shardwise.core.communication.context import validated_calls
from shardwise.core.errors import ConfigError, ShardingError, VocabularyError
from shardwise.core.sharding import balanced_sizes
from shardwise.nn import loss as engine
from shardwise.tensor_parallel import vocab_parallel_cross_entropy
from shardwise.tensor_parallel.cross_entropy import _VocabParallelCrossEntropy

ENTRIES = 1001


def shard_of_sizes(whole, sizes, group):
    """This rank's columns, as a leaf."""
    return torch.split(whole, sizes, dim=-1)[group.rank()].clone().requires_grad_()


def assert_refused_alike(function, sizes, group):
    """A ShardingError that names all sizes and the argument, on every rank, and the ranks still talk afterwards."""
    with pytest.raises(ShardingError) as caught:
        function()
    message = str(caught.value)
    assert message.startswith(f"the ranks hold {sizes} logits per token")
    assert f"pass vocab_size= ({sum(sizes)}, less what is padding)" in message
    assert all_reduce(torch.ones(3), group=group).tolist() == [group.size()] * 3


@pytest.mark.ranks(2, 3, slow=())
@pytest.mark.parametrize("last", [False, True], ids=["", "targets at the end"])
def test_a_vocabulary_that_does_not_divide_is_refused_on_every_rank(group, last):
    whole = 2 * torch.randn(5, 2, ENTRIES, dtype=torch.float64)
    # The last ids are in the vocabulary that some ranks would take it for and not in that of others.
    target = torch.full((5, 2), ENTRIES - 1) if last else torch.randint(900, (5, 2))
    sizes = list(balanced_sizes(ENTRIES, group.size()))
    logits = shard_of_sizes(whole, sizes, group)
    for options in ({}, {"validate": False}, {"check_finite": True}, {"label_smoothing": 0.1, "reduction": "mean"}):
        assert_refused_alike(
            lambda options=options: vocab_parallel_cross_entropy(logits, target, tp_group=group, **options),
            sizes,
            group,
        )
    assert_refused_alike(lambda: _VocabParallelCrossEntropy.apply(logits, target, 0.0, group), sizes, group)
    loss = vocab_parallel_cross_entropy(logits, target, tp_group=group, vocab_size=ENTRIES)
    expected = F.cross_entropy(whole.flatten(0, 1), target.flatten(), reduction="none").view(5, 2)
    assert_close_to(loss.detach(), expected, rtol_of_norm=1e-12)


@pytest.mark.ranks(2, 3, slow=())
def test_ranks_that_split_a_vocabulary_in_another_way_are_refused(group):
    splits = {
        2: [[400, 601], [601, 400], [1000, 1], [1001, 0], [0, 1001], [1 << 16, 1]],
        3: [[400, 200, 401], [334, 333, 334], [500, 501, 0], [0, 0, 7]],
    }
    target = torch.tensor([0, 3, 6])
    for sizes in splits[group.size()]:
        whole = torch.randn(3, sum(sizes))
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            logits = shard_of_sizes(whole.to(dtype), sizes, group)
            assert_refused_alike(
                lambda logits=logits: vocab_parallel_cross_entropy(logits, target, tp_group=group), sizes, group
            )
        # Without any token too.
        none = logits[:0]
        assert_refused_alike(
            lambda none=none: vocab_parallel_cross_entropy(none, target[:0], tp_group=group), sizes, group
        )
    with pytest.raises(ShardingError, match="no rank holds any logits; a vocabulary needs at least 1 id"):
        vocab_parallel_cross_entropy(torch.randn(3, 0), target, tp_group=group)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2, "z_loss": 1e-2, "softcap": 4.0}], ids=["", "options"])
def test_equal_shards_need_no_size(group, options):
    t = group.size()
    for dtype in (torch.float64, torch.bfloat16):
        whole, target = torch.randn(4, 3, 11 * t).to(dtype), torch.randint(11 * t, (4, 3))
        results = []
        for size in (None, 11 * t):
            logits = shard_of_sizes(whole, [11] * t, group)
            with CollectiveCounter() as counter:
                loss = vocab_parallel_cross_entropy(logits, target, tp_group=group, vocab_size=size, **options)
            loss.sum().backward()
            results.append((loss.detach(), logits.grad, counter))
        assert_bit_equal(results[0][0], results[1][0])
        assert_bit_equal(results[0][1], results[1][1])
        # One collective, of one row more.
        numbers, word = 4 if options else 3, 8 if dtype == torch.float64 else 4
        for rows, (_, _, counter) in zip((13, 12), results, strict=True):
            launched = [(launch.name, launch.num_bytes) for launch in counter.launches]
            assert launched == ([("all_gather", rows * numbers * word)] if t > 1 else [])
    with pytest.raises(VocabularyError, match=rf"target {11 * t} at position \[0, 0\]"):
        vocab_parallel_cross_entropy(logits, target * 0 + 11 * t, tp_group=group)


@pytest.mark.ranks(1, 2)
def test_padding_needs_the_true_size(group):
    with pytest.raises(ConfigError, match=r"padded_vocab_size is 24, and without vocab_size .* pass vocab_size= too"):
        vocab_parallel_cross_entropy(
            torch.randn(2, 12), torch.zeros(2, dtype=torch.long), tp_group=group, padded_vocab_size=24
        )


def test_sizes_are_told_exactly():
    from shardwise.nn.loss.vocabulary import with_size, without_sizes

    for size in (1, (1 << 16) - 1, 1 << 16, (1 << 24) + 1, (1 << 31) - 1):
        for dtype in (torch.float32, torch.float64):
            own, other = (with_size(torch.randn(2, 3, dtype=dtype), n) for n in (size, size + 1))
            assert_bit_equal(without_sizes(torch.stack([own, own]), size), torch.stack([own, own])[:, :2])
            with pytest.raises(ShardingError, match=rf"the ranks hold \[{size}, {size + 1}\] logits per token"):
                without_sizes(torch.stack([own, other]), size)


def test_on_a_gpu_the_check_stays_on_the_device():
    from shardwise.nn.loss.vocabulary import with_size, without_sizes

    # A tensor without values: whatever the host wanted to know of it would be an error.
    with FakeTensorMode(), Operators() as operators:
        own = with_size(torch.empty(5, 3, device="cuda"), 70_000)
        every = without_sizes(own.new_empty(2, 6, 3), 70_000)
    assert every.shape == (2, 5, 3)
    assert every.device.type == own.device.type == "cuda"
    assert "aten::_assert_async.msg" in operators.names
    # Nor does anything come from the host, which would wait for the copy.
    assert not any("copy" in name or "_local_scalar" in name or "lift_fresh" in name for name in operators.names)


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled(group):
    def loss(logits, target):
        return vocab_parallel_cross_entropy(logits, target, tp_group=group, label_smoothing=0.1)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    whole, target = torch.randn(6, 26, dtype=torch.float64), torch.randint(26, (6,))
    results = []
    for function in (loss, compiled):
        logits = shard_of_sizes(whole, [13, 13], group)
        result = function(logits, target)
        result.sum().backward()
        results.append((result.detach(), logits.grad))
    assert_close_to(results[1][0], results[0][0], rtol_of_norm=1e-13)
    assert_close_to(results[1][1], results[0][1], rtol_of_norm=1e-13)
    for logits in (shard_of_sizes(whole, [12, 14], group), shard_of_sizes(whole, [12, 14], group).detach()):
        with pytest.raises(RuntimeError, match=r"different numbers of logits per token, .*; pass vocab_size="):
            compiled(logits, target)


ARGUMENTS = {
    "vocab_parallel_argmax": lambda shard, weight, ids: (shard,),
    "vocab_parallel_cross_entropy": lambda shard, weight, ids: (shard, ids),
    "vocab_parallel_entropy": lambda shard, weight, ids: (shard,),
    "vocab_parallel_kl_div": lambda shard, weight, ids: (shard, shard.flip(0)),
    "vocab_parallel_linear_cross_entropy": lambda shard, weight, ids: (torch.ones(4, 3), weight, ids),
    "vocab_parallel_log_probs": lambda shard, weight, ids: (shard, ids),
    "vocab_parallel_topk": lambda shard, weight, ids: (shard, 7),
}


@pytest.mark.ranks(2, 3)
def test_every_function_of_the_loss_needs_the_size(group):
    assert ARGUMENTS.keys() == {name for name in vars(engine) if name.startswith("vocab_parallel_")}
    sizes = list(balanced_sizes(ENTRIES, group.size()))
    torch.manual_seed(5)
    whole, weight, ids = torch.randn(4, ENTRIES), torch.randn(3, ENTRIES), torch.randint(900, (4,))
    shard = shard_of_sizes(whole, sizes, group).detach()
    own_weight = shard_of_sizes(weight, sizes, group).detach().t().contiguous()
    for name, arguments in ARGUMENTS.items():
        function, given = getattr(engine, name), arguments(shard, own_weight, ids)
        assert inspect.signature(function).parameters["vocab_size"].default is inspect.Parameter.empty, name
        with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'vocab_size'"):
            function(*given, group=group)
        with pytest.raises(ConfigError, match="vocab_size is None; pass the number of ids of the whole vocabulary"):
            function(*given, group=group, vocab_size=None)
        result = function(*given, group=group, vocab_size=ENTRIES)
        for tensor in result if isinstance(result, tuple) else (result,):
            for of_rank in gather_all(tensor, group):
                assert_bit_equal(of_rank, tensor)


@pytest.mark.ranks(2)
def test_a_share_that_does_not_fit_on_one_rank_is_refused_on_all_ranks_of_validated_calls(group):
    logits, target = torch.randn(3, 5), torch.tensor([0, 3, 6])
    with validated_calls((group,)), pytest.raises(ShardingError, match="balanced share of a vocabulary of 11 is 6"):
        engine.vocab_parallel_cross_entropy(logits, target, group=group, vocab_size=11)
    with pytest.raises(ShardingError, match="padded_vocab_size is 8, less than vocab_size, which is 10"):
        engine.vocab_parallel_cross_entropy(logits, target, group=group, vocab_size=10, padded_vocab_size=8)
