"""Random streams: which numbers the ranks share, and that none is drawn twice."""

import contextlib

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from harness.parity import assert_bit_equal
from hypothesis import given, settings

from shardwise import parallel_state, random
from shardwise.errors import ConfigError, TopologyError
from shardwise.random import DATA_PARALLEL_STREAM, TENSOR_PARALLEL_STREAM, RandomStreams, seed_streams, streams
from shardwise.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_data_parallel_rng_tracker_name,
    model_parallel_cuda_manual_seed,
)

SEEDS = {"a": 11, "b": 12, "c": 13}


def three_streams():
    result = RandomStreams()
    for name, seed in SEEDS.items():
        result.add(name, seed)
    return result


class EndOfBlockError(Exception):
    """Ends a block before its end."""


# A program: draws (how many) and blocks (of which stream, whether it ends in an error, what is inside).
PROGRAMS = st.recursive(
    st.integers(1, 3),
    lambda inside: st.tuples(st.sampled_from(sorted(SEEDS)), st.booleans(), st.lists(inside, max_size=4)),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(program=st.lists(PROGRAMS, max_size=5))
def test_streams_nested_in_any_way_go_on_where_they_were(program):
    tracker = three_streams()
    torch.manual_seed(10)
    # One generator for each stream tells what it must draw next; None is outside all.
    truth = {name: torch.Generator().manual_seed(seed) for name, seed in (SEEDS | {None: 10}).items()}

    def run(steps, live):
        for step in steps:
            if isinstance(step, int):
                assert torch.rand(step).tolist() == torch.rand(step, generator=truth[live]).tolist()
                continue
            name, fails, inside = step
            with contextlib.suppress(EndOfBlockError), tracker.fork(name):
                run(inside, name)
                if fails:
                    raise EndOfBlockError

    run(program, None)
    assert_bit_equal(torch.get_rng_state(), truth[None].get_state())
    for name, state in tracker.get_states().items():
        assert_bit_equal(state["cpu"], truth[name].get_state(), name=name)


def test_no_number_is_drawn_twice():
    tracker = three_streams()
    torch.manual_seed(10)
    drawn = []
    for _ in range(2):
        with tracker.fork("a"):
            drawn += torch.rand(50, dtype=torch.float64).tolist()
            with tracker.fork("b"):
                drawn += torch.rand(50, dtype=torch.float64).tolist()
                with tracker.fork("a"):
                    drawn += torch.rand(50, dtype=torch.float64).tolist()
            with tracker.fork("a"):
                drawn += torch.rand(50, dtype=torch.float64).tolist()
            drawn += torch.rand(50, dtype=torch.float64).tolist()
        drawn += torch.rand(50, dtype=torch.float64).tolist()
    assert len(set(drawn)) == len(drawn) == 600


def test_making_streams_leaves_the_default_generator_alone():
    torch.manual_seed(42)
    before = torch.get_rng_state()
    three_streams()
    seed_streams(41, 0)
    model_parallel_cuda_manual_seed(41, tp_rank=3)
    assert_bit_equal(torch.get_rng_state(), before)


def test_states_can_be_taken_and_given_back():
    tracker = three_streams()
    with tracker.fork("a"):
        torch.rand(3)
        # Taken inside a block, the live stream's state is the live one.
        states = tracker.get_states()
        expected = torch.rand(5)
    assert set(states) == set(SEEDS)
    other = RandomStreams()
    assert not other.is_initialized()
    other.set_states(states)
    assert other.is_initialized()
    for _ in range(2):
        with other.fork("a"):
            assert_bit_equal(torch.rand(5), expected)
        other.set_states(states)
    tracker.reset()
    assert not tracker.is_initialized()
    assert tracker.get_states() == {}


def test_what_cannot_be():
    tracker = three_streams()
    for name in ("a", "default"):
        with pytest.raises(ConfigError, match=f"there is a random stream '{name}' already"):
            tracker.add(name, 1)
    message = r"there is no random stream 'd' among \['a', 'b', 'c'\]; call model_parallel_cuda_manual_seed\(\) first"
    before = torch.get_rng_state()
    with pytest.raises(TopologyError, match=message), tracker.fork("d"):
        pass
    with pytest.raises(TopologyError, match="no random stream 'model-parallel-rng'"), tracker.fork():
        pass
    with tracker.fork("a"), tracker.fork("b"):
        with pytest.raises(ConfigError, match="cannot reset the random streams while 'b' is in use"):
            tracker.reset()
        with pytest.raises(ConfigError, match="cannot set the random streams while 'b' is in use"):
            tracker.set_states({})
        with pytest.raises(TopologyError, match=r"among \['a', 'b', 'c', 'default'\]|among \['a', 'b', 'c'\]"):  # noqa: SIM117
            with tracker.fork("d"):
                pass
    assert_bit_equal(torch.get_rng_state(), before)


def test_a_stream_made_inside_another():
    tracker = three_streams()
    with tracker.fork("a"):
        first = torch.rand(1)
        tracker.add("d", 14)
        second = torch.rand(1)
        with tracker.fork("d"):
            assert_bit_equal(torch.rand(4), torch.rand(4, generator=torch.Generator().manual_seed(14)))
    expected = torch.rand(2, generator=torch.Generator().manual_seed(SEEDS["a"]))
    assert [first.item(), second.item()] == expected.tolist()


@pytest.mark.ranks(4)
def test_which_streams_the_ranks_share(group):
    parallel_state.initialize_model_parallel(2)
    model_parallel_cuda_manual_seed(1234)
    assert get_cuda_rng_tracker() is streams()
    assert get_data_parallel_rng_tracker_name() == DATA_PARALLEL_STREAM
    tp_rank = group.rank() % 2
    drawn = {}
    for name, seed in ((DATA_PARALLEL_STREAM, 1234), (TENSOR_PARALLEL_STREAM, 1234 + 2718 + tp_rank)):
        with streams().fork(name):
            drawn[name] = torch.rand(8)
        assert_bit_equal(drawn[name], torch.rand(8, generator=torch.Generator().manual_seed(seed)))
    everywhere = [None] * 4
    dist.all_gather_object(everywhere, {name: tuple(values.tolist()) for name, values in drawn.items()}, group=group)
    assert len({ranks[DATA_PARALLEL_STREAM] for ranks in everywhere}) == 1
    by_rank = [ranks[TENSOR_PARALLEL_STREAM] for ranks in everywhere]
    # Copies of the same shard draw alike, the two shards do not.
    assert by_rank[0] == by_rank[2]
    assert by_rank[1] == by_rank[3]
    assert by_rank[0] != by_rank[1]
    # Seeding anew starts anew.
    model_parallel_cuda_manual_seed(1234)
    with streams().fork():
        assert_bit_equal(torch.rand(8), drawn[TENSOR_PARALLEL_STREAM])


def test_a_rank_is_needed():
    with pytest.raises(TopologyError, match="not initialised"):
        model_parallel_cuda_manual_seed(1)


class FakeCuda:
    """The part of ``torch.cuda`` that streams use, on a CPU generator; starts when told to."""

    def __init__(self, monkeypatch):
        self.generator = torch.Generator().manual_seed(0)
        self.in_use = False
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: self.in_use)
        monkeypatch.setattr(torch.cuda, "manual_seed", self.generator.manual_seed)
        monkeypatch.setattr(torch.cuda, "get_rng_state", self.generator.get_state)
        monkeypatch.setattr(torch.cuda, "set_rng_state", self.generator.set_state)

    def rand(self):
        return torch.rand(4, generator=self.generator).tolist()


def seeded(seed):
    return torch.rand(4, generator=torch.Generator().manual_seed(seed)).tolist()


def test_the_device_s_generator_follows(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    cuda.in_use = True
    tracker = three_streams()
    default = cuda.generator.get_state()
    with tracker.fork("a"):
        assert cuda.rand() == seeded(SEEDS["a"])
        with tracker.fork("b"):
            assert cuda.rand() == seeded(SEEDS["b"])
        after = cuda.rand()
    with tracker.fork("a"):
        assert cuda.rand() != after
    assert_bit_equal(cuda.generator.get_state(), default)


def test_streams_older_than_the_device_s_use(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    tracker = three_streams()
    cuda.in_use = True
    before = cuda.generator.get_state()
    drawn = []
    for _ in range(2):
        with tracker.fork("a"):
            drawn.append(cuda.rand())
        with tracker.fork("b"):
            drawn.append(cuda.rand())
    assert drawn[:2] == [seeded(SEEDS["a"]), seeded(SEEDS["b"])]
    assert len({tuple(values) for values in drawn}) == 4
    assert_bit_equal(cuda.generator.get_state(), before)


def test_states_with_a_device_are_of_use_without(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    cuda.in_use = True
    states = three_streams().get_states()
    assert set(states["a"]) == {"cpu", "cuda"}
    cuda.in_use = False
    other = RandomStreams()
    other.set_states(states)
    before = cuda.generator.get_state()
    with other.fork("a"):
        assert torch.rand(4).tolist() == seeded(SEEDS["a"])
    assert_bit_equal(cuda.generator.get_state(), before)


def test_names_are_those_that_programs_know():
    assert (DATA_PARALLEL_STREAM, TENSOR_PARALLEL_STREAM) == ("data-parallel-rng", "model-parallel-rng")
    assert random.streams() is get_cuda_rng_tracker()
