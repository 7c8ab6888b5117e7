"""What ranks hold alike is found to differ by one bit, on all ranks alike, and what may differ is left alone."""

from __future__ import annotations

import pytest
import torch
from harness.parity import assert_bit_equal
from run.tiny_layouts import losses_of, trainer_of
from torch import nn

from shardwise.core import initialization
from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.errors import DesyncError
from shardwise.core.sharding import ParamLayout, Replicas
from shardwise.core.topology import Topology
from shardwise.nn import ColumnLinear, RowLinear
from shardwise.nn.quantization import QuantizedTensor
from shardwise.nn.replicated import set_replicas_
from shardwise.run.settings import ParallelSettings
from shardwise.training.gradients.replicas import check_replicas, fingerprints

H = 6


class Model(nn.Module):
    """A norm and a bias that are whole on each rank, two weights that are split, and a part of a program's own."""

    def __init__(self, group):
        super().__init__()
        self.norm = nn.LayerNorm(H)
        options = {"group": group, "init": initialization.init_method_normal(0.2)}
        self.up = ColumnLinear(H, 2 * H + 1, **options)
        self.down = RowLinear(2 * H + 1, H, **options)
        self.own = nn.Linear(H, 3)


def change_a_bit_(param):
    """The last bit of one number."""
    bits = param.data.view(-1).view(torch.int32)
    bits[-1] ^= 1


def checked(model, topology, pp=False):
    check_replicas(
        model,
        tp_group=topology.group("tp"),
        dp_group=topology.group("dp"),
        pp_group=topology.group("pp") if pp else None,
    )


@pytest.mark.ranks(2, 4)
def test_one_bit_of_one_parameter_is_an_error_on_all_ranks(group):
    topology = Topology.create(tp=2)
    torch.manual_seed(0)
    model = Model(topology.group("tp"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with CollectiveCounter() as counter:
        checked(model, topology)
    assert counter.launches == []
    for name, value in model.state_dict().items():
        assert_bit_equal(value, before[name])
    last = group.size() - 1
    # Where there are data-parallel ranks, it is the one of the same shard that all hear of.
    first, parallel = (0, "tensor") if group.size() == 2 else (1, "data")
    for name in ("norm.weight", "down.bias", "up.weight"):
        model.load_state_dict(before)
        if group.rank() == last:
            change_a_bit_(model.get_parameter(name))
        if group.size() == 2 and name == "up.weight":
            # Each holds its own shard.
            checked(model, topology)
            continue
        message = rf"parameter '{name}': rank {last} holds other values than rank {first}, and {parallel}-parallel"
        with pytest.raises(DesyncError, match=message):
            checked(model, topology)
    model.load_state_dict(before)
    if group.rank() == 0:
        change_a_bit_(model.norm.bias)
        change_a_bit_(model.own.weight)
    with pytest.raises(DesyncError, match=r"parameter 'norm.bias' and 1 more: rank 1 holds .* than rank 0"):
        checked(model, topology)


@pytest.mark.ranks(2)
def test_stages_hear_of_each_other_s_difference(group):
    topology = Topology.create(pp=2)
    model = Model(topology.group("tp")) if group.rank() else nn.Module()
    checked(model, topology, pp=True)
    topology = Topology.create(tp=1)
    if group.rank():
        change_a_bit_(model.norm.weight)
    model = model if group.rank() else Model(topology.group("tp"))
    with pytest.raises(DesyncError, match="rank 1 holds other values than rank 0, and data-parallel ranks must"):
        checked(model, topology)


@pytest.mark.ranks(2)
def test_parameters_that_say_so_may_differ(group):
    torch.manual_seed(group.rank())
    topology = Topology.create(tp=2)
    model = nn.Linear(H, 3)
    with pytest.raises(DesyncError, match=r"parameter 'bias' and 1 more: rank 1 holds other values than rank 0"):
        checked(model, topology)
    set_replicas_(model, Replicas(same_over=("dp",)))
    checked(model, topology)
    data_parallel = Topology.create(tp=1)
    with pytest.raises(DesyncError, match="data-parallel ranks must hold the same"):
        checked(model, data_parallel)
    set_replicas_(model, Replicas(same_over=()))
    checked(model, data_parallel)
    checked(nn.Linear(H, 3 + group.rank(), device="meta"), data_parallel)
    # Other names on other ranks.
    torch.manual_seed(0)
    model = nn.Linear(H, 3)
    if group.rank():
        model.more = nn.Parameter(torch.zeros(2))
    with pytest.raises(DesyncError, match="parameter 'more': missing on rank 0 and of shape"):
        checked(model, data_parallel)


def hash_of(tensor):
    return fingerprints([tensor]).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int8], ids=str)
@pytest.mark.parametrize("size", [1, 7, 2048, 2049, 40_001])
def test_a_hash_tells_values_places_and_nothing_else(dtype, size):
    generator = torch.Generator().manual_seed(1)
    tensor = torch.randint(1, 100, (size,), generator=generator).to(dtype)
    expected = hash_of(tensor)
    assert hash_of(tensor.clone()) == expected
    # Other strides of the same values.
    assert hash_of(torch.stack([tensor, tensor], dim=1)[:, 0]) == expected
    for place in {0, size // 2, size - 1}:
        other = tensor.clone()
        other[place] += 1
        assert hash_of(other) != expected
        for second in {(place + 1) % size, (place + 2048) % size} - {place}:
            moved = other.clone()
            moved[second] -= 1
            assert hash_of(moved) not in (expected, hash_of(other))
    assert hash_of(tensor.new_empty(0)) == 0


def test_a_hash_of_a_quantized_weight_is_of_its_codes_and_scales():
    made = QuantizedTensor.empty("int8", ParamLayout.replicated((3, 4), 1), 0, torch.empty(3, 4))
    made.codes.fill_(3)
    made.scales.fill_(0.5)
    expected = hash_of(made)
    made.codes[1, 2] = 4
    assert hash_of(made) != expected
    made.codes[1, 2] = 3
    assert hash_of(made) == expected
    made.scales[2] = 0.25
    assert hash_of(made) != expected


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "parallel", [ParallelSettings(tp=2), ParallelSettings(zero=1), ParallelSettings(pp=2)], ids=str
)
def test_copies_that_drift_in_training_are_named(parallel, group, tmp_path):
    trainer = trainer_of(tmp_path, parallel)
    losses_of(trainer, 2)
    trainer.check_copies(2)
    if parallel.pp == 2:
        # Stages hold copies of a tied weight alone, which their gradients keep equal.
        return
    if group.rank() == 1:
        change_a_bit_(trainer.model.decoder.final_layernorm.weight)
    with pytest.raises(DesyncError, match=r"decoder.final_layernorm.weight'.*they drifted apart in the first 2 steps"):
        trainer.check_copies(2)
