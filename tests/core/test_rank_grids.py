"""Which ranks form which groups, against coordinates counted one by one, up to 1,024 ranks."""

import itertools
import math

import pytest
from harness.program import run
from hypothesis import given, settings, strategies as st

from shardwise.core.errors import ConfigError, TopologyError
from shardwise.core.rank_grid import (
    ParallelSizes,
    RankGenerator,
    default_embedding_ranks,
    default_position_embedding_ranks,
    generate_masked_orthogonal_rank_groups,
)
from shardwise.megatron.sizes import MegatronSizes

AXES = ("tp", "cp", "ep", "dp", "pp")
TOKENS = [
    "-".join(chosen) for count in range(1, len(AXES) + 1) for chosen in itertools.combinations(reversed(AXES), count)
]
LARGEST_WORLD = 1024


def coordinates(world_size, sizes, order):
    """The place of each rank on each axis: an odometer whose first wheel is the first axis of ``order``."""
    place = dict.fromkeys(order, 0)
    for _ in range(world_size):
        yield dict(place)
        for axis in order:
            place[axis] += 1
            if place[axis] < sizes[axis]:
                break
            place[axis] = 0


def groups_along(axes, world_size, sizes, order):
    """Ranks that agree in every axis outside ``axes``; each group and their list in ascending order."""
    groups = {}
    for rank, place in enumerate(coordinates(world_size, sizes, order)):
        key = tuple(place[axis] for axis in order if axis not in axes)
        groups.setdefault(key, []).append(rank)
    return sorted(groups.values())


def divided(groups, part_of):
    """Each group divided by a number that its members get from their place in it."""
    parts = []
    for ranks in groups:
        by_number = {}
        for place, rank in enumerate(ranks):
            by_number.setdefault(part_of(place), []).append(rank)
        parts += by_number.values()
    return sorted(parts)


@st.composite
def sizes_of_axes(draw, axes=AXES):
    """A size for each axis, in any order of drawing, whose product is at most LARGEST_WORLD."""
    sizes, left = dict.fromkeys(AXES, 1), LARGEST_WORLD
    for axis in draw(st.permutations(axes)):
        sizes[axis] = draw(st.integers(1, min(left, 16)))
        left //= sizes[axis]
    return sizes


def divisors(number):
    return st.sampled_from([divisor for divisor in range(1, number + 1) if number % divisor == 0])


@settings(max_examples=60)
@given(sizes=sizes_of_axes(), order=st.permutations(AXES), token=st.sampled_from(TOKENS), offset=st.integers(0, 9))
def test_rank_generator(sizes, order, token, offset):
    generator = RankGenerator(**sizes, order="-".join(order), rank_offset=offset)
    expected = groups_along(token.split("-"), math.prod(sizes.values()), sizes, order)
    assert generator.get_ranks(token) == [[rank + offset for rank in ranks] for ranks in expected]


def test_rank_generator_details():
    generator = RankGenerator(tp=2, ep=1, dp=3, pp=1, cp=1, order="DP-TP", rank_offset=100)
    assert generator.order == "dp-tp-pp-ep-cp"
    assert generator.get_ranks("tp") == [[100, 103], [101, 104], [102, 105]]
    assert generator.get_mask("tp-cp-dp", "dp-tp") == [True, False, True]


def check_every_group(sizes, world_size):
    """Every group of ``sizes`` that there can be, or the reason why there is none."""
    order, etp = sizes.order.split("-"), sizes.tp if sizes.etp is None else sizes.etp
    dense = {"tp": sizes.tp, "cp": sizes.cp, "pp": sizes.pp, "ep": 1}
    dense["dp"] = world_size // math.prod(dense.values())
    expert = {"tp": etp, "cp": 1, "pp": sizes.pp, "ep": sizes.ep}
    expert["dp"] = world_size // math.prod(expert.values())

    def along(grid, *axes):
        return groups_along(axes, world_size, grid, order)

    if along(dense, "pp") != along(expert, "pp"):
        with pytest.raises(ConfigError, match="different pipeline stages"):
            sizes.rank_lists(world_size)
        return
    expected = {
        **{name: along(dense, *name.split("_")) for name in ("tp", "pp", "cp", "dp", "dp_cp", "tp_cp", "tp_dp")},
        "tp_dp_cp": along(dense, "tp", "dp", "cp"),
        "mp": along(dense, "tp", "pp"),
        **{name: along(expert, *name.split("_")) for name in ("ep", "tp_ep", "tp_ep_pp")},
        "expt_tp": along(expert, "tp"),
        "expt_dp": along(expert, "dp"),
        "embd": [sorted({ranks[0], ranks[-1]}) for ranks in along(dense, "pp")],
        "pos_embd": [[ranks[0]] for ranks in along(dense, "pp")],
    }
    stride = 1
    for level, size in enumerate(sizes.hcp or ()):
        width = stride * size
        expected[f"hcp{level}"] = divided(
            expected["cp"], lambda place, stride=stride, width=width: (place % stride, place // width)
        )
        stride = width
    instances = sizes.num_distributed_optimizer_instances
    dense_part, expert_part = dense["dp"] * dense["cp"] // instances, expert["dp"] // instances
    expected["intra_dp_cp"] = divided(expected["dp_cp"], lambda place: place // dense_part)
    expected["intra_expt_dp"] = divided(expected["expt_dp"], lambda place: place // expert_part)
    if instances > 1:
        expected["inter_dist_opt"] = divided(expected["expt_dp"], lambda place: place % expert_part)
    whole = {}
    for rank, place in enumerate(coordinates(world_size, expert, order)):
        whole.setdefault(place["dp"] // expert_part, []).append(rank)
    expected["intra_dist_opt"] = list(whole.values())
    lists = sizes.rank_lists(world_size)
    assert lists.keys() == expected.keys()
    for name, groups in expected.items():
        # Some parts of groups are listed in another order; a group's own ranks always ascend.
        assert sorted(lists[name]) == sorted(groups), name


@settings(max_examples=40)
@given(data=st.data(), dense=sizes_of_axes(("tp", "cp", "dp", "pp")), order=st.permutations(AXES))
def test_every_group(data, dense, order):
    per_stage = dense["tp"] * dense["cp"] * dense["dp"]
    etp = data.draw(divisors(per_stage))
    ep = data.draw(divisors(per_stage // etp))
    inner = data.draw(divisors(dense["cp"]))
    middle = data.draw(divisors(dense["cp"] // inner))
    hcp = data.draw(st.sampled_from([None, (dense["cp"],), (inner, middle, dense["cp"] // inner // middle)]))
    instances = data.draw(divisors(math.gcd(per_stage // etp // ep, dense["dp"] * dense["cp"])))
    sizes = MegatronSizes(dense["tp"], dense["pp"], dense["cp"], ep, etp, "-".join(order), hcp, instances)
    check_every_group(sizes, per_stage * dense["pp"])


@pytest.mark.parametrize(
    "sizes",
    [
        MegatronSizes(tp=8, pp=8, cp=2, ep=4),
        MegatronSizes(tp=8, pp=4, cp=4, ep=8, etp=2, hcp=(2, 2), num_distributed_optimizer_instances=4),
        MegatronSizes(tp=4, pp=2, cp=8, ep=16, etp=1, order="cp-dp-tp-ep-pp", hcp=(4, 2)),
        MegatronSizes(tp=4, pp=8, ep=4, etp=1, order="tp-cp-pp-ep-dp"),
        MegatronSizes(tp=4, pp=8, ep=4, order="tp-cp-pp-ep-dp", num_distributed_optimizer_instances=2),
    ],
    ids=str,
)
def test_every_group_of_a_thousand_ranks(sizes):
    check_every_group(sizes, LARGEST_WORLD)


ONE_OF_A_THOUSAND = """
import sys, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from shardwise.megatron.sizes import MegatronSizes
from shardwise.core.topology import Topology

dist.init_process_group("fake", store=FakeStore(), rank=777, world_size=1024)
sizes = MegatronSizes(tp=8, pp=4, cp=4, ep=8, etp=2, hcp=(2, 2), num_distributed_optimizer_instances=2)
topology = Topology.create(sizes)
for name, lists in sizes.rank_lists(1024).items():
    (mine,) = [ranks for ranks in lists if 777 in ranks] or [None]
    assert (name in topology) == (mine is not None)
    if mine is not None:
        group = topology.group(name)
        assert dist.get_process_group_ranks(group) == mine
        assert (group.size(), group.rank()) == (topology.size(name), topology.rank(name))
assert topology.mesh.shape == (4, 8, 4, 8)
assert list(topology.mesh.get_coordinate()) == [777 // 256, 777 // 32 % 8, 777 // 8 % 4, 777 % 8]
topology.destroy()
assert len(dist.distributed_c10d._world.pg_map) == 1
"""


@pytest.mark.slow
def test_groups_and_mesh_of_one_of_a_thousand_ranks():
    run("-c", ONE_OF_A_THOUSAND)


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
        4, embedding_ranks=lambda ranks: [ranks[2], ranks[0]], position_embedding_ranks=lambda ranks: ()
    )
    # As a process group orders them.
    assert lists["embd"] == [[0, 2]]
    assert lists["pos_embd"] == [[]]


@pytest.mark.parametrize("chosen", [[1], [0, 0], [4]])
def test_embedding_ranks_of_another_pipeline(chosen):
    with pytest.raises(ConfigError, match=r"embedding ranks chose \[.*\] from the pipeline group \[0, 2\]; it must"):
        ParallelSizes(pp=2).rank_lists(4, embedding_ranks=lambda ranks: chosen)


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
        ({"dp": 0}, "tp-cp-ep-dp-pp", "the size of axis 'dp' is 0; it must be a whole number of at least 1"),
        ({"tp": 2.0}, "tp-cp-ep-dp-pp", "the size of axis 'tp' is 2.0; it must be a whole number"),
        ({"tp": None}, "tp-cp-ep-dp-pp", "the size of axis 'tp' is None; it must be a whole number"),
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
    ("sizes", "error", "message"),
    [
        ({"tp": 3}, TopologyError, "tp 3 x pp 1 x cp 1 = 3 does not divide the world of 8 ranks"),
        ({"tp": 2, "ep": 3}, TopologyError, "expert tp 2 x ep 3 x pp 1 = 6 does not divide the world of 8 ranks"),
        ({"tp": 4, "pp": 4}, TopologyError, "tp 4 x pp 4 x cp 1 = 16 does not divide the world of 8"),
        ({"cp": 0}, ConfigError, "the size of axis 'cp' is 0"),
        ({"etp": 0}, ConfigError, "the size of axis 'etp' is 0"),
        ({"tp": "2"}, ConfigError, "the size of axis 'tp' is '2'"),
        ({"tp": 2, "etp": 1, "pp": 2, "order": "tp-pp-dp-cp-ep"}, ConfigError, "different pipeline stages"),
        ({"cp": 4, "hcp": (2, 3)}, ConfigError, r"levels \[2, 3\] of context parallelism multiply to 6; .* cp 4"),
        ({"cp": 4, "hcp": (-2, -2)}, ConfigError, "the size of axis 'hcp' is -2"),
        ({"num_distributed_optimizer_instances": 0}, ConfigError, "'num_distributed_optimizer_instances' is 0"),
        ({"num_distributed_optimizer_instances": 3}, TopologyError, "instances 3 does not divide dp x cp = 8 ranks"),
        (
            {"ep": 4, "num_distributed_optimizer_instances": 4},
            TopologyError,
            "instances 4 does not divide expert dp = 2 ranks",
        ),
    ],
)
def test_sizes_that_cannot_be(sizes, error, message):
    with pytest.raises(error, match=message):
        MegatronSizes(**sizes).rank_lists(8)
