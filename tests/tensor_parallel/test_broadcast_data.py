"""``broadcast_data``: what the first rank has, on every rank; what is wrong with it, on every rank too."""

import pytest
import torch
import torch.distributed as dist
from harness.parity import assert_bit_equal, assert_unmodified

from shardwise import parallel_state
from shardwise.core.communication import collectives
from shardwise.core.errors import DataError, DesyncError, TopologyError
from shardwise.tensor_parallel import data as data_module
from shardwise.tensor_parallel.data import _build_key_size_numel_dictionaries, _check_data_types, broadcast_data


def batch(dtype):
    generator = torch.Generator().manual_seed(4)

    def draw(*shape):
        return torch.randint(0, 2, shape, generator=generator).to(dtype)

    return {
        "flat": draw(7),
        "scalar": draw(),
        "six dimensions": draw(2, 1, 3, 1, 2, 2),
        "none": draw(0, 3),
        "none at all": draw(0),
        "not contiguous": draw(5, 3).t(),
        "part": draw(4, 4)[1:, ::2],
        "left out": torch.zeros(2, dtype=torch.float16),
    }


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.int16, torch.complex64], ids=str
)
@pytest.mark.parametrize("others", ["None", "other values"])
def test_every_rank_has_the_first_one_s_tensors(group, dtype, others):
    expected = batch(dtype)
    keys = [key for key in expected if key != "left out"]
    data = expected
    if group.rank() != 0:
        data = None if others == "None" else {key: torch.zeros(1) for key in keys}
    with assert_unmodified(*expected.values()):
        received = broadcast_data(keys, data, dtype, group)
    assert list(received) == keys
    for key, tensor in received.items():
        assert tensor.device.type == "cpu"
        assert_bit_equal(tensor, expected[key], name=key)
        # Nobody's input: writing to it changes nothing.
        tensor.zero_()
    assert_bit_equal(expected["flat"], batch(dtype)["flat"])
    assert broadcast_data([], {}, dtype, group) == {}


@pytest.mark.ranks(4)
def test_everything_goes_over_the_given_group(group):
    parallel_state.initialize_model_parallel(4)
    # Pairs {0, 2} and {1, 3}, neither the ambient group nor with global rank 0 as every pair's first.
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    own = pairs[group.rank() % 2]
    # One pair only: a collective over any other group would wait for the other one.
    if group.rank() % 2 == 1:
        data = {"x": torch.full((2, 3), 5)} if group.rank() == 1 else None
        assert_bit_equal(broadcast_data(["x"], data, torch.int64, own)["x"], torch.full((2, 3), 5))
    dist.barrier()
    data = {"x": torch.full((3,), 7)} if group.rank() == 0 else None
    assert_bit_equal(broadcast_data(["x"], data, torch.int64)["x"], torch.full((3,), 7))


@pytest.mark.ranks(2)
def test_one_payload(group, monkeypatch):
    numbers = []
    broadcast = collectives.broadcast_

    def watched(tensor, **kwargs):
        numbers.append(tensor.numel())
        return broadcast(tensor, **kwargs)

    monkeypatch.setattr(collectives, "broadcast_", watched)
    data = {"a": torch.ones(5), "b": torch.ones(2, 3), "c": torch.ones(0)} if group.rank() == 0 else None
    broadcast_data(["a", "b", "c"], data, torch.float32, group)
    assert len(numbers) == 2
    assert numbers[1] == 11 * 4
    broadcast_data(["c"], data, torch.float32, group)
    assert len(numbers) == 3


BAD = {
    "missing": ({"a": torch.ones(2)}, r"the group's first rank has no 'b', only \['a'\]"),
    "dtype": ({"a": torch.ones(2), "b": torch.ones(2, dtype=torch.float64)}, r"'b' is of torch.float64; all of"),
    "not a tensor": ({"a": torch.ones(2), "b": [1.0]}, "'b' is of list; it must be a tensor of torch.float32"),
    "no dict": (None, "first rank has NoneType, not a dict"),
}


class Broken(dict):
    """A dict whose values cannot be read."""

    def __getitem__(self, key):
        raise OSError("disk gone")


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("case", [*BAD, "broken"])
def test_what_is_wrong_on_the_first_rank_is_an_error_on_all(group, case):
    data, message = BAD.get(case, (Broken(a=1), r"OSError\('disk gone'\)"))
    # The other ranks' own data would do.
    mine = data if group.rank() == 0 else {"a": torch.ones(2), "b": torch.ones(2)}
    with pytest.raises(DataError, match=message) as info:
        broadcast_data(["a", "b"], mine, torch.float32, group)
    told = [None] * group.size()
    dist.all_gather_object(told, str(info.value), group=group)
    assert told == [told[0]] * group.size()
    # And then they go on together.
    data = {"a": torch.ones(2)} if group.rank() == 0 else None
    assert_bit_equal(broadcast_data(["a"], data, torch.float32, group)["a"], torch.ones(2))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("what", ["keys", "order", "dtype"])
def test_ranks_that_ask_for_different_things(group, what):
    keys, dtype = ["a", "b"], torch.float32
    if group.rank() == 2:
        keys = {"keys": ["a"], "order": ["b", "a"]}.get(what, keys)
        dtype = torch.int64 if what == "dtype" else dtype
    data = {"a": torch.ones(2), "b": torch.ones(2)} if group.rank() == 0 else None
    with pytest.raises(DesyncError, match=r"rank 0 has .*'a', 'b'\] of torch.float32.*, rank 2 has"):
        broadcast_data(keys, data, dtype, group)


def test_a_group_is_needed():
    with pytest.raises(TopologyError, match="no group was given"):
        broadcast_data(["a"], {"a": torch.ones(2)}, torch.float32)


@pytest.mark.ranks(2)
def test_its_steps_by_their_names(group):
    parallel_state.initialize_model_parallel(2)
    data = {"a": torch.ones(2, 3), "b": torch.zeros(0, 4), "c": torch.tensor(7.0), "d": torch.ones(1, 1, 1, 1, 1, 2)}
    shapes, numels, total = _build_key_size_numel_dictionaries(list(data), data if group.rank() == 0 else None)
    assert shapes == {key: list(tensor.shape) for key, tensor in data.items()}
    assert (numels, total) == ({"a": 6, "b": 0, "c": 1, "d": 2}, 9)
    with pytest.raises(AssertionError, match=r"has no 'e', only \['a', 'b', 'c', 'd'\]"):
        _build_key_size_numel_dictionaries(["e"], data, group)
    _check_data_types(["a", "b"], data, torch.float32)
    with pytest.raises(AssertionError, match=r"'a' is of torch.float32; all of \['a'\] must be of torch.int64"):
        _check_data_types(["a"], data, torch.int64)
    assert data_module._MAX_DATA_DIM == 5
