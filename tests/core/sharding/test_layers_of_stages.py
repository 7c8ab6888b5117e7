"""Layers are dealt out to pipeline stages: all of them, in order, evenly, and as told."""

from __future__ import annotations

import doctest
import itertools

import pytest

from shardwise.core.errors import ConfigError
from shardwise.core.sharding import balanced, balanced_sizes, stage_layers
from shardwise.megatron.config import TransformerConfig


def in_model_order(dealt):
    return [dealt[stage][chunk] for chunk in range(len(dealt[0])) for stage in range(len(dealt))]


def test_examples():
    assert doctest.testmod(balanced).failed == 0
    assert doctest.testmod(balanced).attempted >= 4


def test_every_layer_is_dealt_out_once_and_in_order():
    count = 0
    for num_layers, num_stages, num_chunks in itertools.product(range(1, 14), range(1, 6), range(1, 4)):
        for embedding, loss in itertools.product([False, True], repeat=2):
            options = {"num_chunks": num_chunks, "count_embedding": embedding, "count_loss": loss}
            if num_layers < num_stages * num_chunks:
                with pytest.raises(ConfigError, match=f"{num_layers} layers cannot be dealt out to {num_stages}"):
                    stage_layers(num_layers, num_stages, **options)
                continue
            dealt = stage_layers(num_layers, num_stages, **options)
            assert [len(chunks) for chunks in dealt] == [num_chunks] * num_stages
            parts = in_model_order(dealt)
            assert [layer for part in parts for layer in part] == list(range(num_layers))
            sizes = [len(part) for part in parts]
            assert min(sizes) >= 1
            if not (embedding or loss):
                assert tuple(sizes) == balanced_sizes(num_layers, num_stages * num_chunks)
            weights = list(sizes)
            weights[0] += embedding
            weights[-1] += loss
            # A part is heavier than another by more than one only if it holds one layer, which nothing can lighten.
            assert all(heavy - min(weights) <= 1 or size == 1 for heavy, size in zip(weights, sizes, strict=True))
            count += 1
    assert count > 300


def test_counts_of_the_first_and_last_stage_are_kept():
    for num_layers, num_stages, num_chunks in itertools.product(range(4, 13), range(2, 5), range(1, 3)):
        for first, last in itertools.product([None, 1, 2, 3, 4], repeat=2):
            given = [count for count in (first, last) if count is not None]
            free = (num_stages - len(given)) * num_chunks
            left = num_layers - sum(given)
            possible = (
                num_layers >= num_stages * num_chunks
                and all(count >= num_chunks for count in given)
                and (left >= free if free else left == 0)
            )
            options = {"num_chunks": num_chunks, "first": first, "last": last}
            if not possible:
                with pytest.raises(ConfigError):
                    stage_layers(num_layers, num_stages, **options)
                continue
            dealt = stage_layers(num_layers, num_stages, **options)
            assert [layer for part in in_model_order(dealt) for layer in part] == list(range(num_layers))
            counts = [sum(map(len, chunks)) for chunks in dealt]
            assert first in (None, counts[0])
            assert last in (None, counts[-1])
            assert all(len(chunk) >= 1 for chunks in dealt for chunk in chunks)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_layers": 3, "num_stages": 4}, "3 layers cannot be dealt out to 4 pipeline stages: each needs at least"),
        ({"num_layers": 7, "num_stages": 4, "num_chunks": 2}, "4 pipeline stages of 2 chunks: each needs at least"),
        ({"num_layers": 4, "num_stages": 0}, "0 pipeline stages of 1 chunks"),
        ({"num_layers": 4, "num_stages": 1, "first": 3}, r"one pipeline stage, with all 4 layers.*{'first': 3}"),
        ({"num_layers": 4, "num_stages": 2, "first": 2, "last": 1}, "first stage is given 2 and the last 1, which"),
        ({"num_layers": 6, "num_stages": 3, "first": 5}, "which leaves 1 for the other 2 stages"),
        ({"num_layers": 6, "num_stages": 2, "last": 0}, "the last stage is given 0 layers for its 1 chunks"),
        ({"num_layers": 6, "num_stages": 2, "first": 3, "count_embedding": True}, "embedding cannot be counted"),
        ({"num_layers": 6, "num_stages": 2, "last": 3, "count_loss": True}, "loss cannot be counted"),
    ],
)
def test_what_cannot_be_dealt_out(options, words):
    with pytest.raises(ConfigError, match=words):
        stage_layers(**options)


def test_a_config_deals_out_its_layers():
    sizes = {"num_layers": 9, "hidden_size": 8, "num_attention_heads": 2, "pipeline_model_parallel_size": 3}
    assert TransformerConfig(**sizes).stage_layers() == ((range(3),), (range(3, 6),), (range(6, 9),))
    told = TransformerConfig(
        **sizes, num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=2
    ).stage_layers()
    assert told == ((range(1),), (range(1, 7),), (range(7, 9),))
    counted = TransformerConfig(
        **sizes | {"num_layers": 10},
        account_for_embedding_in_pipeline_split=True,
        account_for_loss_in_pipeline_split=True,
    ).stage_layers()
    assert [len(chunk) for (chunk,) in counted] == [3, 4, 3]
    chunked = TransformerConfig(**sizes, virtual_pipeline_model_parallel_size=2).stage_layers()
    assert [list(map(len, chunks)) for chunks in chunked] == [[2, 1], [2, 1], [2, 1]]
    for options, words in (
        ({"num_layers": 2}, "2 layers cannot be dealt out to 3"),
        ({"num_layers_in_first_pipeline_stage": 8}, "leaves 1 for the other 2"),
        ({"virtual_pipeline_model_parallel_size": 4}, "3 pipeline stages of 4 chunks"),
    ):
        with pytest.raises(ConfigError, match=words):
            TransformerConfig(**sizes | options)
