"""Process groups that really have the ranks of the grid, whatever goes wrong on the way."""

import datetime
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from harness.parity import assert_bit_equal
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise import parallel_state
from shardwise.core.communication import context
from shardwise.core.errors import ConfigError, DesyncError, TopologyError
from shardwise.core.rank_grid import ParallelSizes
from shardwise.core.topology import Topology
from shardwise.megatron.sizes import MegatronSizes


def num_groups():
    """Process groups that torch.distributed knows of, the default one included."""
    return len(dist.distributed_c10d._world.pg_map)


def test_a_topology_needs_torch_distributed():
    with pytest.raises(TopologyError, match=r"torch\.distributed is not initialised; call"):
        Topology.create(tp=1)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "sizes",
    [
        ParallelSizes(),
        ParallelSizes(tp=2),
        ParallelSizes(tp=2, pp=2),
        ParallelSizes(tp=2, ep=2, etp=1),
        ParallelSizes(cp=2, tp=2, order="cp-tp-dp"),
        ParallelSizes(pp=4),
        MegatronSizes(cp=4, hcp=(2, 2), num_distributed_optimizer_instances=2),
    ],
    ids=str,
)
def test_groups_have_their_ranks(group, sizes):
    topology = Topology.create(sizes)
    me = group.rank()
    by_ranks = {}
    for name, lists in sizes.rank_lists(4).items():
        mine = [tuple(ranks) for ranks in lists if me in ranks]
        assert (name in topology) == bool(mine)
        if not mine:
            with pytest.raises(TopologyError, match=rf"rank {me} is in no group '{name}'; it is in \['cp', 'dp'"):
                topology.group(name)
            continue
        (ranks,) = mine
        process_group = topology.group(name)
        assert topology.ranks(name) == ranks
        assert (topology.size(name), topology.rank(name)) == (len(ranks), ranks.index(me))
        assert (process_group.size(), process_group.rank()) == (len(ranks), ranks.index(me))
        # One process group for each set of ranks.
        assert by_ranks.setdefault(ranks, process_group) is process_group
        sent = torch.tensor([10**me])
        dist.all_reduce(sent, group=process_group)
        assert sent.item() == sum(10**rank for rank in ranks)
        told = [None] * len(ranks)
        dist.all_gather_object(told, me, group=process_group)
        assert told == list(ranks)
        dist.barrier(group=process_group)
    topology.destroy()
    assert "tp" not in topology
    with pytest.raises(TopologyError, match=f"rank {me} is in no group 'tp'; the topology was destroyed"):
        topology.group("tp")
    topology.destroy()


GPU = torch.device("cuda", 0)


def made_by(rank, world_size, monkeypatch, sizes):
    """What one rank of a world that is bound to a GPU does; nobody else is there."""
    made, splits, make = [], [], dist.new_group

    def noted(ranks, **options):
        made.append((tuple(ranks), dist.group.WORLD.bound_device_id))
        return make(ranks, **options)

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with monkeypatch.context() as patch:
            dist.group.WORLD.bound_device_id = GPU
            patch.setattr(dist, "new_group", noted)
            source = SimpleNamespace(perform_nocolor_split=splits.append)
            patch.setattr(dist.distributed_c10d, "_get_split_source", lambda group: source)
            topology = Topology.create(sizes)
        assert dist.group.WORLD.bound_device_id == GPU
        names = {topology.ranks(name): topology.group(name).group_name for name in topology._groups}
        assert {topology.group(name).bound_device_id for name in topology._groups} == {GPU}
        topology.destroy()
        assert num_groups() == 1
    finally:
        dist.destroy_process_group()
    return made, len(splits), names


@pytest.mark.parametrize(
    ("world_size", "sizes", "number"),
    [
        (8, ParallelSizes(tp=8), 1),
        (8, ParallelSizes(), 1),
        (8, MegatronSizes(separate_all_gather=True), 2),
        (2, MegatronSizes(tp=2, separate_all_gather=True), 1),
        (512, ParallelSizes(tp=8, pp=8), 272),
        # The ranks of the second stage are in no group of one.
        (16, ParallelSizes(tp=2, pp=2, cp=2, ep=2), 52),
    ],
    ids=str,
)
def test_groups_of_one_rank_have_no_communicator(monkeypatch, world_size, sizes, number):
    """Each other group has one, made once, by all ranks in one order."""
    everywhere, names = set(), {}
    for rank in (0, 1, world_size // 2, world_size - 1):
        made, num_splits, own_names = made_by(rank, world_size, monkeypatch, sizes)
        ((alone, device), *several) = made
        # Not bound to a device, it makes none, and no other rank is asked for anything.
        assert device is None
        assert alone == (rank,) or own_names.keys().isdisjoint({(rank,)})
        assert len(several) == number
        assert all(len(ranks) > 1 and device == GPU for ranks, device in several)
        distinct = {ranks for ranks, _ in several}
        assert len(distinct) == number - (bool(sizes.unshared) and number > 1)
        assert num_splits == sum(rank not in ranks for ranks, _ in several)
        everywhere.add(tuple(several))
        for ranks, name in own_names.items():
            assert names.setdefault(ranks, name) == name
    assert len(everywhere) == 1


@pytest.mark.ranks(4)
def test_the_mesh_is_over_the_same_groups(group):
    from torch.distributed.tensor import DTensor, Replicate, Shard

    topology = Topology.create(tp=2)
    mesh = topology.mesh
    assert mesh.mesh_dim_names == ("pp", "dp", "cp", "tp")
    assert mesh.shape == (1, 2, 1, 2)
    assert mesh.mesh.flatten().tolist() == [0, 1, 2, 3]
    assert topology.mesh is mesh
    for name in ("tp", "dp", "cp", "pp"):
        assert mesh[name].get_group() is topology.group(name)
        local = torch.full((2, 3), float(group.rank()))
        whole = DTensor.from_local(local, mesh[name], [Shard(0)]).full_tensor()
        assert_bit_equal(whole, torch.cat([torch.full((2, 3), float(rank)) for rank in topology.ranks(name)]))
    both = DTensor.from_local(torch.tensor([float(group.rank())]), mesh["dp", "tp"], [Replicate(), Shard(0)])
    assert both.full_tensor().tolist() == [float(rank) for rank in topology.ranks("tp")]
    topology.destroy()


@pytest.mark.ranks(2)
def test_a_time_limit_reaches_the_groups(group):
    topology = Topology.create(tp=2, timeout=datetime.timedelta(seconds=777))
    backend = topology.group("tp")._get_backend(torch.device("cpu"))
    assert backend.options._timeout == datetime.timedelta(seconds=777)
    topology.destroy()


@pytest.mark.ranks(2)
def test_no_rank_is_back_before_all_have_made_their_groups(group, monkeypatch, tmp_path):
    """A rank that is back could destroy a group to which another still connects."""
    new_group, made = dist.new_group, tmp_path / "made"

    def slow_group(*arguments, **options):
        made_group = new_group(*arguments, **options)
        if group.rank() == 1:
            # The time in which a rank that does not wait for this one comes back; a longer one changes nothing.
            time.sleep(0.2)
            with made.open("a") as file:
                file.write("x")
        calls.append(1)
        return made_group

    calls = []
    monkeypatch.setattr(dist, "new_group", slow_group)
    topology = Topology.create(tp=2)
    assert len(made.read_text()) == len(calls) > 1
    topology.destroy()


@pytest.mark.ranks(2)
def test_groups_have_the_time_limit_of_the_default_group(group):
    backend = group._get_backend(torch.device("cpu"))
    before = backend.options._timeout
    backend._set_default_timeout(datetime.timedelta(seconds=777))
    try:
        topology = Topology.create(tp=2)
        assert topology.group("tp")._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 777
        topology.destroy()
        parallel_state.initialize_model_parallel(2)
        own = parallel_state.get_tensor_model_parallel_group()
        assert own._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 777
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(2, distributed_timeout_minutes=5.5)
        own = parallel_state.get_tensor_model_parallel_group()
        assert own._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 330
        parallel_state.destroy_model_parallel()
    finally:
        backend._set_default_timeout(before)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("axes", [{"tp": 3}, {"tp": 2, "pp": 4}, {"ep": 8}, {"order": "tp-tp"}, {"tp": -1}], ids=str)
def test_impossible_sizes_are_told_alike_on_every_rank(group, axes):
    with pytest.raises((ConfigError, TopologyError)) as info:
        Topology.create(**axes)
    assert num_groups() == 1
    messages = [None] * 4
    dist.all_gather_object(messages, str(info.value), group=group)
    assert len(set(messages)) == 1
    # Nobody waits in the making of a group.
    dist.barrier(group=group)


@pytest.mark.ranks(1)
def test_sizes_are_given_once(group):
    with pytest.raises(ConfigError, match=r"give sizes or axes by name, not both: .*'tp': 1"):
        Topology.create(ParallelSizes(), tp=1)


@pytest.mark.ranks(2)
def test_ranks_that_ask_for_different_sizes(group):
    with pytest.raises(DesyncError, match=r"ranks disagree on the sizes of the topology: rank 0 .*tp=1.*rank 1 .*tp=2"):
        Topology.create(tp=1 + group.rank(), validate=True)
    assert num_groups() == 1


@pytest.mark.ranks(2)
def test_validation_reaches_every_group(group, monkeypatch):
    validated = []
    monkeypatch.setattr(context, "validate_calls", validated.append)
    topology = Topology.create(tp=2, validate=True)
    assert topology.validate
    assert {id(one) for one in validated} == {id(one) for one in topology._groups.values()}
    assert len(validated) == 2
    topology.destroy()
    topology = Topology.create(tp=2)
    assert not topology.validate
    assert len(validated) == 2
    topology.destroy()


@pytest.mark.ranks(2)
def test_a_failure_half_way_leaves_no_group(group, monkeypatch):
    make, made = dist.new_group, []

    def fail_at_the_second(ranks, **options):
        if made:
            raise RuntimeError("no more memory")
        made.append(ranks)
        return make(ranks, **options)

    with monkeypatch.context() as patch:
        patch.setattr(dist, "new_group", fail_at_the_second)
        message = rf"rank {group.rank()} could not make group 'tp' of ranks \[0, 1\]: no more memory; every rank must"
        with pytest.raises(TopologyError, match=message) as info:
            Topology.create(tp=2)
    assert isinstance(info.value.__cause__, RuntimeError)
    assert made == [[group.rank()]]
    assert num_groups() == 1
    topology = Topology.create(tp=2)
    assert topology.size("tp") == 2
    topology.destroy()


@pytest.mark.ranks(2)
def test_a_failure_on_one_rank_leaves_no_group_there(group, monkeypatch):
    def fail_on_rank_1(process_group):
        if group.rank() == 1:
            raise RuntimeError("here only")

    monkeypatch.setattr(context, "validate_calls", fail_on_rank_1)
    if group.rank() == 1:
        with pytest.raises(RuntimeError, match="here only"):
            Topology.create(tp=2, validate=True)
        assert num_groups() == 1
    else:
        Topology.create(tp=2, validate=True).destroy()
    monkeypatch.undo()
    topology = Topology.create(tp=2)
    assert topology.size("tp") == 2
    topology.destroy()


@pytest.mark.ranks(1)
def test_groups_that_went_with_the_default_group(group):
    def start():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    topology = Topology.create()
    dist.destroy_process_group()
    topology.destroy()
    start()
    stale = Topology.create()
    dist.destroy_process_group()
    start()
    fresh = Topology.create()
    stale.destroy()
    assert num_groups() == 2
    dist.all_reduce(torch.ones(1), group=fresh.group("tp"))
    fresh.destroy()
