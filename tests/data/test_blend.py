"""Blends take each source in proportion to its weight, at any place, and go through a source before they repeat it."""

import numpy as np
import pytest

from shardwise.core.errors import ConfigError
from shardwise.data import DataLoader, HeldOut, TokenRows, TokenStream, WindowRows
from shardwise.data.blend import BlendedRows, blend_order, parse_blend


def stream(first, count):
    return TokenStream(f"from {first}", np.arange(first, first + count, dtype=np.uint16), 0, 2 * count)


@pytest.mark.parametrize("weights", [[0.5, 0.2, 0.3], [1 / 3] * 3, [0.999, 0.001]])
def test_at_every_place_the_counts_are_near_the_weights(weights):
    sources, numbers = blend_order(weights, 1000)
    for source, weight in enumerate(weights):
        counts = np.cumsum(sources == source)
        assert np.abs(counts - weight * np.arange(1, 1001)).max() <= 1 + len(weights) / 2
        assert numbers[sources == source].tolist() == list(range(counts[-1]))
    sources, _ = blend_order([0.75, 0.25], 4, [3, 1])
    assert np.bincount(sources).tolist() == [3, 1]


def test_a_source_is_used_up_before_it_repeats_and_is_cut_elsewhere_then():
    parts = [TokenRows(stream(0, 100), 10), TokenRows(stream(1000, 45), 10)]
    loader = DataLoader(BlendedRows(parts, blend_order([0.5, 0.5], 40)), 8, 7)
    taken = [batch.tokens for step in range(5) for batch in loader.batch(step)]
    firsts = np.concatenate([tokens[:, 0].numpy() for tokens in taken])
    assert (firsts >= 1000).sum() == 20
    of_second = firsts[firsts >= 1000] - 1000
    # Five passes over four rows, whose offset differs from pass to pass.
    passes = of_second.reshape(5, 4)
    assert all(len({int(first) // 10 for first in (each - each.min())}) == 4 for each in passes)
    assert len({int(each.min()) for each in passes}) > 1
    assert sorted(loader.schedule.epochs(0).tolist()) == [0] * 8
    assert loader.num_tokens(1) == loader.num_labels(1) == loader.computed(1).sum() == 80
    ranks = [next(loader.batch(3, rank, 2)).tokens for rank in (0, 1)]
    assert np.array_equal(np.concatenate(ranks), taken[3])
    with pytest.raises(ConfigError, match="the blend has 40 samples, and sample 47 is wanted"):
        loader.num_labels(5)


def test_more_steps_continue_the_same_order():
    few, many = (blend_order([0.7, 0.3], size) for size in (100, 1000))
    assert np.array_equal(few[0], many[0][:100])
    assert np.array_equal(few[1], many[1][:100])


def test_held_out_rows_of_all_sources_count_once():
    rows = [WindowRows(stream(0, 25), 10), WindowRows(stream(500, 8), 10)]
    held_out = HeldOut(BlendedRows(rows))
    labels = np.concatenate([batch.labels.numpy().ravel() for batch in held_out.batches(2)])
    assert sorted(labels[labels >= 0].tolist()) == [*range(25), *range(500, 508)]
    assert held_out.rows.num_bytes == 66


def test_words_of_a_blend():
    assert parse_blend(["web", "code.jsonl"]) == (["web", "code.jsonl"], None)
    assert parse_blend(["3", "web", "1", "code.jsonl"]) == (["web", "code.jsonl"], [0.75, 0.25])
    assert parse_blend(["./3", "web"]) == (["./3", "web"], None)
    for words, problem in {
        "0.7 web code": "begins with a weight; give one before each source",
        "0.7 web x code": "begins with a weight",
        "0.7 web -1 code": "weights of a blend are 0.7, -1; each must be more than 0",
        "0 web 0 code": "weights of a blend are 0, 0",
        "nan web 1 code": "weights of a blend are nan, 1",
        "inf web 1 code": "weights of a blend are inf, 1",
    }.items():
        with pytest.raises(ConfigError, match=problem):
            parse_blend(words.split())
