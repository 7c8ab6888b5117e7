"""The preallocated key-value cache."""

from __future__ import annotations

import pytest
import torch
from harness.parity import assert_bit_equal, assert_unmodified
from models.test_gpt import SHAPES

from shardwise.core.errors import ConfigError, ShardingError
from shardwise.models.generation import PreallocatedCache


def make_cache(num_layers: int = 2, capacity: int = 5) -> PreallocatedCache:
    return PreallocatedCache(num_layers, 3, 4, batch_size=2, capacity=capacity, dtype=torch.float64)


def new_tokens(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 3, count, 4, dtype=torch.float64), torch.randn(2, 3, count, 4, dtype=torch.float64)


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_returns_everything_so_far_of_each_layer(num_layers):
    cache = make_cache(num_layers)
    appended = [([], []) for _ in range(num_layers)]
    for count in (2, 1, 2):
        before = cache.length
        for layer in range(num_layers):
            assert cache.length == before
            key, value = new_tokens(count)
            appended[layer][0].append(key)
            appended[layer][1].append(value)
            with assert_unmodified(key=key, value=value):
                keys, values = cache.append(layer + 1, key, value)
            assert_bit_equal(keys, torch.cat(appended[layer][0], dim=2))
            assert_bit_equal(values, torch.cat(appended[layer][1], dim=2))
        assert cache.length == before + count


def test_reads_heads_in_any_memory_order():
    key, value = (x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for x in new_tokens(3))
    assert not key.is_contiguous()
    keys, values = make_cache(1).append(1, key, value)
    assert_bit_equal(keys, key)
    assert_bit_equal(values, value)


def test_results_are_views_and_take_no_part_in_gradients():
    cache = make_cache(1)
    key, value = (x.requires_grad_() for x in new_tokens(2))
    keys, _ = cache.append(1, key, value)
    longer, _ = cache.append(1, *new_tokens(1))
    assert not keys.requires_grad
    assert keys.data_ptr() == longer.data_ptr()


def test_num_bytes():
    assert make_cache(capacity=7).num_bytes == 2 * 2 * (2 * 3 * 7 * 4) * 8


def test_truncate_forgets_the_rest():
    cache = make_cache(1)
    key, value = new_tokens(4)
    cache.append(1, key, value)
    cache.truncate(1)
    assert cache.length == 1
    other_key, other_value = new_tokens(2)
    keys, values = cache.append(1, other_key, other_value)
    assert_bit_equal(keys, torch.cat([key[:, :, :1], other_key], dim=2))
    assert_bit_equal(values, torch.cat([value[:, :, :1], other_value], dim=2))
    with pytest.raises(ShardingError, match="of 3 tokens to 4"):
        cache.truncate(4)


def test_capacity_exceeded():
    cache = make_cache(1)
    cache.append(1, *new_tokens(3))
    with pytest.raises(ShardingError, match=r"holds 5 tokens .* appends 3 to 3; .* at least 6"):
        cache.append(1, *new_tokens(3))
    keys, _ = cache.append(1, *new_tokens(2))
    assert keys.size(2) == 5


def test_a_pass_that_failed_is_noticed_and_can_be_undone():
    cache = make_cache(2)
    for layer in (1, 2):
        cache.append(layer, *new_tokens(1))
    cache.append(1, *new_tokens(2))
    with pytest.raises(ShardingError, match=r"layer 1 has 3 tokens .* another layer 1: .* truncate\(1\)"):
        cache.append(1, *new_tokens(2))
    cache.truncate(cache.length)
    keys, _ = cache.append(1, *new_tokens(2))
    assert keys.size(2) == 3


@pytest.mark.parametrize("layer", [0, 3])
def test_no_such_layer(layer):
    with pytest.raises(ShardingError, match=f"layer {layer} is not one of the 2"):
        make_cache(2).append(layer, *new_tokens(1))


def test_shapes_that_do_not_fit():
    key, value = new_tokens(2)
    for wrong_key, wrong_value in (
        (key[:1], value[:1]),
        (key, value[:, :, :1]),
        (key[..., :3], value),
        (key[0], value),
    ):
        with pytest.raises(ShardingError, match=r"holds \[2, 3, tokens, 4\] per layer, with values 4 wide"):
            make_cache().append(1, wrong_key, wrong_value)


@pytest.mark.parametrize("name", ["batch_size", "capacity"])
def test_sizes_that_cannot_be(name):
    sizes = {"batch_size": 1, "capacity": 1} | {name: 0}
    with pytest.raises(ConfigError, match=f"{name} of a key-value cache is 0"):
        PreallocatedCache(1, 1, 1, **sizes, dtype=torch.float32)


@pytest.mark.ranks(3)
def test_for_model_holds_this_ranks_heads(group):
    model = SHAPES["gpt-tied"].model(group, dtype=torch.float32)
    cache = PreallocatedCache.for_model(model, batch_size=2, capacity=10)
    local_heads = (3, 2, 2)[group.rank()]
    assert cache.num_bytes == 2 * 2 * (2 * local_heads * 10 * 6) * 4
    assert cache.capacity == 10
    assert cache.length == 0
