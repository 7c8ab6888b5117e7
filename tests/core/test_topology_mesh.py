"""The mesh is a view of the topology's groups: FSDP2 and DTensor take it, and train as one dense model would."""

import copy

import pytest
import torch
from harness.parity import assert_close_to
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardwise.core.errors import TopologyError
from shardwise.core.topology import Groups, Topology

STEPS = 2
# A few sums in another order.
FP64 = 1e-13


def make_model():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 3), nn.Tanh()).double()


def train(model, batches):
    """Outputs and parameter gradients of each step, and the parameters at the end, all of them whole tensors."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        output = model(inputs)
        nn.functional.mse_loss(output, targets).backward()
        seen += [output, *(param.grad for param in model.parameters())]
        optimizer.step()
    return [part.full_tensor() if isinstance(part, DTensor) else part for part in (*seen, *model.parameters())]


def check_against_dense(model, topology):
    """Train ``model`` on this rank's share of each batch, and its dense original on the whole of it."""
    per_rank, num_shares = 4, topology.size("dp")
    batches = [(torch.randn(per_rank * num_shares, 6).double(), torch.randn(per_rank * num_shares, 3).double())] * STEPS
    mine = slice(per_rank * topology.rank("dp"), per_rank * (topology.rank("dp") + 1))
    dense = train(make_model(), batches)
    split = train(model, [(inputs[mine], targets[mine]) for inputs, targets in batches])
    assert len(dense) == len(split) == STEPS * 5 + 4
    for number, (whole, part) in enumerate(zip(dense, split, strict=True)):
        is_output = number < STEPS * 5 and number % 5 == 0
        assert_close_to(part, whole[mine] if is_output else whole, rtol_of_norm=FP64, name=f"tensor {number}")


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("dp", [1, 2])
def test_fsdp_on_the_data_parallel_axis(group, dp):
    topology = Topology.create(tp=group.size() // dp)
    model = make_model()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=topology.mesh["dp"])
    weight = model[0].weight
    assert weight.placements == (Shard(0),)
    assert weight.to_local().shape == (12 // topology.size("dp"), 6)
    assert weight.device_mesh.get_group() is topology.group("dp")
    check_against_dense(model, topology)
    topology.destroy()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "dp-tp-cp-ep-pp"])
def test_fsdp_and_tensor_parallelism_on_two_axes(group, order):
    topology = Topology.create(tp=2, order=order)
    model = make_model()
    parallelize_module(model, topology.mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=topology.mesh["dp"])
    assert model[0].weight.to_local().numel() == 72 // 4
    check_against_dense(model, topology)
    topology.destroy()


@pytest.mark.ranks(2, 4)
def test_local_shards_become_a_dtensor_on_the_tensor_parallel_axis(group):
    topology = Topology.create(tp=2)
    mesh, me = topology.mesh["tp"], topology.rank("tp")
    assert mesh.get_group() is topology.group("tp")
    dense = make_model()
    model = copy.deepcopy(dense)
    inputs, targets = torch.randn(4, 6).double(), torch.randn(4, 3).double()
    # Column split of the first layer, row split of the second; their shards are leaves of this rank.
    shards = [model[0].weight.chunk(2)[me], model[0].bias.chunk(2)[me], model[2].weight.chunk(2, dim=1)[me]]
    shards = [shard.detach().clone().requires_grad_() for shard in shards]
    column, bias = (DTensor.from_local(shard, mesh, [Shard(0)]) for shard in shards[:2])
    row = DTensor.from_local(shards[2], mesh, [Shard(1)])
    last_bias = DTensor.from_local(model[2].bias, mesh, [Replicate()])
    hidden = nn.functional.gelu(nn.functional.linear(DTensor.from_local(inputs, mesh, [Replicate()]), column, bias))
    output = torch.tanh((hidden @ row.t()).redistribute(placements=[Replicate()]) + last_bias)
    nn.functional.mse_loss(output.to_local(), targets).backward()
    expected = dense(inputs)
    nn.functional.mse_loss(expected, targets).backward()
    assert_close_to(output.to_local(), expected, rtol_of_norm=FP64)
    gradients = [
        dense[0].weight.grad.chunk(2)[me],
        dense[0].bias.grad.chunk(2)[me],
        dense[2].weight.grad.chunk(2, 1)[me],
    ]
    for shard, gradient in zip(shards, gradients, strict=True):
        assert_close_to(shard.grad, gradient.contiguous(), rtol_of_norm=FP64)
    topology.destroy()


@pytest.mark.ranks(2)
def test_a_mesh_made_anew_has_groups_of_its_own(group):
    # DTensor remembers what it did on an equal mesh.
    for _ in range(2):
        topology = Topology.create(tp=2)
        part = DTensor.from_local(torch.ones(2, 3), topology.mesh["tp"], [Shard(1)])
        product = (part @ part.t()).redistribute(placements=[Replicate()])
        assert product.to_local().tolist() == [[6.0, 6.0], [6.0, 6.0]]
        topology.destroy()


@pytest.mark.ranks(2)
def test_groups_of_a_mesh_are_those_of_its_topology(group):
    topology = Topology.create(tp=2)
    groups = Groups.of_mesh(topology.mesh)
    assert (groups.tp, groups.pp, groups.dp) == tuple(topology.group(name) for name in ("tp", "pp", "dp"))
    assert groups.embd is None
    with pytest.raises(TopologyError, match=r"the mesh has the dimensions \('dp',\); it needs one that is named 'tp'"):
        Groups.of_mesh(topology.mesh["dp"])
    topology.destroy()
