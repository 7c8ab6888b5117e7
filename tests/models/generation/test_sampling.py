"""The next token from split logits: the oracle's choice at every tensor-parallel size, with the right frequencies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from harness.parity import assert_unmodified
from models.generation.dense_sampling import choose, kept_probabilities, penalised

from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.errors import ConfigError, DivergenceError, ShardingError
from shardwise.core.sharding import balanced_range
from shardwise.models.generation import GREEDY, Sampling, sample_next_token
from shardwise.models.generation.sampling import History, choose_next_token

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.7),
    Sampling(temperature=2.0, top_k=4),
    Sampling(temperature=1.3, top_p=0.6),
    Sampling(temperature=1.3, top_k=6, top_p=0.8),
    Sampling(top_k=1000),
    Sampling(temperature=1.4, min_p=0.3),
    Sampling(temperature=2.0, top_k=8, top_p=0.95, min_p=0.3),
    Sampling(temperature=2.0, top_p=0.9, min_p=0.4),
]


def own_part(logits, group):
    start, stop = balanced_range(logits.size(1), group.size(), group.rank())
    return logits[:, start:stop].contiguous()


def sample(logits, sampling, group, seed=0):
    return sample_next_token(
        own_part(logits, group),
        sampling,
        vocab_size=logits.size(1),
        group=group,
        generator=torch.Generator().manual_seed(seed),
    )


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sampling", [GREEDY, *SAMPLINGS], ids=str)
def test_chooses_what_the_oracle_chooses(group, sampling, dtype):
    # Few distinct values, so that every cut goes through equal ones.
    logits = torch.randint(-3, 4, (50, 13)).to(dtype)
    # One rank holds nothing likely.
    logits[0, :7] = -100
    local = own_part(logits, group)
    generator = torch.Generator().manual_seed(3)
    with assert_unmodified(local=local):
        tokens = sample_next_token(local, sampling, vocab_size=13, group=group, generator=generator)
    uniform = torch.rand(50, 13, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    rows = zip(logits.tolist(), uniform.tolist(), strict=True)
    assert tokens.tolist() == [choose(row, sampling, numbers) for row, numbers in rows]


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize(("temperature", "pairs"), [(0.5, 1 + 64), (1.5, 1 + 64 + 512), (30.0, 1 + 64 + 512 + 834)])
def test_top_p_of_a_large_vocabulary_gathers_as_much_as_it_needs(group, temperature, pairs):
    """A few tokens, some hundreds, and nearly all: a rank sends highest logit and sum, then pairs of 16 bytes."""
    logits, sampling = torch.randn(60, 2502) * 3, Sampling(temperature, top_p=0.8, min_p=0.001)
    uniform = torch.rand(60, 2502, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with CollectiveCounter() as counter:
        tokens = sample(logits, sampling, group)
    rows = zip(logits.double().tolist(), uniform.tolist(), strict=True)
    assert tokens.tolist() == [choose(row, sampling, numbers) for row, numbers in rows]
    assert group.size() == 1 or counter.num_bytes == 60 * pairs * 16


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(), Sampling(top_k=5)], ids=str)
def test_penalties_of_earlier_tokens(group, sampling):
    logits = torch.randn(4, 13, dtype=torch.float64)
    histories = [History([], []), History([1, 2, 2], []), History([3], [12, 0, 0, 5]), History(range(13), range(6))]
    for options in ({"repetition_penalty": 1.5}, {"presence_penalty": 0.8}, {"repetition_penalty": 0.5}):
        changed = replace(sampling, **options)
        generators = [torch.Generator().manual_seed(row) for row in range(4)]
        own = own_part(logits, group)
        with assert_unmodified(logits=own):
            tokens = choose_next_token(
                own, changed, vocab_size=13, group=group, generator=generators, histories=histories
            )
        for row, history in enumerate(histories):
            uniform = torch.rand(13, generator=torch.Generator().manual_seed(row), dtype=torch.float64).tolist()
            assert tokens[row] == choose(penalised(logits[row].tolist(), changed, *history), changed, uniform)


@pytest.mark.ranks(2)
def test_penalties_of_logits_in_16_bits_are_those_of_fp32(group):
    """As in transformers: rounded to 16 bits, many logits would be equal after a penalty."""
    logits = (torch.randn(200, 50) + 20).bfloat16()
    histories = [History(range(25), []) for _ in logits]
    for options in ({"repetition_penalty": 1.01}, {"repetition_penalty": 0.99}):
        tokens = choose_next_token(
            own_part(logits, group),
            Sampling(0.0, **options),
            vocab_size=50,
            group=group,
            generator=[],
            histories=histories,
        )
        wide = [penalised(row.tolist(), Sampling(0.0, **options), range(25), []) for row in logits]
        assert tokens.tolist() == torch.tensor(wide).argmax(1).tolist()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"top_k": 4}, {"top_p": 0.5}], ids=str)
def test_the_smallest_temperature_is_greedy(group, options):
    logits = torch.randn(50, 13)
    tokens = sample(logits, Sampling(temperature=1e-300, **options), group)
    assert tokens.tolist() == logits.argmax(-1).tolist()


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_frequencies_follow_the_distribution(group, sampling):
    num_samples = 20_000
    logits = torch.randn(11, dtype=torch.float64) * 1.5
    counts = torch.bincount(sample(logits.expand(num_samples, 11), sampling, group), minlength=11)
    kept = kept_probabilities(logits.tolist(), sampling)
    assert set(counts.nonzero().flatten().tolist()) <= set(kept)
    chi_square = sum((int(counts[i]) - num_samples * p) ** 2 / (num_samples * p) for i, p in kept.items())
    # At most 10 degrees of freedom: the sum of squares passes 35.6 in one of ten thousand draws.
    assert chi_square < 35.6


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("sampling", "pairs"),
    [
        (GREEDY, 1),
        (Sampling(), 1),
        (Sampling(top_k=1), 1),
        (Sampling(top_k=5, top_p=0.9), 5),
        (Sampling(top_p=0.9), 51),
    ],
    ids=str,
)
def test_one_small_gather(group, sampling, pairs):
    with CollectiveCounter() as counter:
        sample(torch.randn(3, 101), sampling, group)
    assert len(counter.launches) == 1
    # Of all candidates rank 1 has one fewer.
    assert counter.num_bytes == 3 * min(pairs, 51 - group.rank()) * 16


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("sampling", [GREEDY, *SAMPLINGS], ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_are_refused_on_every_rank(group, sampling, bad):
    logits = torch.zeros(2, 10)
    # On the last rank alone.
    logits[1, 8] = bad
    with pytest.raises(DivergenceError, match="have diverged"):
        sample(logits, sampling, group)


@pytest.mark.ranks(2)
def test_shards_that_do_not_fit(group):
    options = {"group": group, "generator": torch.Generator()}
    held = 6 - group.rank()
    with pytest.raises(ShardingError, match=rf"holds {held} of 11 ids; pass scores of shape \[batch, {held}\]"):
        sample_next_token(torch.zeros(1, 3), Sampling(), vocab_size=11, **options)
    with pytest.raises(ShardingError, match=r"not \[6\]"):
        sample_next_token(torch.zeros(6), GREEDY, vocab_size=12, **options)
    with pytest.raises(ShardingError, match="1 ids is too small for 2 ranks"):
        sample_next_token(torch.zeros(1, 1), GREEDY, vocab_size=1, **options)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", float("inf")),
    ],
)
def test_settings_that_cannot_be(name, value):
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        Sampling(**{name: value})
