"""The ambient topology: its getters tell what the topology is, before, while and after there is one."""

import inspect

import pytest
import torch
import torch.distributed as dist

from shardwise import parallel_state as ps
from shardwise.collectives.buffers import GlobalMemoryBuffer
from shardwise.errors import ConfigError, TopologyError
from shardwise.process_groups_config import ProcessGroupCollection

GROUPS = {
    "get_tensor_model_parallel_group": "tp",
    "get_pipeline_model_parallel_group": "pp",
    "get_model_parallel_group": "mp",
    "get_context_parallel_group": "cp",
    "get_tensor_and_data_parallel_group": "tp_dp",
    "get_tensor_and_context_parallel_group": "tp_cp",
    "get_data_parallel_group": "dp",
    "get_embedding_group": "embd",
    "get_position_embedding_group": "pos_embd",
}
NEEDS_NOTHING = {
    "RankGenerator",
    "default_embedding_ranks",
    "default_position_embedding_ranks",
    "destroy_global_memory_buffer",
    "destroy_model_parallel",
    "generate_masked_orthogonal_rank_groups",
    "initialize_model_parallel",
    "is_initialized",
    "model_parallel_is_initialized",
    "set_data_parallel_rank",
    "set_pipeline_model_parallel_rank",
    "set_pipeline_model_parallel_world_size",
    "set_tensor_model_parallel_rank",
    "set_tensor_model_parallel_world_size",
}


@pytest.mark.parametrize("name", sorted(set(ps.__all__) - NEEDS_NOTHING))
def test_use_before_initialisation(name):
    with pytest.raises(TopologyError, match=r"model parallelism is not initialised; pass a group, or call"):
        getattr(ps, name)()


def test_nothing_is_there_before_initialisation():
    assert not ps.is_initialized()
    assert not ps.model_parallel_is_initialized()
    for name in GROUPS:
        if "check_initialized" in inspect.signature(getattr(ps, name)).parameters:
            assert getattr(ps, name)(check_initialized=False) is None
    ps.destroy_model_parallel()
    with pytest.raises(TopologyError, match="not initialised"):
        ps.resolve_tensor_model_parallel_group(None)
    with pytest.raises(TopologyError, match="not initialised"):
        ProcessGroupCollection.use_mpu_process_groups()
    with pytest.raises(TopologyError, match=r"torch\.distributed is not initialised"):
        ps.initialize_model_parallel()


@pytest.mark.ranks(4)
def test_getters_of_tensor_and_pipeline_parallelism(group):
    me = group.rank()
    tp_rank, stage = me % 2, me // 2
    ps.initialize_model_parallel(2, 2)
    assert ps.is_initialized()
    assert ps.model_parallel_is_initialized()
    topology = ps.get_topology()
    for getter, name in GROUPS.items():
        if name in topology:
            assert getattr(ps, getter)() is topology.group(name)
    assert topology.ranks("tp") == ((0, 1), (2, 3))[stage]
    assert topology.ranks("pp") == ((0, 2), (1, 3))[tp_rank]
    assert topology.ranks("dp") == (me,)
    assert (ps.get_tensor_model_parallel_world_size(), ps.get_tensor_model_parallel_rank()) == (2, tp_rank)
    assert (ps.get_pipeline_model_parallel_world_size(), ps.get_pipeline_model_parallel_rank()) == (2, stage)
    assert (ps.get_data_parallel_world_size(), ps.get_data_parallel_rank()) == (1, 0)
    assert (ps.get_context_parallel_world_size(), ps.get_context_parallel_rank()) == (1, 0)
    assert ps.get_context_parallel_global_ranks() == [me]
    assert ps.get_tensor_model_parallel_src_rank() == 2 * stage
    assert ps.get_model_parallel_src_rank() == 0
    assert ps.get_data_parallel_src_rank() == me
    assert ps.get_pipeline_model_parallel_first_rank() == tp_rank
    assert ps.get_pipeline_model_parallel_last_rank() == tp_rank + 2
    assert ps.get_pipeline_model_parallel_next_rank() == (me + 2) % 4
    assert ps.get_pipeline_model_parallel_prev_rank() == (me + 2) % 4
    assert ps.is_pipeline_first_stage() == (stage == 0)
    assert ps.is_pipeline_last_stage() == (stage == 1)
    assert ps.is_rank_in_embedding_group()
    assert ps.is_rank_in_position_embedding_group() == (stage == 0)
    assert (ps.get_position_embedding_group(check_initialized=False) is None) == (stage == 1)
    if stage == 1:
        with pytest.raises(TopologyError, match=f"rank {me} is in no group 'pos_embd'"):
            ps.get_position_embedding_group()
    assert ps.get_all_ranks() == f"{tp_rank}_0_0_{stage}_0"


@pytest.mark.ranks(4)
def test_pipeline_of_four(group):
    me = group.rank()
    ps.initialize_model_parallel(pipeline_model_parallel_size=4)
    assert ps.get_pipeline_model_parallel_next_rank() == (me + 1) % 4
    assert ps.get_pipeline_model_parallel_prev_rank() == (me - 1) % 4
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
def test_a_failed_initialisation_leaves_nothing(group):
    with pytest.raises(ConfigError, match="tp 3 x pp 1 x cp 1 = 3 does not divide the world of 2 ranks"):
        ps.initialize_model_parallel(3)
    assert not ps.is_initialized()
    ps.initialize_model_parallel(2)
    assert ps.get_tensor_model_parallel_world_size() == 2


@pytest.mark.ranks(2)
def test_options_reach_the_topology(group):
    ps.initialize_model_parallel(
        pipeline_model_parallel_size=2,
        distributed_timeout_minutes=3,
        order="pp-tp-cp-ep-dp",
        get_embedding_ranks=lambda ranks: ranks[1:],
        get_position_embedding_ranks=lambda ranks: ranks[1:],
    )
    assert ps.is_rank_in_embedding_group() == (group.rank() == 1)
    assert ps.is_rank_in_position_embedding_group() == (group.rank() == 1)
    backend = ps.get_pipeline_model_parallel_group()._get_backend(torch.device("cpu"))
    assert backend.options._timeout.total_seconds() == 180
    assert ps.get_topology().sizes.order == "pp-tp-cp-ep-dp"


@pytest.mark.ranks(2)
def test_overrides(group):
    # Tools that have no ranks may still ask.
    ps.set_tensor_model_parallel_world_size(8)
    ps.set_tensor_model_parallel_rank(5)
    assert (ps.get_tensor_model_parallel_world_size(), ps.get_tensor_model_parallel_rank()) == (8, 5)
    ps.initialize_model_parallel(1, 2)
    ps.set_pipeline_model_parallel_world_size(4)
    ps.set_pipeline_model_parallel_rank(0)
    ps.set_data_parallel_rank(3)
    assert (ps.get_pipeline_model_parallel_world_size(), ps.get_pipeline_model_parallel_rank()) == (4, 0)
    assert ps.is_pipeline_first_stage()
    assert not ps.is_pipeline_last_stage()
    assert ps.get_data_parallel_rank() == 3
    ps.set_pipeline_model_parallel_rank(None)
    assert ps.get_pipeline_model_parallel_rank() == group.rank()
    ps.set_pipeline_model_parallel_rank(None)
    with pytest.raises(ConfigError, match="cannot override axis 'dp' with -1"):
        ps.set_data_parallel_rank(-1)
    ps.destroy_model_parallel()
    ps.initialize_model_parallel(2)
    assert ps.get_tensor_model_parallel_world_size() == 2
    assert ps.get_tensor_model_parallel_rank() == group.rank()
    assert ps.get_data_parallel_rank() == 0


@pytest.mark.ranks(2)
def test_none_is_resolved_once(group):
    ps.initialize_model_parallel(2)
    assert ps.resolve_tensor_model_parallel_group(None) is ps.get_tensor_model_parallel_group()
    assert ps.resolve_tensor_model_parallel_group(group) is group
    collection = ProcessGroupCollection.use_mpu_process_groups()
    assert collection.tp is ps.get_tensor_model_parallel_group()
    assert collection.dp is ps.get_data_parallel_group()
    ones = torch.ones(1)
    dist.all_reduce(ones, group=collection.tp)
    assert ones.item() == 2


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
    grown = buffer.get_tensor((5, 5), torch.float32, "mpu", "cpu")
    assert grown.shape == (5, 5)
    assert buffer.get_tensor((2, 3), torch.float32, "mpu").data_ptr() == grown.data_ptr()
    assert buffer.get_tensor((), torch.float32, "mpu").shape == ()
    assert buffer.get_tensor((0, 4), torch.float32, "mpu").shape == (0, 4)
