"""The moves under the names that programs call; what they compute is tested in ``collectives/test_regions.py``."""

import inspect

import pytest
import torch
from harness.parity import assert_bit_equal, assert_unmodified

from shardwise import parallel_state
from shardwise.errors import ShardingError, TopologyError
from shardwise.tensor_parallel import mappings

NAMES = [name for name in mappings.__all__ if name != "all_to_all"]


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


@pytest.mark.ranks(1, 2, 3)
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


def test_all_to_all_without_a_group():
    with pytest.raises(TopologyError, match="no group was given"):
        mappings.all_to_all(None, torch.ones(2, 2))


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


@pytest.mark.ranks(1, 2, 3)
def test_all_to_all(group):
    t, me = group.size(), group.rank()
    every = [integers(t, 2) for _ in range(t)]
    gradients = [integers(t, 2) for _ in range(t)]
    x = every[me].clone().requires_grad_()
    with assert_unmodified(x, gradients[me]):
        y = mappings.all_to_all(group, x)
        y.backward(gradients[me])
    assert_bit_equal(y.detach(), torch.stack([sent[me] for sent in every]))
    assert_bit_equal(x.grad, torch.stack([gradient[me] for gradient in gradients]))
    # Each rank keeps all that it has: rank r has r + 1 rows.
    own = integers(me + 1, 2)
    alone = [me + 1 if rank == me else 0 for rank in range(t)]
    assert_bit_equal(mappings.all_to_all(group, own, alone, alone), own)


def test_arguments_keep_their_order():
    expected = {
        "gather_from_sequence_parallel_region": [
            "input_",
            "tensor_parallel_output_grad",
            "group",
            "output_split_sizes",
        ],
        "reduce_scatter_to_sequence_parallel_region": ["input_", "group", "input_split_sizes"],
        "all_to_all": ["group", "input_", "output_split_sizes_", "input_split_sizes"],
    }
    for name in mappings.__all__:
        names = list(inspect.signature(getattr(mappings, name)).parameters)
        wanted = expected.get(name, ["input_", "group"])
        assert names[: len(wanted)] == wanted, name
