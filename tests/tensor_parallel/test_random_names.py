"""Random streams by the names and habits of programs written for Megatron."""

import pytest
import torch
import torch.distributed as dist
from harness.parity import assert_bit_equal

from shardwise import parallel_state
from shardwise.core import random
from shardwise.core.errors import ConfigError
from shardwise.megatron.errors import AssertedConfigError
from shardwise.tensor_parallel.random import (
    _get_all_rng_states,
    _get_cuda_rng_state,
    _set_all_rng_states,
    _set_cuda_rng_state,
    get_all_rng_states,
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)


def begin_anew(monkeypatch):
    """As in a program that has not said anything about random streams."""
    monkeypatch.setattr(random, "_AMBIENT", random._Ambient(random.RandomStreams()))


def every_ranks(tensor, group):
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor, group=group)
    return parts


@pytest.mark.ranks(2)
def test_states_before_there_are_any(group, monkeypatch):
    begin_anew(monkeypatch)
    with pytest.raises(AssertedConfigError, match="no random streams yet; call model_parallel_cuda_manual_seed"):
        get_all_rng_states()
    tracker = get_cuda_rng_tracker()
    assert get_all_rng_states() == {}
    assert not tracker.is_initialized()
    tracker.set_states({})
    assert tracker.is_initialized()
    snapshot = tracker.snapshot()
    tracker.reset()
    assert not tracker.is_initialized()
    tracker.restore(snapshot)
    assert tracker.is_initialized()


@pytest.mark.ranks(2)
def test_all_states_taken_and_given_back(group, monkeypatch):
    begin_anew(monkeypatch)
    parallel_state.initialize_model_parallel(2)
    model_parallel_cuda_manual_seed(5)

    def draw():
        with get_cuda_rng_tracker().fork():
            inside = torch.rand(4)
        return torch.cat([inside, torch.rand(4)])

    cpu, device, streams = states = _get_all_rng_states()
    assert_bit_equal(cpu, torch.get_rng_state())
    assert_bit_equal(device, cpu)
    assert streams.keys() == get_all_rng_states().keys()
    first = draw()
    assert not torch.equal(draw(), first)
    _set_all_rng_states(*states)
    assert_bit_equal(draw(), first)
    # The stream is each rank's own.
    assert not torch.equal(*every_ranks(first, group))
    with get_cuda_rng_tracker().fork(), pytest.raises(ConfigError, match="cannot set the random streams while"):
        _set_all_rng_states(*states)


@pytest.mark.ranks(2)
def test_the_state_of_the_device_that_computes(group):
    before = torch.get_rng_state()
    state, generator = _get_cuda_rng_state(), _get_cuda_rng_state(clone=True, graph_safe=True)
    expected = torch.rand(4)
    for given, options in ((state, {}), (generator, {"graph_safe": True, "device": 0})):
        _set_cuda_rng_state(given, **options)
        assert_bit_equal(torch.rand(4), expected)
    assert_bit_equal(generator.get_state(), before)
    assert_bit_equal(torch.rand(4, generator=generator), expected)
    with pytest.raises(ConfigError, match=r"a tensor or a torch\.Generator, not int"):
        _set_cuda_rng_state(7)
    with pytest.raises(ConfigError, match="a state of 3 bytes is not one of the CPU's generator, and there is no GPU"):
        _set_cuda_rng_state(torch.zeros(3, dtype=torch.uint8))


@pytest.mark.ranks(2)
def test_the_gpu_is_seeded_before_it_is_used(group, monkeypatch):
    begin_anew(monkeypatch)
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed", seeds.append)
    parallel_state.initialize_model_parallel(2)
    model_parallel_cuda_manual_seed(41)
    assert seeds == [41]


@pytest.mark.ranks(2)
def test_seeding_inside_fork(group):
    """The rest of the block, and later blocks, draw from the streams of the new seed; so does the default generator."""
    parallel_state.initialize_model_parallel(2)

    def drawn(seed, *, skipped=0):
        generator = torch.Generator().manual_seed(seed)
        torch.rand(skipped, generator=generator)
        return torch.rand(3, generator=generator)

    model_parallel_cuda_manual_seed(5)
    tracker, own = get_cuda_rng_tracker(), 9 + 2718 + group.rank()
    with tracker.fork("data-parallel-rng"):
        with tracker.fork():
            model_parallel_cuda_manual_seed(9)
            assert_bit_equal(torch.rand(3), drawn(own))
        assert_bit_equal(torch.rand(3), drawn(9))
    assert_bit_equal(torch.rand(3), drawn(9))
    with tracker.fork():
        assert_bit_equal(torch.rand(3), drawn(own, skipped=3))
    with tracker.fork("data-parallel-rng"):
        assert_bit_equal(torch.rand(3), drawn(9, skipped=3))
    # A block that seeds nothing draws from the default generator, and the stream goes on after it.
    with tracker.fork():
        with tracker.outside():
            assert_bit_equal(torch.rand(3), drawn(9, skipped=3))
        assert_bit_equal(torch.rand(3), drawn(own, skipped=6))
