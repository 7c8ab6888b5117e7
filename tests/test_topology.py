"""Ranks on a grid against coordinates counted one by one, and process groups that really have those ranks."""

import datetime
import itertools
import math
import os
import random

import pytest
import torch
import torch.distributed as dist
from harness.parity import assert_bit_equal

from shardwise.errors import ConfigError, TopologyError
from shardwise.process_groups_config import ProcessGroupCollection
from shardwise.topology import (
    ParallelSizes,
    RankGenerator,
    Topology,
    default_embedding_ranks,
    default_position_embedding_ranks,
    generate_masked_orthogonal_rank_groups,
)

AXES = ("tp", "cp", "ep", "dp", "pp")
TOKENS = [
    "-".join(chosen) for count in range(1, len(AXES) + 1) for chosen in itertools.combinations(reversed(AXES), count)
]


def coordinates(rank, sizes, order):
    """The place of a rank on each axis, by counting through the axes, the first of ``order`` fastest."""
    place = {}
    for axis in order:
        place[axis] = rank % sizes[axis]
        rank //= sizes[axis]
    return place


def groups_by_coordinates(world_size, sizes, order, token):
    """Ranks that agree in every axis outside the token, each group and their list in ascending order."""
    groups = {}
    for rank in range(world_size):
        place = coordinates(rank, sizes, order)
        key = tuple(place[axis] for axis in order if axis not in token.split("-"))
        groups.setdefault(key, []).append(rank)
    return sorted(groups.values())


def cases(count, largest_world, seed):
    """Sizes and orders, each world of at most ``largest_world`` ranks."""
    chooser = random.Random(seed)
    while count:
        sizes = {axis: chooser.choice((1, 1, 2, 3, 4, 5, 8)) for axis in AXES}
        if math.prod(sizes.values()) <= largest_world:
            count -= 1
            yield sizes, chooser.sample(AXES, len(AXES))


@pytest.mark.parametrize("seed", range(4))
def test_rank_generator_against_coordinates(seed):
    for sizes, order in cases(12, 256, seed):
        generator = RankGenerator(**sizes, order="-".join(order))
        for token in TOKENS:
            expected = groups_by_coordinates(generator.world_size, sizes, order, token)
            assert generator.get_ranks(token) == expected, (sizes, order, token)


def test_rank_generator_of_a_thousand_ranks():
    for order in (AXES, ("pp", "tp", "dp", "ep", "cp")):
        sizes = {"tp": 8, "cp": 2, "ep": 4, "dp": 4, "pp": 4}
        generator = RankGenerator(**sizes, order="-".join(order))
        assert generator.world_size == 1024
        for token in ("tp", "dp", "pp", "dp-cp", "tp-pp", "tp-ep-pp"):
            assert generator.get_ranks(token) == groups_by_coordinates(1024, sizes, order, token)


def test_rank_generator_details():
    generator = RankGenerator(tp=2, ep=1, dp=3, pp=1, cp=1, order="DP-TP", rank_offset=100)
    assert generator.order == "dp-tp-pp-ep-cp"
    assert generator.get_ranks("tp") == [[100, 103], [101, 104], [102, 105]]
    assert generator.get_mask("tp-cp-dp", "dp-tp") == [True, False, True]


@pytest.mark.parametrize("seed", range(3))
def test_all_groups_against_coordinates(seed):
    chooser = random.Random(seed)
    checked = 0
    while checked < 12:
        tp, cp, ep, pp, dp = (chooser.choice((1, 1, 2, 3, 4)) for _ in range(5))
        etp = chooser.choice((None, 1, tp))
        world_size = tp * cp * dp * pp
        if world_size > 256 or world_size % ((etp or tp) * ep * pp):
            continue
        checked += 1
        # Pipeline stages last: dense and expert layers are then always on the same stage.
        order = [*chooser.sample(("tp", "cp", "ep", "dp"), 4), "pp"]
        lists = ParallelSizes(tp, pp, cp, ep, etp, "-".join(order)).rank_lists(world_size)
        dense = {"tp": tp, "cp": cp, "dp": dp, "pp": pp, "ep": 1}
        expert_dp = world_size // ((etp or tp) * ep * pp)
        expert = {"tp": etp or tp, "cp": 1, "dp": expert_dp, "pp": pp, "ep": ep}
        pipelines = groups_by_coordinates(world_size, dense, order, "pp")
        expected = {
            name: groups_by_coordinates(world_size, dense, order, token)
            for name, token in {
                "tp": "tp",
                "pp": "pp",
                "cp": "cp",
                "dp": "dp",
                "dp_cp": "dp-cp",
                "mp": "tp-pp",
                "tp_cp": "tp-cp",
                "tp_dp": "tp-dp",
                "tp_dp_cp": "tp-dp-cp",
            }.items()
        }
        expected |= {
            name: groups_by_coordinates(world_size, expert, order, token)
            for name, token in {
                "ep": "ep",
                "expt_tp": "tp",
                "tp_ep": "tp-ep",
                "tp_ep_pp": "tp-ep-pp",
                "expt_dp": "dp",
            }.items()
        }
        expected["embd"] = [sorted({ranks[0], ranks[-1]}) for ranks in pipelines]
        expected["pos_embd"] = [[ranks[0]] for ranks in pipelines]
        assert lists == expected, (tp, cp, ep, etp, dp, pp, order)


def test_eight_ranks_as_documented():
    lists = ParallelSizes(tp=2, pp=2).rank_lists(8)
    assert lists["tp"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert lists["dp"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert lists["pp"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert lists["embd"] == lists["pp"]
    assert lists["pos_embd"] == [[0], [1], [2], [3]]


def test_embedding_ranks():
    assert default_embedding_ranks([3, 5, 7]) == [3, 7]
    assert default_embedding_ranks([3]) == [3]
    assert default_position_embedding_ranks([3, 5, 7]) == [3]
    lists = ParallelSizes(pp=4).rank_lists(
        4, embedding_ranks=lambda ranks: [ranks[2], ranks[0]], position_embedding_ranks=lambda ranks: ranks[1:2]
    )
    # As a process group orders them.
    assert lists["embd"] == [[0, 2]]
    assert lists["pos_embd"] == [[1]]


def test_masked_groups():
    assert generate_masked_orthogonal_rank_groups(8, [2, 2, 2], [True, False, True]) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert generate_masked_orthogonal_rank_groups(4, [2, 2], [False, False]) == [[0], [1], [2], [3]]
    # A grid smaller than the world is repeated.
    assert generate_masked_orthogonal_rank_groups(8, [2, 2], [False, True]) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    with pytest.raises(ConfigError, match=r"sizes \[2, 2\] and mask \[True\]"):
        generate_masked_orthogonal_rank_groups(4, [2, 2], [True])
    with pytest.raises(ConfigError, match=r"\[2, 3\] \(product 6\) do not divide the world of 8"):
        generate_masked_orthogonal_rank_groups(8, [2, 3], [True, False])


@pytest.mark.parametrize(
    ("sizes", "order", "message"),
    [
        ({"tp": 2}, "cp-dp", "axis 'tp' has size 2 but the order 'cp-dp' leaves it out"),
        ({}, "tp-xp", r"order 'tp-xp' must name each of"),
        ({}, "tp-tp-dp", r"order 'tp-tp-dp' must name each of"),
        ({}, "", r"order '' must name each of"),
        ({"dp": 0}, "tp-cp-ep-dp-pp", "the size of axis 'dp' is 0; it must be at least 1"),
    ],
)
def test_grids_that_cannot_be(sizes, order, message):
    with pytest.raises(ConfigError, match=message):
        RankGenerator(**({"tp": 1, "ep": 1, "dp": 1, "pp": 1, "cp": 1} | sizes), order=order)


def test_a_token_must_name_axes():
    generator = RankGenerator(tp=2, ep=1, dp=2, pp=1, cp=1, order="tp-dp")
    with pytest.raises(ConfigError, match="token 'tp-xp' names an axis that is not in the order 'tp-dp-pp-ep-cp'"):
        generator.get_ranks("tp-xp")


@pytest.mark.parametrize(
    ("sizes", "world_size", "message"),
    [
        ({"tp": 3}, 8, "tp 3 x pp 1 x cp 1 = 3 does not divide the world of 8 ranks"),
        ({"tp": 2, "ep": 3}, 8, "expert tp 2 x ep 3 x pp 1 = 6 does not divide the world of 8 ranks"),
        ({"tp": 4, "pp": 4}, 8, "tp 4 x pp 4 x cp 1 = 16 does not divide the world of 8"),
        ({"cp": 0}, 8, "the size of axis 'cp' is 0"),
        ({"etp": 0}, 8, "the size of axis 'etp' is 0"),
        ({"tp": 2, "etp": 1, "pp": 2, "order": "tp-pp-dp-cp-ep"}, 8, "different pipeline stages"),
    ],
)
def test_sizes_that_cannot_be(sizes, world_size, message):
    with pytest.raises(ConfigError, match=message):
        ParallelSizes(**sizes).rank_lists(world_size)


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
    collection = ProcessGroupCollection.from_topology(topology)
    for name in ProcessGroupCollection.__dataclass_fields__:
        assert getattr(collection, name) is (topology.group(name) if name in topology else None)
    topology.destroy()


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


@pytest.mark.ranks(4)
def test_two_topologies_at_once(group):
    wide, narrow = Topology.create(tp=4), Topology.create(ParallelSizes(tp=2))
    assert (wide.size("tp"), narrow.size("tp")) == (4, 2)
    ones = torch.ones(1)
    dist.all_reduce(ones, group=narrow.group("tp"))
    narrow.destroy()
    dist.all_reduce(ones, group=wide.group("tp"))
    assert ones.item() == 8
    wide.destroy()


@pytest.mark.ranks(2)
def test_destroying_leaves_nothing_open(group):
    def open_things():
        return len(os.listdir("/proc/self/fd")) + len(os.listdir("/proc/self/task"))

    counts = []
    for _ in range(50):
        topology = Topology.create(tp=2)
        dist.all_reduce(torch.ones(1), group=topology.group("tp"))
        assert topology.mesh.shape == (1, 1, 1, 2)
        topology.destroy()
        counts.append(open_things())
    # A group of two ranks holds several of each; a few that are being closed may be counted.
    assert counts[-1] <= counts[4] + 4, counts
    assert len(dist.distributed_c10d._world.pg_map) == 1


@pytest.mark.ranks(2)
def test_a_time_limit_reaches_the_groups(group):
    topology = Topology.create(tp=2, timeout=datetime.timedelta(seconds=77))
    backend = topology.group("tp")._get_backend(torch.device("cpu"))
    assert backend.options._timeout == datetime.timedelta(seconds=77)
    topology.destroy()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("axes", [{"tp": 3}, {"tp": 2, "pp": 4}, {"ep": 8}, {"order": "tp-tp"}, {"tp": -1}], ids=str)
def test_impossible_sizes_are_told_alike_on_every_rank(group, axes):
    with pytest.raises(ConfigError) as info:
        Topology.create(**axes)
    messages = [None] * 4
    dist.all_gather_object(messages, str(info.value), group=group)
    assert len(set(messages)) == 1
    # Nobody waits in the making of a group.
    dist.barrier(group=group)


@pytest.mark.ranks(1)
def test_sizes_are_given_once(group):
    with pytest.raises(ConfigError, match=r"give sizes or axes by name, not both: .*'tp': 1"):
        Topology.create(ParallelSizes(), tp=1)
