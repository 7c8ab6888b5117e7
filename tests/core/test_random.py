"""Random streams: which numbers the ranks share, and that none is drawn twice."""

import contextlib

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from harness.parity import assert_bit_equal
from hypothesis import given, settings

from shardwise import parallel_state
from shardwise.core import random
from shardwise.core.errors import ConfigError, TopologyError
from shardwise.core.random import (
    DATA_PARALLEL_STREAM,
    EXPERT_PARALLEL_STREAM,
    GLOBAL_STREAM,
    TENSOR_PARALLEL_STREAM,
    RandomStreams,
    expert_seed,
    seed_streams,
    streams,
)
from shardwise.tensor_parallel import random as tp_random
from shardwise.tensor_parallel.random import (
    CudaRNGStatesTracker,
    convert_cuda_rng_state,
    get_all_rng_states,
    get_cuda_rng_tracker,
    get_data_parallel_rng_tracker_name,
    get_expert_parallel_rng_tracker_name,
    initialize_rng_tracker,
    is_graph_safe_cuda_rng_tracker,
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


@settings(max_examples=150)
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
        assert_bit_equal(state, truth[name].get_state(), name=name)


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


USED_ON_CPU = r"the CPU's generator was used inside fork\('.'\), and this program computes on a GPU"
MARK = torch.zeros(1, dtype=torch.uint8)


class FakeCuda:
    """The part of ``torch.cuda`` that streams use, on a CPU generator; starts when told to."""

    def __init__(self, monkeypatch):
        self.generator = torch.Generator().manual_seed(0)
        self.in_use = False
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: self.in_use)
        monkeypatch.setattr(torch.cuda, "manual_seed", self.generator.manual_seed)
        monkeypatch.setattr(torch.cuda, "initial_seed", self.generator.initial_seed)
        # A byte more, so that a state tells its device by its size, as a GPU's does.
        monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.cat([self.generator.get_state(), MARK]))
        monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: self.generator.set_state(state[:-1]))

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


def drawn_in(tracker, name, fails=False):
    with tracker.fork(name):
        drawn = torch.rand(4)
        if fails:
            raise EndOfBlockError
    return drawn.tolist()


def test_numbers_of_the_cpu_inside_a_block_of_a_gpu_program_are_told(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    tracker = three_streams()
    with tracker.fork("a"):
        torch.rand(1)
    cuda.in_use = True
    with tracker.fork("a"):
        cuda.rand()
    before = torch.get_rng_state()
    with pytest.warns(UserWarning, match=USED_ON_CPU) as caught:
        drawn_in(tracker, "a")
    assert [warning.filename for warning in caught] == [__file__]
    assert_bit_equal(torch.get_rng_state(), before)
    # A block that fails says only why.
    with pytest.raises(EndOfBlockError):
        drawn_in(tracker, "a", fails=True)


def test_states_are_those_of_the_device_that_computes(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    cuda.in_use = True
    tracker = three_streams()
    with tracker.fork("a"):
        cuda.rand()
        expected = cuda.generator.get_state()
        tail = cuda.rand()
        cuda.generator.set_state(expected)
    states = tracker.get_states()
    assert_bit_equal(states["a"], torch.cat([expected, MARK]))
    other = RandomStreams()
    other.set_states(states)
    before = torch.get_rng_state(), cuda.generator.get_state()
    with other.fork("a"):
        assert cuda.rand() == tail
    other.set_states(states)
    # The CPU's numbers, which one state per stream does not tell, begin where the seed has them begin.
    with pytest.warns(UserWarning, match=USED_ON_CPU):
        assert drawn_in(other, "a") == seeded(SEEDS["a"])
    assert_bit_equal(torch.get_rng_state(), before[0])
    assert_bit_equal(cuda.generator.get_state(), before[1])


@pytest.mark.filterwarnings("ignore:the CPU's generator was used")
def test_snapshots_hold_every_device(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    cuda.in_use = True
    tracker = three_streams()

    def draw():
        with tracker.fork("b"):
            inside = torch.rand(2).tolist() + cuda.rand()
        return torch.rand(2).tolist() + cuda.rand() + inside

    with tracker.fork("a"):
        state = tracker.snapshot()
        first = draw()
        tracker.add("d", 14)
    assert draw() != first
    outside = tracker.snapshot()
    tracker.restore(state)
    # "a" is in use again, "d" is not there yet.
    assert draw() == first
    assert set(tracker.get_states()) == set(SEEDS)
    tracker.add("d", 14)
    tracker.restore(outside)
    expected = tracker.get_states()
    tracker.reset()
    tracker.restore(outside)
    for name, value in tracker.get_states().items():
        assert_bit_equal(value, expected[name])


def test_the_device_s_default_generator_is_seeded_and_the_cpu_s_is_not(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    cuda.in_use = True
    torch.manual_seed(42)
    before = torch.get_rng_state()
    model_parallel_cuda_manual_seed(41, tp_rank=3)
    assert cuda.rand() == seeded(41)
    assert_bit_equal(torch.get_rng_state(), before)


def test_graphable_streams_where_no_graph_can_be():
    tracker = CudaRNGStatesTracker(use_cudagraphable_rng=True)
    tracker.add("a", 11)
    with tracker.fork("a"):
        torch.rand(3)
        states = tracker.get_states()
        expected = torch.rand(4)
    assert_bit_equal(torch.rand(4, generator=states["a"]), expected)
    tracker.set_states({"b": torch.Generator().manual_seed(5)})
    with tracker.fork("b"):
        assert torch.rand(4).tolist() == seeded(5)


class FakeGenerator(torch.Generator):
    """A GPU's generator: it may share its state with others, and be made to go on from theirs."""

    device = torch.device("cuda")

    def sharing(self, inner):
        self.inner = inner
        return self

    def graphsafe_get_state(self):
        return FakeGenerator().sharing(self.inner)

    def graphsafe_set_state(self, other):
        self.inner = other.inner

    def clone_state(self):
        return FakeGenerator().sharing(torch.Generator().set_state(self.inner.get_state()))

    def manual_seed(self, seed):
        self.inner.manual_seed(seed)
        return self

    def get_state(self):
        return self.inner.get_state()

    def set_state(self, state):
        self.inner.set_state(state)
        return self

    def rand(self):
        return torch.rand(4, generator=self.inner).tolist()


def test_a_graph_knows_the_generators_of_its_streams(monkeypatch):
    """What a captured graph draws from is the generator that it registered, so a fork changes whose turn it is only."""
    cuda = FakeCuda(monkeypatch)
    cuda.in_use = True
    gpu = FakeGenerator().sharing(cuda.generator)
    monkeypatch.setattr(torch.cuda, "default_generators", (gpu,))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    tracker = CudaRNGStatesTracker(use_cudagraphable_rng=True)
    default = gpu.inner
    tracker.add("a", 11)
    tracker.add("b", 12)
    registered = tracker.get_states()
    assert gpu.inner is default
    with tracker.fork("a"):
        assert gpu.inner is registered["a"].inner
        assert gpu.rand() == seeded(11)
        with tracker.fork("b"):
            assert gpu.inner is registered["b"].inner
        assert gpu.inner is registered["a"].inner
    assert gpu.inner is default
    # It went on in place.
    assert registered["a"].inner.get_state().tolist() == tracker.get_states()["a"].get_state().tolist()

    def draw():
        with tracker.fork("a"):
            inside = gpu.rand()
        return inside, gpu.rand()

    snapshot = tracker.snapshot()
    first = draw()
    assert draw() != first
    tracker.restore(snapshot)
    assert draw() == first
    assert tracker.get_states()["a"].inner is registered["a"].inner
    other = CudaRNGStatesTracker(use_cudagraphable_rng=True)
    other.set_states(registered)
    with other.fork("b"):
        assert gpu.inner is registered["b"].inner


def test_graphable_streams_older_than_the_device_s_use(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    tracker = CudaRNGStatesTracker(use_cudagraphable_rng=True)
    tracker.add("a", 11)
    cuda.in_use = True
    gpu = FakeGenerator().sharing(cuda.generator)
    monkeypatch.setattr(torch.cuda, "default_generators", (gpu,))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    before = gpu.get_state()
    with tracker.fork("a"):
        assert gpu.rand() == seeded(11)
    assert_bit_equal(gpu.get_state(), before)


def test_names_are_those_that_programs_know():
    names = (DATA_PARALLEL_STREAM, TENSOR_PARALLEL_STREAM, EXPERT_PARALLEL_STREAM)
    assert names == ("data-parallel-rng", "model-parallel-rng", "expert-parallel-rng")
    private = (
        tp_random._DATA_PARALLEL_RNG_TRACKER_NAME,
        tp_random._MODEL_PARALLEL_RNG_TRACKER_NAME,
        tp_random._EXPERT_PARALLEL_RNG_TRACKER_NAME,
    )
    assert private == names
    assert get_expert_parallel_rng_tracker_name() == EXPERT_PARALLEL_STREAM
    assert random.streams() is get_cuda_rng_tracker()


def test_the_tracker_as_programs_use_it():
    tracker = CudaRNGStatesTracker()
    tracker.set_states({"state1": 1234})
    assert tracker.get_states()["state1"] == 1234
    with pytest.raises(ConfigError, match="'state1' was set to 1234, which is no generator's state"):  # noqa: SIM117
        with tracker.fork("state1"):
            pass
    tracker.reset()
    assert tracker.get_states() == {}
    tracker.add("state2", 1111)
    torch.manual_seed(1111)
    assert_bit_equal(tracker.get_states()["state2"], torch.get_rng_state())
    with pytest.raises(ConfigError, match="'state3': there is a stream with seed 1111 already"):
        tracker.add("state3", 1111)
    with pytest.raises(ConfigError, match="there is a random stream 'state2' already"):
        tracker.add("state2", 111)
    assert set(tracker.get_states()) == set(tracker.states_) == {"state2"}
    assert tracker.seeds_ == {1111}
    with pytest.raises(TypeError, match="does not support item assignment"):
        tracker.states_["state2"] = 0
    # A copy: whoever writes to it does not change the stream.
    tracker.get_states()["state2"].zero_()
    with tracker.fork("state2"):
        assert torch.rand(4).tolist() == seeded(1111)
    tracker.reset()
    tracker.add("state3", 1111)


def test_states_as_generators_and_as_tensors():
    plain, graphable = CudaRNGStatesTracker(), CudaRNGStatesTracker(use_cudagraphable_rng=True)
    assert (is_graph_safe_cuda_rng_tracker(plain), is_graph_safe_cuda_rng_tracker(graphable)) == (False, True)
    plain.add("state", 7)
    state = plain.states_["state"]
    assert convert_cuda_rng_state(state) is state
    generator = convert_cuda_rng_state(state, to_graphable=True)
    assert convert_cuda_rng_state(generator, to_graphable=True) is generator
    assert_bit_equal(convert_cuda_rng_state(generator), state)
    graphable.set_states({"state": generator})
    with graphable.fork("state"):
        assert torch.rand(4).tolist() == seeded(7)
    plain.set_states({"state": graphable.states_["state"]})
    with plain.fork("state"):
        assert torch.rand(4).tolist() != seeded(7)
    with pytest.raises(ConfigError, match=r"a tensor or a torch\.Generator, not int"):
        convert_cuda_rng_state(7)


@pytest.fixture
def ambient_kept():
    held, chosen = random._AMBIENT.streams, random._AMBIENT.chosen
    yield
    random._AMBIENT.streams, random._AMBIENT.chosen = held, chosen


@pytest.mark.usefixtures("ambient_kept")
def test_choosing_the_kind_of_streams():
    initialize_rng_tracker(force_reset=True)
    first = streams()
    seed_streams(5, 0)
    assert get_cuda_rng_tracker() is first
    # Chosen once, a later choice changes nothing unless forced.
    assert get_cuda_rng_tracker(inference_rng_tracker=True) is first
    assert set(get_all_rng_states()) == {DATA_PARALLEL_STREAM, TENSOR_PARALLEL_STREAM, EXPERT_PARALLEL_STREAM}
    model_parallel_cuda_manual_seed(5, inference_rng_tracker=True, tp_rank=0, force_reset_rng=True)
    idle = get_cuda_rng_tracker()
    assert idle is not first
    idle.add("a", 1)
    idle.set_states({"a": 1})
    assert not idle.is_initialized()
    assert get_all_rng_states() == {}
    before = torch.get_rng_state()
    with idle.fork("no such stream"):
        assert_bit_equal(torch.get_rng_state(), before)
    with pytest.warns(UserWarning, match="this library's own random streams are used"):
        assert get_cuda_rng_tracker(use_te_rng_tracker=True) is idle
    model_parallel_cuda_manual_seed(5, tp_rank=0, force_reset_rng=True)
    assert not streams().is_inference_rng_tracker


@pytest.mark.usefixtures("ambient_kept")
def test_streams_seeded_before_a_choice_stay():
    random._AMBIENT.streams, random._AMBIENT.chosen = RandomStreams(), False
    seed_streams(5, 0)
    seeded_first = streams()
    assert get_cuda_rng_tracker() is seeded_first


def test_seeds_are_those_that_programs_know():
    assert expert_seed(7, 2, 3) == 7 + 1024 + 203
    model_parallel_cuda_manual_seed(7, tp_rank=1, ep_rank=2, etp_rank=3)
    for name, seed in (
        (DATA_PARALLEL_STREAM, 7),
        (TENSOR_PARALLEL_STREAM, 7 + 2718 + 1),
        (EXPERT_PARALLEL_STREAM, 7 + 1024 + 200 + 3),
    ):
        with streams().fork(name):
            assert torch.rand(4).tolist() == seeded(seed)


def test_no_two_ranks_draw_alike_where_the_seeds_would_collide():
    # By the sums alone tensor-parallel rank 6 and expert rank 17 would have one seed: here in one process, and in
    # different ones.
    model_parallel_cuda_manual_seed(7, tp_rank=6, ep_rank=17, etp_rank=0)
    drawn = {}
    for name in (TENSOR_PARALLEL_STREAM, EXPERT_PARALLEL_STREAM):
        with streams().fork(name):
            drawn[name] = torch.rand(4).tolist()
    assert drawn[TENSOR_PARALLEL_STREAM] == seeded(7 + 2718 + 6)
    assert drawn[EXPERT_PARALLEL_STREAM] != drawn[TENSOR_PARALLEL_STREAM]
    seeds = {expert_seed(7, ep, etp) for ep in range(64) for etp in range(128)}
    assert len(seeds) == 64 * 128
    assert not seeds & {7 + 2718 + tp for tp in range(10000)}
    assert 7 not in seeds


@pytest.mark.ranks(4)
def test_experts_have_streams_of_their_own(group):
    parallel_state.initialize_model_parallel(2, expert_model_parallel_size=2, expert_tensor_parallel_size=1)
    model_parallel_cuda_manual_seed(9, rng="global")
    topology = parallel_state.get_topology()
    assert (topology.rank("ep"), topology.rank("expt_tp")) == (group.rank() % 2, 0)
    drawn = {}
    for name in (EXPERT_PARALLEL_STREAM, GLOBAL_STREAM):
        with streams().fork(name):
            drawn[name] = torch.rand(4).tolist()
    assert drawn[EXPERT_PARALLEL_STREAM] == seeded(9 + 1024 + 100 * topology.rank("ep"))
    everywhere = [None] * 4
    dist.all_gather_object(everywhere, drawn[GLOBAL_STREAM], group=group)
    assert everywhere == [everywhere[0]] * 4


def test_the_rule_is_part_of_the_streams():
    seed_streams(3, 0, rng="global")
    assert streams().rule == "global"
    states = streams().get_states()
    seed_streams(3, 0)
    assert streams().rule == "per_rank"
    streams().set_states(states)
    assert streams().rule == "global"
    with pytest.raises(ConfigError, match="rng is 'local'; it must be 'per_rank' or 'global'"):
        seed_streams(3, 0, rng="local")
    streams().reset()


def test_a_layers_numbers_do_not_depend_on_the_layers_beside_it():
    def drawn(layers):
        seed_streams(3, 0, rng="global")
        numbers = {}
        for layer in layers:
            with streams().fork(streams().global_stream(layer)):
                numbers[layer] = torch.rand(2).tolist()
        return numbers

    whole = drawn([None, 1, 2, 3])
    # A later stage has only some of them, and no embedding.
    assert drawn([2, 3]) == {layer: whole[layer] for layer in (2, 3)}
    assert len({tuple(numbers) for numbers in whole.values()}) == 4
    seed_streams(3, 0)
    assert streams().global_stream(2) == "global-rng"
