"""Losses over vocabularies that are split in every way: the dense loss, or one error on every rank."""

import random

import pytest
import torch
import torch.nn.functional as F
from harness.parity import assert_close_to

from shardwise.core.communication.agreement import gather_objects
from shardwise.core.errors import ShardingError
from shardwise.core.sharding import balanced_sizes
from shardwise.megatron.config import TransformerConfig
from shardwise.megatron.models.language_module import LanguageModule
from shardwise.megatron.process_groups_config import ProcessGroupCollection
from shardwise.nn.loss import vocab_parallel_cross_entropy as of_the_engine
from shardwise.tensor_parallel import vocab_parallel_cross_entropy


def splits(num_ranks):
    """A thousand and one ids as they divide, in other ways, with ranks that hold none; and ids that divide."""
    draw = random.Random(7)
    yield list(balanced_sizes(1001, num_ranks))
    yield [400, *balanced_sizes(601, num_ranks - 1)]
    yield [0] * (num_ranks - 1) + [1001]
    for _ in range(12):
        cuts = sorted(draw.randint(0, 1001) for _ in range(num_ranks - 1))
        yield [stop - start for start, stop in zip([0, *cuts], [*cuts, 1001], strict=True)]
    # One more or less is all that differs.
    yield [334] * (num_ranks - 1) + [333]
    yield [334] * num_ranks
    yield [1] * num_ranks


@pytest.mark.ranks(2, 3, slow=())
def test_every_split_gives_the_dense_loss_or_one_error_on_all_ranks(group):
    for sizes in splits(group.size()):
        k = sum(sizes)
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            whole = (3 * torch.randn(6, 2, k)).to(dtype)
            logits = whole.split(sizes, dim=-1)[group.rank()].clone().requires_grad_()
            # The last id, which only some of the ranks' vocabularies would have; one that is ignored; the first.
            target = torch.randint(k, (6, 2))
            target[0, 0], target[1, 0], target[2, 1] = k - 1, -100, 0
            try:
                loss = vocab_parallel_cross_entropy(logits, target, tp_group=group)
            except ShardingError as error:
                outcome = str(error)
            else:
                outcome = ""
                expected = F.cross_entropy(whole.double().flatten(0, 1), target.flatten(), reduction="none").view(6, 2)
                assert_close_to(loss.detach().double(), expected, rtol_of_norm=2e-6, name=f"loss of {sizes}")
            # The ranks are where they were: the next exchange is the same on all.
            outcomes = gather_objects(outcome, "the outcome of a loss", group=group)
            assert len(set(outcomes)) == 1, (sizes, outcomes)
            assert bool(outcome) == (len(set(sizes)) > 1), (sizes, outcome)
            assert not outcome or (str(sizes) in outcome and "pass vocab_size=" in outcome)


@pytest.mark.ranks(3, slow=())
def test_a_model_of_ones_own_that_never_says_its_vocabulary(group):
    config = TransformerConfig(num_layers=1, hidden_size=12, num_attention_heads=3, tensor_model_parallel_size=3)
    groups = ProcessGroupCollection()
    groups.tp, groups.pp = group, None
    model = LanguageModule(config, groups)
    whole, labels = torch.randn(5, 2, 1001), torch.randint(900, (2, 5))
    logits = whole.split(balanced_sizes(1001, 3), dim=-1)[group.rank()]
    with pytest.raises(ShardingError, match=r"the ranks hold \[334, 334, 333\] logits per token.*pass vocab_size="):
        model.compute_language_model_loss(labels, logits)
    model.vocab_size = 1001
    expected = F.cross_entropy(whole.permute(1, 2, 0), labels, reduction="none")
    assert_close_to(model.compute_language_model_loss(labels, logits), expected, rtol_of_norm=1e-6)


@pytest.mark.matrix
@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_for_one_split_and_given_another(group):
    def loss(logits, target):
        return vocab_parallel_cross_entropy(logits, target, tp_group=group)

    # Sizes stay symbols, so that what was traced for equal shards is run for others too.
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    whole, target = torch.randn(4, 1001), torch.tensor([0, 7, 499, 3])
    for sizes in ([20, 20], [400, 601], [31, 31], [501, 500], [500, 501]):
        logits = whole[:, : sum(sizes)].split(sizes, dim=-1)[group.rank()].clone().requires_grad_()
        ids = target % sum(sizes)
        if sizes[0] == sizes[1]:
            expected = of_the_engine(logits, ids, group=group, vocab_size=sum(sizes))
            assert_close_to(compiled(logits, ids).detach(), expected.detach(), rtol_of_norm=1e-6)
        else:
            with pytest.raises(RuntimeError, match="pass vocab_size="):
                compiled(logits, ids)
