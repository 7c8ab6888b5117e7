"""A group's backend is asked for by device, in one place, and all that depends on it follows."""

import ast
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness.on_pretended_gpu import fake_tensors, join

import shardwise
from shardwise.core.communication.collectives import Transfer, exchange
from shardwise.core.communication.context import (
    backend_of,
    backends_of,
    default_device,
    device_of,
    is_gloo,
    sends_by_tag,
)
from shardwise.core.communication.transports import torch_distributed, transport_name
from shardwise.core.errors import ConfigError, TopologyError
from shardwise.core.topology import Topology
from shardwise.parallel_state import (
    destroy_model_parallel,
    get_data_parallel_group_gloo,
    initialize_model_parallel,
    reference_globals,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SOURCES = Path(shardwise.__file__).parent


@pytest.fixture(name="transport", scope="module", autouse=True)
def _as_it_comes():
    """These tests are about the backend alone, and run once."""


@pytest.fixture
def undecided():
    """A group for which PyTorch chose the backend."""
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="PyTorch chooses the accelerator's backend")
def test_a_backend_that_pytorch_chose_has_its_name(undecided):
    assert backends_of(undecided) == {"cpu": "gloo"}
    assert transport_name(undecided, CPU) == "gloo"
    assert transport_name(undecided, CUDA) == "no backend for cuda"
    assert torch_distributed._limit_of_waiting(undecided, CPU) == dist.distributed_c10d.default_pg_timeout
    assert device_of(undecided) == default_device(undecided) == CPU
    initialize_model_parallel(pipeline_model_parallel_comm_backend="gloo")
    try:
        assert get_data_parallel_group_gloo() is not None
    finally:
        destroy_model_parallel()


@pytest.mark.ranks(2)
def test_a_backend_given_by_device_communicates_as_well(group, monkeypatch):
    by_device = dist.new_group(backend="cpu:gloo")
    assert transport_name(by_device, CPU) == "shared memory"
    assert torch_distributed._limit_of_waiting(by_device, CPU) is not None
    # gloo's own reduce-scatter costs as much as its all-reduce.
    monkeypatch.delattr(torch_distributed, "_reduce_scatter_into")
    own = torch_distributed.reduce_scatter(torch.arange(3.0), by_device, 0, [2, 1]).wait()
    assert own.tolist() == [[0.0, 2.0], [4.0]][group.rank()]


def of_both():
    group = join("cpu:gloo,cuda:fake")
    half = dist.new_group([0])
    found = [
        (
            dict(backends_of(each)),
            str(device_of(each)),
            str(default_device(each)),
            transport_name(each, CPU),
            transport_name(each, CUDA),
        )
        for each in (group, half)
    ]
    with torch.device("meta"):
        assert default_device(group) == torch.device("meta")
    assert default_device(None) == CPU
    assert (is_gloo(group, CPU), is_gloo(group, CUDA)) == (True, False)
    assert (sends_by_tag(group, CPU), sends_by_tag(group, CUDA)) == (True, False)
    topology = Topology.create()
    initialize_model_parallel(pipeline_model_parallel_comm_backend="fake")
    assert get_data_parallel_group_gloo() is reference_globals.look_up("_DATA_PARALLEL_GROUP_GLOO")
    destroy_model_parallel()
    with pytest.raises(ConfigError, match=r"is 'gloo', but all groups have the backend of torch\.distributed, 'fake'"):
        initialize_model_parallel(pipeline_model_parallel_comm_backend="gloo")
    return found, topology.mesh.device_type


def test_a_group_with_a_backend_for_each_device_is_of_the_gpu(pretended_gpu):
    found, mesh = pretended_gpu(of_both)
    assert found == [({"cpu": "gloo", "cuda": "fake"}, "cuda:0", "cuda:0", "gloo", "fake")] * 2
    assert mesh == "cuda"


def of_gloo_alone():
    group = join("gloo")
    return backend_of(group, CUDA), str(device_of(group)), Topology.create().mesh.device_type


def test_a_group_of_gloo_alone_is_of_the_cpu(pretended_gpu):
    # It would carry tensors on the GPU too.
    assert pretended_gpu(of_gloo_alone) == ("gloo", "cpu", "cpu")


def of_the_gpu_alone():
    group = join("cuda:fake", world_size=4, rank=1)
    initialize_model_parallel(tensor_model_parallel_size=2)
    with pytest.raises(TopologyError, match=r"the backends {'cuda': 'fake'} carry no tensors on the CPU; call"):
        get_data_parallel_group_gloo()
    assert reference_globals.look_up("_DATA_PARALLEL_GROUP_GLOO") is None
    with fake_tensors():
        packed = torch_distributed.reduce_scatter(torch.ones(6, 2, device="cuda"), group, 0, [2, 2, 1, 1]).wait()
    return str(device_of(group)), torch_distributed._limit_of_waiting(group, CUDA), tuple(packed.shape)


def test_a_group_of_the_gpu_alone(pretended_gpu):
    assert pretended_gpu(of_the_gpu_alone) == ("cuda:0", None, (2, 2))


def messages():
    group = join("cpu:gloo,cuda:fake")
    calls = []
    in_one = dist.batch_isend_irecv

    def noted(operations):
        calls.append([(operation.op.__name__, operation.group_peer, operation.tag) for operation in operations])
        return in_one(operations)

    dist.batch_isend_irecv = noted
    with fake_tensors():
        transfers = [Transfer(torch.ones(2, device="cuda"), 0, tag) for tag in (5, 6)]
        sent, received = exchange(transfers[:1], transfers, group=group)
        for pending in (*sent, *received):
            pending.wait()
    assert exchange([], [], group=group) == ([], [])
    return calls


def test_messages_of_the_gpu_travel_in_one_call(pretended_gpu):
    # NCCL knows no tags: one by one, each rank might wait for the other to receive what it sends.
    assert pretended_gpu(messages) == [[("isend", 0, 5), ("irecv", 0, 5), ("irecv", 0, 6)]]


def test_one_file_knows_backends_by_name():
    """What compares names elsewhere would ask ``get_backend``, which says "cpu:gloo,cuda:nccl", or "undefined"."""
    names = {"gloo", "nccl", "mpi", "ucc", "xccl", "fake", "undefined"}
    found = []
    for path in SOURCES.rglob("*.py"):
        if path == SOURCES / "core" / "communication" / "context.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            asks = isinstance(node, ast.Attribute | ast.Name) and "get_backend" in ast.unparse(node).split(".")[-1]
            # Its options are asked of a backend object, which has no name.
            asks = asks and not ast.unparse(node).endswith("._get_backend")
            compares = isinstance(node, ast.Compare | ast.MatchValue) and any(
                isinstance(part, ast.Constant) and part.value in names for part in ast.walk(node)
            )
            if asks or compares:
                found.append(f"{path.relative_to(SOURCES)}:{node.lineno}: {ast.unparse(node)}")
    assert found == []
