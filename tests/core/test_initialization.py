"""Weights start with the dense layer's values, bit for bit, whatever the number of ranks."""

import functools
import math

import pytest
import torch
from harness.parity import assert_bit_equal
from torch.nn import init
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.core import initialization
from shardwise.core.initialization import (
    CounterNormal,
    Normal,
    init_method_normal,
    initialize_shard_,
    scaled_init_method_normal,
)
from shardwise.core.sharding import ParamLayout

SEED = 99


def shards_of(layout, init_method, dtype=torch.float32):
    """What every rank gets, and the generator's state afterwards, which must be the same on all."""
    shards, states = [], []
    for rank in range(layout.world_size):
        torch.manual_seed(SEED)
        shard = torch.full(layout.local_shape(rank), 7.0).to(dtype)
        assert initialize_shard_(shard, layout, rank, init_method) is shard
        shards.append(shard)
        states.append(torch.get_rng_state())
    for state in states[1:]:
        assert_bit_equal(state, states[0])
    return shards, states[0]


def assert_equals_dense(layout, init_method, dense_init, dtype=torch.float32):
    shards, state = shards_of(layout, init_method, dtype)
    torch.manual_seed(SEED)
    dense = torch.empty(layout.global_shape, dtype=dtype)
    dense_init(dense)
    assert_bit_equal(layout.assemble(shards), dense)
    for rank, shard in enumerate(shards):
        assert_bit_equal(shard, layout.take(dense, rank), name=f"shard of rank {rank}")
    assert_bit_equal(torch.get_rng_state(), state, name="state of the generator")


# One width of each way in which PyTorch draws stands for the other where a test takes long.
DTYPES = [
    torch.float32,
    torch.bfloat16,
    pytest.param(torch.float64, marks=pytest.mark.slow),
    pytest.param(torch.float16, marks=pytest.mark.slow),
]
KNOWN = {
    "normal": functools.partial(init.normal_, mean=-1.0, std=0.3),
    "bare normal": init.normal_,
    "own normal": Normal(0.2, mean=0.5),
    "uniform": functools.partial(init.uniform_, a=-0.3, b=2.0),
    "bare uniform": init.uniform_,
    "xavier uniform": init.xavier_uniform_,
    "xavier normal": functools.partial(init.xavier_normal_, gain=2.0),
    "kaiming uniform": functools.partial(init.kaiming_uniform_, a=math.sqrt(5)),
    "kaiming normal": functools.partial(init.kaiming_normal_, mode="fan_out", nonlinearity="relu"),
    "constant": functools.partial(init.constant_, val=0.7),
    "zeros": init.zeros_,
    "ones": init.ones_,
}
TRUNCATED = {
    "truncated": init.trunc_normal_,
    "narrow": functools.partial(init.trunc_normal_, std=0.02, a=-0.01, b=0.01),
    "far": functools.partial(init.trunc_normal_, std=1.0, a=1.5, b=2.0),
}


@pytest.mark.sample(20)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("init_method", KNOWN.values(), ids=KNOWN)
@pytest.mark.parametrize("block", [pytest.param(1 << 20, marks=pytest.mark.slow), 256])
def test_known_methods_equal_dense(monkeypatch, init_method, dtype, block):
    monkeypatch.setattr(initialization, "_BLOCK_ELEMENTS", block)
    # Of the whole weight's fans: a part of 7 by 3 has others.
    for shape in ((257, 12), (14, 6), (34, 4, 3)):
        for dim in (0, 1):
            for tp in (1, 2, 3, 4):
                layout = ParamLayout.split(shape, dim, tp, stride=2 if shape[dim] % 2 == 0 else 1)
                assert_equals_dense(layout, init_method, init_method, dtype)


@pytest.mark.parametrize("init_method", KNOWN.values(), ids=KNOWN)
def test_no_rank_is_given_the_whole_of_a_known_method(monkeypatch, init_method):
    monkeypatch.setattr(initialization, "_BLOCK_ELEMENTS", 4096)
    layout = ParamLayout.split((3001, 20), 1, 4)
    shard = torch.empty(layout.local_shape(2))
    with Allocations() as allocations:
        initialize_shard_(shard, layout, 2, init_method)
    assert max(allocations.sizes) <= 4096 + 16 * 20


class Allocations(TorchDispatchMode):
    """How many elements each new tensor has."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::clone", "aten::cat"):
            self.sizes.append(result.numel())
        return result


@pytest.mark.parametrize("init_method", TRUNCATED.values(), ids=TRUNCATED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_truncated_normals_are_the_same_at_every_size(monkeypatch, init_method, dtype):
    shape = (257, 12)
    for dim in (0, 1):
        for tp in (1, 2, 3, 4):
            # One block is drawn as PyTorch draws it.
            assert_equals_dense(ParamLayout.split(shape, dim, tp), init_method, init_method, dtype)
    monkeypatch.setattr(initialization, "_BLOCK_ELEMENTS", 256)
    layouts = [ParamLayout.split(shape, dim, tp) for dim in (0, 1) for tp in (1, 2, 3, 4)]
    wholes = [layout.assemble(shards_of(layout, init_method, dtype)[0]) for layout in layouts]
    for whole in wholes[1:]:
        assert_bit_equal(whole, wholes[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("init_method", [*KNOWN.values(), init.orthogonal_], ids=[*KNOWN, "orthogonal"])
def test_drawn_on_the_cpu(monkeypatch, init_method, dtype):
    """In fp32 or wider, then rounded: what any device would be given."""
    monkeypatch.setattr(initialization, "_BLOCK_ELEMENTS", 64)
    shape = (38, 12)
    torch.manual_seed(SEED)
    dense = torch.empty(shape, dtype=torch.promote_types(dtype, torch.float32))
    init_method(dense)
    state = torch.get_rng_state()
    layouts = [ParamLayout.split(shape, dim, tp) for dim in (0, 1) for tp in (1, 3)]
    for layout in [*layouts, ParamLayout.replicated(shape, 2)]:
        for rank in range(layout.world_size):
            torch.manual_seed(SEED)
            shard = torch.empty(layout.local_shape(rank), dtype=dtype)
            initialize_shard_(shard, layout, rank, init_method, on_cpu=True)
            assert_bit_equal(shard, layout.take(dense, rank).to(dtype).contiguous())
            assert_bit_equal(torch.get_rng_state(), state)


def test_a_generator_of_the_caller():
    shape = (38, 12)
    for function in (init.normal_, init.xavier_uniform_, init.kaiming_normal_):
        dense = function(torch.empty(shape), generator=torch.Generator().manual_seed(1))
        for tp in (1, 3):
            layout = ParamLayout.split(shape, 0, tp)
            shards = [
                initialize_shard_(
                    torch.empty(layout.local_shape(rank)),
                    layout,
                    rank,
                    functools.partial(function, generator=torch.Generator().manual_seed(1)),
                )
                for rank in range(tp)
            ]
            assert_bit_equal(layout.assemble(shards), dense)


def dense_normal(std):
    return lambda tensor: torch.nn.init.normal_(tensor, 0.0, std)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "block", [pytest.param(1, marks=pytest.mark.slow), 256, pytest.param(1000, marks=pytest.mark.slow)]
)
def test_normal_equals_dense_over_many_blocks(monkeypatch, dtype, block):
    monkeypatch.setattr(initialization, "_BLOCK_ELEMENTS", block)
    # Last blocks of every kind: a whole one, a few rows, and fewer than the 16 values that PyTorch draws at once.
    for shape in [(1003, 37), (256, 3), (257, 3), (1029,), (1030, 1), (16, 1), (17, 1), (1041, 2), (48, 5, 3)]:
        for dim in range(len(shape)):
            for tp in (1, 2, 5):
                assert_equals_dense(ParamLayout.split(shape, dim, tp), Normal(1.5), dense_normal(1.5), dtype)


@pytest.mark.parametrize(("shape", "dim"), [((50257, 8), 0), ((2100, 1009), 0), ((2100, 1009), 1), ((2_200_003,), 0)])
def test_normal_equals_dense_at_sizes_of_real_layers(shape, dim):
    for tp in (1, 3):
        assert_equals_dense(ParamLayout.split(shape, dim, tp), Normal(0.02), dense_normal(0.02))


def test_stride_sizes_and_overlap(monkeypatch):
    monkeypatch.setattr(initialization, "_BLOCK_ELEMENTS", 64)
    layouts = [ParamLayout.split((74, 10), dim, tp, stride=2) for dim in (0, 1) for tp in (1, 2, 3, 4, 5)]
    layouts += [
        ParamLayout.split((74, 10), 0, 3, sizes=[40, 0, 34]),
        ParamLayout.split((74, 10), 1, 3, stride=2, sizes=[1, 4, 0]),
        ParamLayout((74, 10), 0, (((0, 50),), ((20, 74), (0, 3))), 2),
        # More ranks than rows.
        ParamLayout.split((3, 5), 0, 5),
        ParamLayout.replicated((74, 10), 3),
    ]
    for layout in layouts:
        assert_equals_dense(layout, Normal(0.5), dense_normal(0.5))


@pytest.mark.parametrize(
    "init_method",
    [
        init.orthogonal_,
        functools.partial(init.sparse_, sparsity=0.5),
        lambda tensor: tensor.copy_(torch.randperm(tensor.numel()).view(tensor.shape)),
    ],
    ids=["orthogonal", "sparse", "permutation"],
)
def test_an_arbitrary_method_is_given_the_whole(init_method):
    for dim in (0, 1):
        for tp in (1, 2, 3, 5):
            assert_equals_dense(ParamLayout.split((14, 6), dim, tp, stride=2), init_method, init_method)
    assert_equals_dense(ParamLayout.replicated((14, 6), 2), init_method, init_method)


class Recording(Normal):
    """A normal that remembers the sizes that it was asked for."""

    def __call__(self, tensor):
        Recording.drawn.append(tensor.numel())
        return super().__call__(tensor)


@pytest.mark.parametrize("dim", [0, 1])
def test_no_rank_draws_more_than_a_block_at_once(monkeypatch, dim):
    monkeypatch.setattr(initialization, "_BLOCK_ELEMENTS", 4096)
    layout = ParamLayout.split((3001, 20), dim, 4)
    monkeypatch.setattr(Recording, "drawn", [], raising=False)
    initialize_shard_(torch.empty(layout.local_shape(2)), layout, 2, Recording(1.0))
    assert sum(Recording.drawn) == 3001 * 20
    assert max(Recording.drawn) <= 4096 + 16
    assert len(Recording.drawn) >= 14


def test_where_draws_of_blocks_do_not_join_one_rank_draws_the_same_blocks(monkeypatch):
    # As on a GPU, where the numbers depend on the size of each draw.
    monkeypatch.setattr(initialization, "_blocks_continue_one_stream", lambda device: False)
    monkeypatch.setattr(initialization, "_BLOCK_ELEMENTS", 64)
    seen = []
    for tp in (1, 3):
        monkeypatch.setattr(Recording, "drawn", [], raising=False)
        layout = ParamLayout.split((70, 6), 0, tp)
        initialize_shard_(torch.empty(layout.local_shape(0)), layout, 0, Recording(1.0))
        seen.append(Recording.drawn)
    assert seen[0] == seen[1]
    assert len(seen[0]) > 1


@pytest.mark.parametrize("shape", [(74, 10), (3, 5), (13,), (1,), (33, 2, 5), (0, 5), (5, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_counter_normals_are_the_whole_parameters(shape, dtype):
    layouts = [ParamLayout.split(shape, dim, tp) for dim in range(len(shape)) for tp in (1, 2, 3, 5)]
    layouts += [ParamLayout.replicated(shape, 2)]
    if shape == (74, 10):
        layouts += [ParamLayout.split(shape, dim, 3, stride=2) for dim in (0, 1)]
        layouts += [ParamLayout.split(shape, 1, 3, stride=2, sizes=[1, 4, 0])]
        layouts += [ParamLayout(shape, 0, (((0, 50),), ((20, 74), (0, 3))), 2)]
    method = CounterNormal(0.5, mean=0.25)
    for layout in layouts:
        assert_equals_dense(layout, method, method, dtype)


def test_counter_normals_of_a_scalar_and_of_more_rows():
    torch.manual_seed(SEED)
    fewer = CounterNormal(1.0)(torch.empty(5, 7))
    torch.manual_seed(SEED)
    # A vocabulary that is padded otherwise starts with the same words.
    assert_bit_equal(CounterNormal(1.0)(torch.empty(9, 7))[:5], fewer)
    # The key is one number, however large the parameter.
    state = torch.get_rng_state()
    torch.manual_seed(SEED)
    assert CounterNormal(1.0)(torch.empty(())).item() == fewer[0, 0]
    assert_bit_equal(torch.get_rng_state(), state)
    assert not torch.equal(CounterNormal(1.0)(torch.empty(5, 7)), fewer)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_rank_computes_its_slice_and_no_more(monkeypatch, dim):
    """But for the counters at both ends of a row, each of which gives four numbers."""
    counters = []
    monkeypatch.setattr(initialization, "_normals", lambda key, rows, blocks: counted(counters, rows, blocks))
    layout = ParamLayout.split((301, 200), dim, 4)
    initialize_shard_(torch.empty(layout.local_shape(2)), layout, 2, CounterNormal(1.0))
    rows, columns = layout.local_shape(2)
    assert rows * columns // 4 <= sum(counters) <= rows * (columns // 4 + 2)


def counted(counters, rows, blocks):
    counters.append(len(rows) * len(blocks))
    return torch.zeros(len(rows), 4 * len(blocks), dtype=torch.float64)


def test_a_meta_tensor_draws_nothing():
    torch.manual_seed(SEED)
    before = torch.get_rng_state()
    shard = torch.empty(2, 3, device="meta")
    assert initialize_shard_(shard, ParamLayout.split((4, 3), 0, 2), 1, Normal(1.0)) is shard
    initialize_shard_(shard, ParamLayout.split((4, 3), 0, 2), 1, CounterNormal(1.0))
    assert_bit_equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0,)], ids=str)
def test_nothing_to_fill(shape):
    for dim in range(len(shape)):
        for tp in (1, 2):
            assert_equals_dense(ParamLayout.split(shape, dim, tp), Normal(1.0), dense_normal(1.0))


def test_the_parameter_takes_no_part_in_autograd():
    layout = ParamLayout.split((8, 3), 0, 2)
    param = torch.nn.Parameter(torch.empty(4, 3))
    initialize_shard_(param, layout, 1, Normal(1.0))
    assert param.grad_fn is None
    assert param.requires_grad


def test_normals_have_the_deviation_that_they_say():
    assert init_method_normal(0.02) == Normal(0.02)
    assert scaled_init_method_normal(0.02, 12) == Normal(0.02 / math.sqrt(24))
    assert scaled_init_method_normal(0.02, 12, multiplier=3.0) == Normal(0.02 / 6)
    torch.manual_seed(SEED)
    drawn = Normal(0.3)(torch.empty(200_000, dtype=torch.float64))
    # Five standard errors.
    assert abs(float(drawn.mean())) < 5 * 0.3 / math.sqrt(200_000)
    assert abs(float(drawn.std()) - 0.3) < 5 * 0.3 / math.sqrt(400_000)
