"""The moves under the names that programs call; what they compute is tested in ``communication/test_regions.py``."""

import hypothesis.strategies as st
import pytest
import torch
from harness.parity import assert_bit_equal, assert_unmodified
from hypothesis import given, settings

from shardwise import parallel_state
from shardwise.core.errors import ShardingError, TopologyError
from shardwise.core.sharding import balanced_sizes
from shardwise.tensor_parallel import mappings

NAMES = [name for name in mappings.__all__ if not name.startswith("all_to_all")]


def result_of(name, shards, rank):
    """What a move must make of one tensor per rank."""
    total = torch.stack(shards).sum(0) if len({shard.shape for shard in shards}) == 1 else None
    t = len(shards)
    return {
        "copy_to_tensor_model_parallel_region": lambda: shards[rank],
        "reduce_from_tensor_model_parallel_region": lambda: total,
        "scatter_to_tensor_model_parallel_region": lambda: shards[rank].tensor_split(t, -1)[rank],
        "gather_from_tensor_model_parallel_region": lambda: torch.cat(shards, -1),
        "scatter_to_sequence_parallel_region": lambda: shards[rank].tensor_split(t, 0)[rank],
        "gather_from_sequence_parallel_region": lambda: torch.cat(shards, 0),
        "reduce_scatter_to_sequence_parallel_region": lambda: total.tensor_split(t, 0)[rank],
        "all_gather_last_dim_from_tensor_parallel_region": lambda: torch.cat(shards, -1),
        "reduce_scatter_last_dim_to_tensor_parallel_region": lambda: total.tensor_split(t, -1)[rank],
    }[name]()


def backward_of(name, gradients, rank):
    """What its backward must make of one gradient per rank; the same table, read from the right."""
    back = {
        "copy_to_tensor_model_parallel_region": "reduce_from_tensor_model_parallel_region",
        "reduce_from_tensor_model_parallel_region": "copy_to_tensor_model_parallel_region",
        "scatter_to_tensor_model_parallel_region": "gather_from_tensor_model_parallel_region",
        "gather_from_tensor_model_parallel_region": "scatter_to_tensor_model_parallel_region",
        "scatter_to_sequence_parallel_region": "gather_from_sequence_parallel_region",
        "gather_from_sequence_parallel_region": "reduce_scatter_to_sequence_parallel_region",
        "reduce_scatter_to_sequence_parallel_region": "gather_from_sequence_parallel_region",
        "all_gather_last_dim_from_tensor_parallel_region": "reduce_scatter_last_dim_to_tensor_parallel_region",
        "reduce_scatter_last_dim_to_tensor_parallel_region": "all_gather_last_dim_from_tensor_parallel_region",
    }
    return result_of(back[name], gradients, rank)


def integers(*shape):
    return torch.randint(-9, 10, shape).double()


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ambient", [False, True], ids=["", "ambient group"])
def test_forward_and_backward(group, name, ambient):
    t, me = group.size(), group.rank()
    move = getattr(mappings, name)
    if ambient:
        parallel_state.initialize_model_parallel(t)
        group = None
    shards = [integers(2 * t, 3, 2 * t) for _ in range(t)]
    x = shards[me].clone().requires_grad_()
    gradients = [integers(*result_of(name, shards, me).shape) for _ in range(t)]
    with assert_unmodified(x, gradients[me]):
        y = move(x, group=group)
        y.backward(gradients[me])
    assert_bit_equal(y.detach(), result_of(name, shards, me).contiguous())
    assert_bit_equal(x.grad, backward_of(name, gradients, me).contiguous())


@pytest.mark.parametrize("name", NAMES)
def test_no_group_at_all(name):
    with pytest.raises(TopologyError, match="no group was given and model parallelism is not initialised"):
        getattr(mappings, name)(torch.ones(2, 2))


@pytest.mark.ranks(2)
def test_all_to_all_must_be_given_its_group(group):
    parallel_state.initialize_model_parallel(2)
    for use_nccl_stream in (False, True):
        with pytest.raises(AssertionError, match="group is None; pass a group"):
            mappings.all_to_all(None, torch.ones(2, 2), use_nccl_stream=use_nccl_stream)
    exchanged = mappings.all_to_all(group, torch.tensor([0.0, 1.0]) + 10 * group.rank(), use_nccl_stream=True)
    assert exchanged.tolist() == [0.0 + group.rank(), 10.0 + group.rank()]


@pytest.mark.ranks(3)
def test_uneven_sizes(group):
    me = group.rank()
    sizes = [4, 0, 1]
    whole = integers(5, 2, 5)
    last, first = whole.split(sizes, -1)[me].contiguous(), whole.split(sizes, 0)[me].contiguous()
    assert_bit_equal(mappings.scatter_to_tensor_model_parallel_region(whole, group, sizes), last)
    assert_bit_equal(mappings.gather_from_tensor_model_parallel_region(last, group, sizes), whole)
    assert_bit_equal(mappings.all_gather_last_dim_from_tensor_parallel_region(last, group, sizes), whole)
    assert_bit_equal(mappings.scatter_to_sequence_parallel_region(whole, group, sizes), first)
    for partial in (True, False):
        gathered = mappings.gather_from_sequence_parallel_region(first, partial, group, output_split_sizes=sizes)
        assert_bit_equal(gathered, whole)
    scattered = mappings.reduce_scatter_to_sequence_parallel_region(whole, group, input_split_sizes=sizes)
    assert_bit_equal(scattered, 3 * first)
    scattered = mappings.reduce_scatter_last_dim_to_tensor_parallel_region(whole, group, sizes)
    assert_bit_equal(scattered, 3 * last)
    # By the balanced rule where none are given: 2, 2, 1.
    assert mappings.scatter_to_tensor_model_parallel_region(whole, group).shape == (5, 2, 2 - me // 2)
    with pytest.raises(ShardingError, match=r"sizes \[4, 0, 2\] must be 3 counts, one per rank, that sum to 5"):
        mappings.scatter_to_sequence_parallel_region(whole, group, [4, 0, 2])


@pytest.mark.ranks(2)
def test_gather_of_what_every_rank_computes_alike_only_splits_its_gradient(group):
    x = torch.ones(2, 3, requires_grad=True)
    gradient = torch.arange(12.0).view(4, 3)
    mappings.gather_from_sequence_parallel_region(x, False, group).backward(gradient)
    assert_bit_equal(x.grad, gradient[2 * group.rank() : 2 * group.rank() + 2])
    x.grad = None
    mappings.gather_from_sequence_parallel_region(x, True, group).backward(gradient)
    assert_bit_equal(x.grad, 2 * gradient[2 * group.rank() : 2 * group.rank() + 2])


def columns_and_rows(group, n, h):
    """A whole ``[n, h]`` tensor, this rank's rows of it, and its columns."""
    whole = integers(n, h)
    t, me = group.size(), group.rank()
    rows, columns = whole.split(balanced_sizes(n, t), 0)[me], whole.split(balanced_sizes(h, t), 1)[me]
    return whole, rows.contiguous(), columns.contiguous()


@pytest.mark.ranks(3)
@settings(max_examples=15)
@given(n=st.integers(0, 9), h=st.integers(1, 9), even=st.booleans(), strided=st.booleans())
def test_tokens_for_features_and_back(group, n, h, even, strided):
    if even:
        n, h = n * group.size(), h * group.size()
    _, rows, columns = columns_and_rows(group, n, h)
    _, row_gradient, column_gradient = columns_and_rows(group, n, h)
    if strided:
        rows, columns, row_gradient, column_gradient = (
            tensor.t().contiguous().t() for tensor in (rows, columns, row_gradient, column_gradient)
        )
    for function, given_, expected, gradient, back, known in (
        (mappings.all_to_all_sp2hp, rows, columns, column_gradient, row_gradient, {"num_tokens": n}),
        (mappings.all_to_all_hp2sp, columns, rows, row_gradient, column_gradient, {"hidden_size": h}),
    ):
        x = given_.clone().requires_grad_()
        with assert_unmodified(x, gradient):
            y = function(x, group, **({} if even else known))
            y.backward(gradient)
        assert_bit_equal(y.detach(), expected.contiguous())
        # The exchange is a permutation: its transpose is its inverse.
        assert_bit_equal(x.grad.contiguous(), back.contiguous())


@pytest.mark.ranks(2)
def test_tokens_for_features_of_any_shape_and_what_cannot_be(group):
    parallel_state.initialize_model_parallel(2)
    _, rows, columns = columns_and_rows(group, 8, 4)
    assert_bit_equal(mappings.all_to_all_sp2hp(rows.view(2, 2, 4)), columns)
    assert_bit_equal(mappings.all_to_all_hp2sp(columns.view(2, 4, 2)), rows)
    with pytest.raises(ShardingError, match="5 is not divisible by 2"):
        mappings.all_to_all_sp2hp(integers(4, 5))
    with pytest.raises(ShardingError, match="5 is not divisible by 2"):
        mappings.all_to_all_hp2sp(integers(5, 4))
    with pytest.raises(ShardingError, match=r"rank . of 2 has 4 tokens; its balanced share of 12 is 6"):
        mappings.all_to_all_sp2hp(rows, num_tokens=12)
    with pytest.raises(ShardingError, match=r"rank . of 2 has 2 features; its balanced share of 12 is 6"):
        mappings.all_to_all_hp2sp(columns, hidden_size=12)


@pytest.mark.ranks(1, 3)
def test_the_reusable_buffer(group):
    parallel_state.initialize_model_parallel(group.size())
    t, me = group.size(), group.rank()
    shards, whole = [integers(2, 3) for _ in range(t)], integers(2 * t, 3)
    expected = torch.cat(shards)
    for move, given_, result in (
        (mappings.gather_from_sequence_parallel_region, shards[me], expected),
        (mappings.reduce_scatter_to_sequence_parallel_region, whole, t * whole.split(2)[me]),
    ):
        x = given_.clone().requires_grad_()
        with assert_unmodified(x):
            first = move(x, use_global_buffer=True)
        assert_bit_equal(first.detach(), result)
        first.sum().backward()
        address = first.data_ptr()
        assert address == parallel_state.get_global_memory_buffer().get_tensor((1,), x.dtype, "mpu").data_ptr()
        second = move(2 * given_, use_global_buffer=True)
        assert second.data_ptr() == address
        # As said, it is overwritten.
        assert_bit_equal(first.detach(), 2 * result)
        # Without the buffer nothing is shared.
        third = move(given_)
        assert third.data_ptr() != address


@pytest.mark.ranks(2)
def test_a_backward_that_needs_an_overwritten_buffer_is_refused(group):
    """Not computed from the wrong values."""
    parallel_state.initialize_model_parallel(2)
    x = integers(2, 3).requires_grad_()
    squares = mappings.gather_from_sequence_parallel_region(x, use_global_buffer=True) ** 2
    mappings.gather_from_sequence_parallel_region(integers(2, 3), use_global_buffer=True)
    with pytest.raises(RuntimeError, match="modified inplace"):
        squares.sum().backward()


@pytest.mark.ranks(2)
def test_a_buffer_needs_a_place(group):
    with pytest.raises(TopologyError):
        mappings.gather_from_sequence_parallel_region(integers(2, 3), group=group, use_global_buffer=True)
