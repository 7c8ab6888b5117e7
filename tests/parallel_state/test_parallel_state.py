"""The ambient topology: its getters tell what the topology is, before, while and after there is one."""

import functools
import inspect
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwise import parallel_state as ps
from shardwise.core.communication import collectives
from shardwise.core.communication.context import GlobalMemoryBuffer
from shardwise.core.communication.symmetric_memory import GlobalSymmetricMemoryBuffer
from shardwise.core.communication.transports.shared_memory import why_not_here
from shardwise.core.errors import ConfigError, TopologyError
from shardwise.megatron.errors import NotInitializedError
from shardwise.parallel_state import reference_globals

GROUPS = {
    "get_tensor_model_parallel_group": "tp",
    "get_pipeline_model_parallel_group": "pp",
    "get_model_parallel_group": "mp",
    "get_context_parallel_group": "cp",
    "get_tensor_and_data_parallel_group": "tp_dp",
    "get_tensor_and_context_parallel_group": "tp_cp",
    "get_data_parallel_group": "dp",
    "get_data_parallel_group_gloo": "dp",
    "get_embedding_group": "embd",
    "get_position_embedding_group": "pos_embd",
    "get_amax_reduction_group": "tp_dp",
    "get_expert_model_parallel_group": "ep",
    "get_expert_tensor_parallel_group": "expt_tp",
    "get_expert_tensor_and_model_parallel_group": "tp_ep",
    "get_expert_tensor_model_pipeline_parallel_group": "tp_ep_pp",
    "get_expert_data_parallel_group": "expt_dp",
    "get_expert_data_parallel_group_gloo": "expt_dp",
    "get_intra_distributed_optimizer_instance_group": "intra_dist_opt",
    "get_inter_distributed_optimizer_instance_group": "inter_dist_opt",
    "get_data_modulo_expert_parallel_group": "expt_dp",
}
# What each getter without required arguments tells of a group, by the group's name.
SIZES = {
    "tensor_model_parallel": "tp",
    "pipeline_model_parallel": "pp",
    "data_parallel": "dp",
    "context_parallel": "cp",
    "tensor_and_context_parallel": "tp_cp",
    "expert_model_parallel": "ep",
    "expert_tensor_parallel": "expt_tp",
    "expert_tensor_and_model_parallel": "tp_ep",
    "expert_data_parallel": "expt_dp",
}
FIRST_RANKS = {
    "get_tensor_model_parallel_src_rank": "tp",
    "get_model_parallel_src_rank": "mp",
    "get_data_parallel_src_rank": "dp",
    "get_expert_model_parallel_src_rank": "ep",
    "get_pipeline_model_parallel_first_rank": "pp",
}
NEEDS_NOTHING = {
    "RankGenerator",
    "create_group",
    "default_embedding_ranks",
    "default_position_embedding_ranks",
    "destroy_global_memory_buffer",
    "destroy_global_symmetric_memory_buffer",
    "destroy_model_parallel",
    "generate_masked_orthogonal_rank_groups",
    # Models have one stack of layers at every layout.
    "get_pipeline_model_parallel_split_rank",
    "is_inside_encoder",
    "is_pipeline_stage_after_split",
    "is_pipeline_stage_before_split",
    "get_virtual_pipeline_model_parallel_rank",
    "get_virtual_pipeline_model_parallel_world_size",
    "has_separate_all_gather_group",
    "initialize_model_parallel",
    "is_initialized",
    "is_unitialized",
    "model_parallel_is_initialized",
    "resolve_tensor_model_parallel_group",
    *(name for name in ps.__all__ if name.startswith("set_")),
}


@pytest.mark.parametrize("name", sorted(set(ps.__all__) - NEEDS_NOTHING))
def test_use_before_initialisation(name):
    with pytest.raises(
        NotInitializedError, match=r"model parallelism is not initialised; pass a group, or call"
    ) as info:
        getattr(ps, name)()
    # What code for the reference catches.
    assert isinstance(info.value, AssertionError)


def test_nothing_is_there_before_initialisation():
    with pytest.warns(DeprecationWarning, match="use not is_initialized"):
        assert ps.is_unitialized()
    assert not ps.is_initialized()
    assert not ps.model_parallel_is_initialized()
    for name in GROUPS:
        if "check_initialized" in inspect.signature(getattr(ps, name)).parameters:
            assert getattr(ps, name)(check_initialized=False) is None
    assert ps.get_context_parallel_global_ranks(check_initialized=False) is None
    assert ps.get_virtual_pipeline_model_parallel_rank() is None
    assert ps.get_virtual_pipeline_model_parallel_world_size() is None
    ps.destroy_model_parallel()
    with pytest.raises(TopologyError, match="not initialised"):
        ps.resolve_tensor_model_parallel_group(None)
    with pytest.raises(TopologyError, match=r"torch\.distributed is not initialised"):
        ps.initialize_model_parallel()


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "options",
    [
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "order": "cp-tp-ep-dp-pp"},
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
        {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
        {"pipeline_model_parallel_size": 2, "num_distributed_optimizer_instances": 2},
    ],
    ids=str,
)
def test_getters_tell_what_the_topology_is(group, options):
    ps.initialize_model_parallel(**options)
    topology = ps.get_topology()
    assert [topology.sizes.tp, topology.sizes.pp, topology.sizes.cp, topology.sizes.ep, topology.sizes.etp] == [
        options.get(f"{name}_parallel_size", default)
        for name, default in [
            ("tensor_model", 1),
            ("pipeline_model", 1),
            ("context", 1),
            ("expert_model", 1),
            ("expert_tensor", None),
        ]
    ]
    for getter, name in GROUPS.items():
        if name in topology:
            assert getattr(ps, getter)() is topology.group(name), getter
    for what, name in SIZES.items():
        assert getattr(ps, f"get_{what}_world_size")() == topology.size(name), what
        assert getattr(ps, f"get_{what}_rank")() == topology.rank(name), what
    for getter, name in FIRST_RANKS.items():
        assert getattr(ps, getter)() == topology.ranks(name)[0], getter
    assert ps.get_all_ranks() == "_".join(str(topology.rank(name)) for name in ("tp", "dp", "cp", "pp", "ep"))
    assert ps.get_amax_reduction_group(True) is topology.group("tp_dp_cp")
    assert ps.get_amax_reduction_group(tp_only_amax_red=True) is topology.group("tp")
    assert ps.get_amax_reduction_group(True, True) is topology.group("tp_cp")


@pytest.mark.ranks(4)
def test_parts_that_hold_one_copy_of_the_optimizer_state(group):
    ps.initialize_model_parallel(context_parallel_size=2, num_distributed_optimizer_instances=2)
    topology, me = ps.get_topology(), group.rank()
    assert topology.ranks("intra_dp_cp") == topology.ranks("intra_expt_dp") == ((0, 1), (2, 3))[me // 2]
    assert topology.ranks("inter_dist_opt") == ((0, 2), (1, 3))[me % 2]
    assert ps.get_data_parallel_group(True, True) is topology.group("intra_dp_cp")
    assert ps.get_data_parallel_world_size(True, partial_data_parallel=True) == 2
    assert ps.get_data_parallel_rank(True, partial_data_parallel=True) == me % 2
    assert ps.get_expert_data_parallel_group(partial_expert_data_parallel=True) is topology.group("intra_expt_dp")
    assert ps.get_data_modulo_expert_parallel_group(True) is topology.group("intra_expt_dp")
    assert ps.get_expert_data_parallel_world_size(True) == 2
    assert ps.get_expert_data_parallel_world_size() == 4
    assert ps.get_expert_data_parallel_rank(True) == me % 2
    with pytest.raises(ConfigError, match=r"partial_data_parallel=True .*; ask for it with with_context_parallel=True"):
        ps.get_data_parallel_group(partial_data_parallel=True)


@pytest.mark.ranks(4)
def test_pipeline_of_four(group):
    me = group.rank()
    ps.initialize_model_parallel(pipeline_model_parallel_size=4)
    assert ps.get_pipeline_model_parallel_next_rank() == (me + 1) % 4
    assert ps.get_pipeline_model_parallel_prev_rank() == (me - 1) % 4
    assert ps.get_pipeline_model_parallel_last_rank() == 3
    assert (ps.is_pipeline_first_stage(), ps.is_pipeline_last_stage()) == (me == 0, me == 3)
    assert ps.is_rank_in_embedding_group() == (me in (0, 3))
    assert ps.get_embedding_group(check_initialized=False) is None or me in (0, 3)


@pytest.mark.ranks(4)
def test_data_parallelism_with_and_without_context_parallelism(group):
    me = group.rank()
    ps.initialize_model_parallel(context_parallel_size=2)
    assert (ps.get_context_parallel_rank(), ps.get_data_parallel_rank()) == (me % 2, me // 2)
    assert ps.get_data_parallel_world_size() == 2
    assert ps.get_data_parallel_world_size(with_context_parallel=True) == 4
    assert ps.get_data_parallel_rank(with_context_parallel=True) == me
    assert ps.get_data_parallel_src_rank() == me % 2
    assert ps.get_data_parallel_src_rank(with_context_parallel=True) == 0
    assert ps.get_data_parallel_group(with_context_parallel=True).size() == 4
    assert ps.get_tensor_and_data_parallel_group().size() == 2
    assert ps.get_tensor_and_data_parallel_group(with_context_parallel=True).size() == 4
    assert ps.get_context_parallel_global_ranks() == [me // 2 * 2, me // 2 * 2 + 1]


@pytest.mark.ranks(2)
def test_initialised_twice_and_anew(group):
    ps.initialize_model_parallel(2)
    first = ps.get_topology()
    with pytest.raises(TopologyError, match=r"already initialised with .*tp=2.*call destroy_model_parallel\(\) first"):
        ps.initialize_model_parallel(1)
    assert ps.get_topology() is first
    ps.destroy_model_parallel()
    ps.destroy_model_parallel()
    assert not ps.is_initialized()
    ps.initialize_model_parallel(1)
    assert ps.get_data_parallel_world_size() == 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tensor_model_parallel_size": 3}, TopologyError, "tp 3 x pp 1 x cp 1 = 3 does not divide the world of 2"),
        ({"expert_model_parallel_size": 4}, TopologyError, "expert tp 1 x ep 4 x pp 1 = 4 does not divide the world"),
        ({"num_distributed_optimizer_instances": 4}, TopologyError, "instances 4 does not divide dp x cp = 2"),
        ({"tensor_model_parallel_size": 0}, ConfigError, "the size of axis 'tp' is 0"),
        ({"tensor_model_parallel_size": True}, ConfigError, "the size of axis 'tp' is True"),
        ({"order": None}, ConfigError, "order None must name each of"),
        ({"hierarchical_context_parallel_sizes": 4}, ConfigError, r"levels \[4\] .* must multiply to cp 1"),
        ({"distributed_timeout_minutes": "3"}, ConfigError, "distributed_timeout_minutes is '3'"),
        ({"order": "tp-dp-xp"}, ConfigError, "order 'tp-dp-xp' must name each of"),
        ({"order": "dp", "tensor_model_parallel_size": 2}, ConfigError, "but the order 'dp' leaves it out"),
        ({"hierarchical_context_parallel_sizes": [2]}, ConfigError, r"levels \[2\] .* must multiply to cp 1"),
        ({"virtual_pipeline_model_parallel_size": 2}, TopologyError, "is 2 and .* is 1; interleaving needs at least 2"),
        (
            {"virtual_pipeline_model_parallel_size": 0, "pipeline_model_parallel_size": 2},
            ConfigError,
            "virtual_pipeline_model_parallel_size is 0; it must be at least 1",
        ),
        ({"distributed_timeout_minutes": 0}, ConfigError, "distributed_timeout_minutes is 0; it must be over 0"),
        ({"distributed_timeout_minutes": float("nan")}, ConfigError, "distributed_timeout_minutes is nan"),
        ({"use_sharp": True}, ConfigError, "use_sharp=True is not offered.* set NCCL_COLLNET_ENABLE=1"),
        ({"sharp_enabled_group": "dp"}, ConfigError, "sharp_enabled_group='dp' is not offered"),
        ({"nccl_communicator_config_path": "a.yaml"}, ConfigError, "nccl_communicator_config_path='a.yaml' is not off"),
        (
            {"high_priority_stream_groups": ["dp"]},
            ConfigError,
            r"=\['dp'\] is not offered.* TORCH_NCCL_HIGH_PRIORITY=1",
        ),
        ({"pipeline_model_parallel_comm_backend": "ucc"}, ConfigError, "is 'ucc', but .* 'gloo'; leave it out"),
    ],
)
def test_a_failed_initialisation_leaves_nothing(group, options, error, message):
    with pytest.raises(error, match=message) as info:
        ps.initialize_model_parallel(**options)
    messages = [None, None]
    dist.all_gather_object(messages, str(info.value), group=group)
    assert messages[0] == messages[1]
    assert not ps.is_initialized()
    assert ps.get_virtual_pipeline_model_parallel_world_size() is None
    assert len(dist.distributed_c10d._world.pg_map) == 1
    ps.initialize_model_parallel(2)
    assert ps.get_tensor_model_parallel_world_size() == 2


def open_things():
    return len(os.listdir("/proc/self/fd")) + len(os.listdir("/proc/self/task"))


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_destroying_leaves_nothing_open(group):
    # The reference forgets its groups and leaves them open.
    counts = []
    for _ in range(50):
        ps.initialize_model_parallel(2)
        dist.all_reduce(torch.ones(1), group=ps.get_tensor_model_parallel_group())
        assert ps.get_topology().mesh.shape == (1, 1, 1, 2)
        ps.destroy_model_parallel()
        with pytest.raises(TopologyError):
            ps.initialize_model_parallel(3)
        counts.append(open_things())
    # A group of two ranks holds several of each; a few that are being closed may be counted.
    assert counts[-1] <= counts[4] + 4, counts
    assert len(dist.distributed_c10d._world.pg_map) == 1


@pytest.mark.ranks(2)
def test_destroying_unmaps_shared_memory(group):
    def num_mapped():
        return Path("/proc/self/maps").read_text().count("shardwise-")

    before, held = num_mapped(), []
    for _ in range(3):
        ps.initialize_model_parallel(2)
        # A program may hold on to a group that is no more.
        held.append(ps.get_tensor_model_parallel_group())
        collectives.all_reduce(torch.ones(1), group=held[-1])
        opened = num_mapped() - before
        ps.destroy_model_parallel()
        assert num_mapped() == before
    assert opened == (1 if why_not_here() is None else 0)


@pytest.mark.ranks(2)
def test_options_reach_the_topology(group):
    ps.initialize_model_parallel(
        pipeline_model_parallel_size=2,
        distributed_timeout_minutes=3,
        order="pp-tp-cp-ep-dp",
        # What NCCL alone understands may be given as its default.
        pipeline_model_parallel_comm_backend="gloo",
        use_sharp=False,
        high_priority_stream_groups=[],
        create_gloo_process_groups=False,
        hybrid_context_parallel=False,
        create_all_gather_group=True,
        get_embedding_ranks=lambda ranks: ranks[1:],
        get_position_embedding_ranks=lambda ranks: ranks[1:],
    )
    assert ps.is_rank_in_embedding_group() == (group.rank() == 1)
    assert ps.is_rank_in_position_embedding_group() == (group.rank() == 1)
    assert ps.has_separate_all_gather_group()
    backend = ps.get_pipeline_model_parallel_group()._get_backend(torch.device("cpu"))
    assert backend.options._timeout.total_seconds() == 180
    assert ps.get_topology().sizes.order == "pp-tp-cp-ep-dp"


@pytest.mark.ranks(4)
def test_levels_of_context_parallelism(group):
    me = group.rank()
    ps.initialize_model_parallel(context_parallel_size=4, hierarchical_context_parallel_sizes=[2, 2])
    assert ps.get_topology().ranks("hcp0") == ((0, 1), (2, 3))[me // 2]
    assert ps.get_topology().ranks("hcp1") == ((0, 2), (1, 3))[me % 2]
    assert [level.size() for level in ps.get_hierarchical_context_parallel_groups()] == [2, 2]
    assert ps.get_hierarchical_context_parallel_groups()[1] is ps.get_topology().group("hcp1")
    ps.destroy_model_parallel()
    ps.initialize_model_parallel(context_parallel_size=4)
    assert ps.get_hierarchical_context_parallel_groups(check_initialized=False) is None
    with pytest.raises(TopologyError, match=r"is in no group 'hcp0'"):
        ps.get_hierarchical_context_parallel_groups()


@pytest.mark.ranks(2)
def test_validation_is_asked_for_by_keyword(group):
    ps.initialize_model_parallel(2, validate=True)
    assert ps.get_topology().validate
    ps.destroy_model_parallel()
    ps.initialize_model_parallel(2)
    assert not ps.get_topology().validate


@pytest.mark.ranks(4)
def test_interleaved_stages(group):
    stage = group.rank()
    ps.initialize_model_parallel(1, 4, 3, get_embedding_ranks=lambda ranks: [ranks[0], ranks[1], ranks[-1]])
    assert ps.get_virtual_pipeline_model_parallel_world_size() == 3
    assert ps.get_virtual_pipeline_model_parallel_rank() == 0
    assert (ps.is_pipeline_first_stage(), ps.is_pipeline_last_stage()) == (stage == 0, stage == 3)
    assert ps.is_rank_in_embedding_group() == (stage in (0, 1, 3))
    for part in range(3):
        assert ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=part) == (stage == 0 and part == 0)
        assert ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=part) == (stage == 3 and part == 2)
        holds_embedding = {0: part == 0, 1: True, 2: False, 3: part == 2}[stage]
        assert ps.is_rank_in_embedding_group(ignore_virtual=False, vp_stage=part) == holds_embedding
    for wrong in (None, 3, -1):
        for question in (ps.is_pipeline_first_stage, ps.is_pipeline_last_stage):
            with pytest.raises(ConfigError, match=f"vp_stage is {wrong}; with 3 parts .* it must be from 0 to 2"):
                question(ignore_virtual=False, vp_stage=wrong)
    ps.set_virtual_pipeline_model_parallel_rank(2)
    assert ps.get_virtual_pipeline_model_parallel_rank() == 2
    ps.set_virtual_pipeline_model_parallel_world_size(None)
    assert ps.is_pipeline_first_stage(ignore_virtual=False) == (stage == 0)
    with pytest.raises(ConfigError, match="cannot set virtual_pipeline_model_parallel_world_size to 0"):
        ps.set_virtual_pipeline_model_parallel_world_size(0)
    with pytest.raises(ConfigError, match="cannot set virtual_pipeline_model_parallel_rank to -1"):
        ps.set_virtual_pipeline_model_parallel_rank(-1)
    ps.destroy_model_parallel()
    assert ps.get_virtual_pipeline_model_parallel_world_size() is None
    assert ps.get_virtual_pipeline_model_parallel_rank() is None


@pytest.mark.parametrize("name", sorted(name for name in ps.__all__ if name.startswith("set_")))
def test_an_override_works_without_ranks_until_it_is_taken_back(name):
    override, getter = getattr(ps, name), getattr(ps, name.replace("set_", "get_"))
    override(5)
    assert getter() == 5
    others = [other for other in ps.__all__ if other.startswith("set_") and other != name]
    for other in others:
        getattr(ps, other)(7)
    assert getter() == 5
    override(None)
    if "virtual" in name:
        assert getter() is None
    else:
        with pytest.raises(NotInitializedError):
            getter()
        with pytest.raises(ConfigError, match=r"cannot override axis '\w+' with -1; give a count, or None"):
            override(-1)
    ps.destroy_model_parallel()
    for other in others:
        if "virtual" not in other:
            with pytest.raises(NotInitializedError):
                getattr(ps, other.replace("set_", "get_"))()


@pytest.mark.ranks(2)
def test_overrides_of_a_topology(group):
    ps.initialize_model_parallel(1, 2)
    ps.set_pipeline_model_parallel_world_size(4)
    ps.set_pipeline_model_parallel_rank(0)
    ps.set_data_parallel_rank(3)
    assert (ps.get_pipeline_model_parallel_world_size(), ps.get_pipeline_model_parallel_rank()) == (4, 0)
    assert ps.is_pipeline_first_stage()
    assert not ps.is_pipeline_last_stage()
    assert ps.get_data_parallel_rank() == ps.get_data_parallel_rank(with_context_parallel=True) == 3
    ps.set_pipeline_model_parallel_rank(None)
    assert ps.get_pipeline_model_parallel_rank() == group.rank()
    assert ps.get_topology().size("pp") == 2
    ps.destroy_model_parallel()
    ps.initialize_model_parallel(2)
    assert ps.get_pipeline_model_parallel_world_size() == 1
    assert ps.get_data_parallel_rank() == 0


@pytest.mark.ranks(2)
def test_none_is_resolved_once(group):
    ps.initialize_model_parallel(2)
    assert ps.resolve_tensor_model_parallel_group(None) is ps.get_tensor_model_parallel_group()
    assert ps.resolve_tensor_model_parallel_group(group) is group


@pytest.mark.ranks(2)
def test_globals_that_tests_for_the_reference_look_at(group):
    names = [*reference_globals._GROUPS, *reference_globals._RANKS, "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS"]
    names += [f"{name}_{what}" for name in reference_globals._OVERRIDDEN for what in ("RANK", "WORLD_SIZE")]
    names += [f"_VIRTUAL_PIPELINE_MODEL_PARALLEL_{what}" for what in ("RANK", "WORLD_SIZE")]
    names += ["_GLOBAL_MEMORY_BUFFER", "_GLOBAL_SYMMETRIC_MEMORY_BUFFER", "_DATA_PARALLEL_GROUP_WITH_CP_AG"]
    assert [name for name in names if getattr(ps, name) is not None] == []
    ps.initialize_model_parallel(1, 2, 3)
    ps.set_tensor_model_parallel_rank(5)
    ps.set_expert_model_parallel_world_size(7)
    assert ps._MODEL_PARALLEL_GROUP is ps.get_model_parallel_group()
    assert ps._TENSOR_MODEL_PARALLEL_GROUP is ps.get_tensor_model_parallel_group()
    assert [group.rank()] == ps._DATA_PARALLEL_GLOBAL_RANKS
    assert ps._EMBEDDING_GLOBAL_RANKS == ps._PIPELINE_GLOBAL_RANKS == [0, 1]
    assert ([0] if group.rank() == 0 else None) == ps._POSITION_EMBEDDING_GLOBAL_RANKS
    assert (ps._MPU_TENSOR_MODEL_PARALLEL_RANK, ps._MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE) == (5, None)
    assert (ps._MPU_EXPERT_MODEL_PARALLEL_RANK, ps._MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE) == (None, 7)
    assert (ps._VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK, ps._VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE) == (0, 3)
    assert ps._GLOBAL_MEMORY_BUFFER is ps.get_global_memory_buffer()
    ps.destroy_model_parallel()
    assert [name for name in names if getattr(ps, name) is not None] == []
    with pytest.raises(AttributeError, match="has no attribute '_NO_SUCH_GROUP'"):
        ps._NO_SUCH_GROUP  # noqa: B018


@pytest.mark.ranks(1)
def test_the_memory_buffer_lives_with_the_topology(group):
    ps.initialize_model_parallel()
    buffer = ps.get_global_memory_buffer()
    assert ps.get_global_memory_buffer() is buffer
    ps.destroy_global_memory_buffer()
    assert ps.get_global_memory_buffer() is not buffer
    ps.destroy_model_parallel()
    with pytest.raises(TopologyError, match="not initialised"):
        ps.get_global_memory_buffer()


def test_memory_is_used_again_and_grows():
    buffer = GlobalMemoryBuffer()
    first = buffer.get_tensor((2, 3), torch.float32, "mpu")
    assert first.shape == (2, 3)
    assert first.dtype is torch.float32
    assert not first.requires_grad
    assert buffer.get_tensor([4], torch.float32, "mpu").data_ptr() == first.data_ptr()
    assert buffer.get_tensor((2, 3), torch.float32, "other").data_ptr() != first.data_ptr()
    assert buffer.get_tensor((2, 3), torch.float64, "mpu").dtype is torch.float64
    grown = buffer.get_tensor((5, 5), torch.float32, "mpu", device="cpu")
    assert grown.shape == (5, 5)
    assert buffer.get_tensor((2, 3), torch.float32, "mpu").data_ptr() == grown.data_ptr()
    assert buffer.get_tensor((), torch.float32, "mpu").shape == ()
    assert buffer.get_tensor((0, 4), torch.float32, "mpu").shape == (0, 4)


@pytest.mark.ranks(2)
def test_symmetric_memory_on_a_cpu_is_ordinary_memory(group):
    with pytest.raises(NotInitializedError):
        ps.get_global_symmetric_memory_buffer()
    ps.initialize_model_parallel(2)
    buffer = ps.get_global_symmetric_memory_buffer()
    assert buffer is ps.get_global_symmetric_memory_buffer()
    handed = buffer.maybe_get_tensor((3, 5), torch.bfloat16)
    assert (handed["tensor"].shape, handed["tensor"].dtype) == ((3, 5), torch.bfloat16)
    assert (handed["handle"].rank, handed["handle"].world_size) == (group.rank(), 2)
    assert handed["handle"].why == "symmetric memory is memory of CUDA devices, and this is a cpu"
    assert not buffer.is_symmetric
    assert buffer.maybe_get_tensor([2**25], torch.float64)["tensor"].data_ptr() == handed["tensor"].data_ptr()
    assert buffer.maybe_get_tensor((2**25 + 1,), torch.float64) == {"tensor": None, "handle": None}
    ps.destroy_global_symmetric_memory_buffer()
    assert ps.get_global_symmetric_memory_buffer() is not buffer


@pytest.mark.ranks(2)
@pytest.mark.parametrize("failing", [None, "rendezvous", "empty"])
def test_symmetric_memory_of_cuda_devices_or_the_reason_why_not(group, monkeypatch, failing):
    from torch.distributed import _symmetric_memory

    def fails(*args, **options):
        raise RuntimeError("no such device\nand more")

    monkeypatch.setattr(_symmetric_memory, "empty", lambda size, dtype, device: torch.empty(size, dtype=dtype))
    monkeypatch.setattr(_symmetric_memory, "rendezvous", lambda tensor, group: (tensor.data_ptr(), group))
    # On one rank only: all of them must come to the same decision.
    if failing is not None and group.rank() == 1:
        monkeypatch.setattr(_symmetric_memory, failing, fails)
    monkeypatch.setattr(torch, "empty", functools.partial(_on_cpu, torch.empty))
    buffer = GlobalSymmetricMemoryBuffer(1, group, torch.device("cuda", 0))
    handed = buffer.maybe_get_tensor((3, 5), torch.bfloat16)
    assert buffer.is_symmetric == (failing is None)
    if failing is None:
        assert handed["handle"] == (handed["tensor"].data_ptr(), group)
    else:
        step = {"empty": "allocation", "rendezvous": "rendezvous"}[failing]
        assert handed["handle"].why == f"{step} of symmetric memory failed: no such device"


def _on_cpu(empty, *size, device=None, **options):
    return empty(*size, **options)
