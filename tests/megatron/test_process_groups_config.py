"""A model's groups as one argument: the topology's own, under the names that programs use."""

from dataclasses import fields

import pytest
import torch
import torch.distributed as dist

from shardwise import parallel_state
from shardwise.core.errors import ConfigError
from shardwise.core.topology import Topology
from shardwise.megatron.errors import NotInitializedError
from shardwise.megatron.process_groups_config import _GETTERS, ProcessGroupCollection
from shardwise.megatron.sizes import MegatronSizes

NAMES = ["tp", "pp", "mp", "embd", "pos_embd", "cp", "tp_cp", "hcp", "ep", "expt_tp", "tp_ep", "tp_ep_pp", "tp_dp_cp"]
NAMES += ["dp", "dp_cp", "expt_dp", "intra_dp_cp", "intra_expt_dp", "inter_dist_opt", "intra_dist_opt"]


def test_names():
    assert [field.name for field in fields(ProcessGroupCollection)] == NAMES
    assert list(_GETTERS) == NAMES


def test_groups_that_were_not_given_are_not_there():
    tp, cp = object(), object()
    collection = ProcessGroupCollection(tp=tp, dp=None)
    assert (collection.tp, collection.dp) == (tp, None)
    assert [name for name in NAMES if hasattr(collection, name)] == ["tp", "dp"]
    with pytest.raises(AttributeError, match="'cp'"):
        collection.cp  # noqa: B018
    collection.cp = cp
    assert collection.cp is cp
    assert not any(hasattr(ProcessGroupCollection(), name) for name in NAMES)
    assert collection == ProcessGroupCollection(tp=tp, cp=cp, dp=None) != ProcessGroupCollection(tp=tp, cp=cp)
    with pytest.raises(ConfigError, match="Unknown attribute: px; there are tp, pp,"):
        ProcessGroupCollection(px=tp)


def test_a_collection_says_what_it_has():
    class OfTwo:
        def size(self):
            return 2

    collection = ProcessGroupCollection()
    assert repr(collection) == "ProcessGroupCollection(empty)"
    collection.hcp, collection.cp, collection.tp = [OfTwo(), OfTwo()], None, OfTwo()
    assert repr(collection) == "ProcessGroupCollection(tp(2), cp(None), hcp([2, 2]))"


def test_the_ambient_groups_come_from_the_getters_that_tests_replace(monkeypatch):
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_group", lambda **_: "tp of a test")
    monkeypatch.setattr(parallel_state, "get_context_parallel_group", lambda **_: "cp of a test")
    collection = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
    assert vars(collection) == {"tp": "tp of a test", "cp": "cp of a test"}


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "sizes",
    [
        MegatronSizes(tp=2, pp=2),
        MegatronSizes(pp=4),
        MegatronSizes(cp=4, hcp=(2, 2), num_distributed_optimizer_instances=2),
        MegatronSizes(tp=2, ep=2, etp=1),
    ],
    ids=str,
)
def test_groups_of_a_topology(group, sizes):
    topology = Topology.create(sizes)
    collection = ProcessGroupCollection.from_topology(topology)
    for name in set(NAMES) - {"hcp"}:
        assert getattr(collection, name) is (topology.group(name) if name in topology else None), name
    assert (collection.inter_dist_opt is None) == (sizes.num_distributed_optimizer_instances == 1)
    if sizes.hcp is None:
        assert collection.hcp is None
    else:
        assert collection.hcp == [topology.group("hcp0"), topology.group("hcp1")]
        assert [level.size() for level in collection.hcp] == [2, 2]
    parts = [part for part in repr(collection)[len("ProcessGroupCollection(") : -1].split(", ") if "(None)" not in part]
    assert parts[0] == f"tp({sizes.tp})"
    assert ("hcp([2" in parts) == (sizes.hcp is not None)
    topology.destroy()
    parallel_state.initialize_model_parallel(
        sizes.tp,
        sizes.pp,
        context_parallel_size=sizes.cp,
        hierarchical_context_parallel_sizes=sizes.hcp,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.etp,
        num_distributed_optimizer_instances=sizes.num_distributed_optimizer_instances,
    )
    ambient = ProcessGroupCollection.use_mpu_process_groups()
    assert ambient == ProcessGroupCollection.from_topology(parallel_state.get_topology())
    assert list(vars(ambient)) == NAMES


@pytest.mark.ranks(2)
def test_groups_of_the_ambient_topology(group):
    parallel_state.initialize_model_parallel(2)
    collection = ProcessGroupCollection.use_mpu_process_groups()
    assert collection.tp is parallel_state.get_tensor_model_parallel_group()
    assert collection.dp is parallel_state.get_data_parallel_group()
    ones = torch.ones(1)
    dist.all_reduce(ones, group=collection.tp)
    assert ones.item() == 2
    some = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "hcp"])
    assert some == ProcessGroupCollection(tp=collection.tp, hcp=None)
    with pytest.raises(ConfigError, match=r"Invalid process groups requested: px, tx; there are tp, pp,"):
        ProcessGroupCollection.use_mpu_process_groups(["tx", "tp", "px"])


def test_no_ambient_topology():
    with pytest.raises(NotInitializedError, match="model parallelism is not initialised"):
        ProcessGroupCollection.use_mpu_process_groups()
