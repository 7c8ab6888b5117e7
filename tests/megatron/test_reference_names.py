"""What programs written for Megatron reach into besides the public names, and the kinds of errors they catch."""

import pytest
import torch
import torch.distributed as dist
from harness.parity import assert_bit_equal, assert_unmodified

from shardwise import parallel_state as ps, tensor_parallel
from shardwise.core import errors
from shardwise.core.errors import ConfigError, ShardingError, TopologyError
from shardwise.core.rank_grid import RankGenerator
from shardwise.megatron import errors as asserted_errors, utils
from shardwise.megatron.config import TransformerConfig
from shardwise.megatron.errors import AssertedTopologyError
from shardwise.megatron.sizes import MegatronSizes
from shardwise.megatron.utils import divide
from shardwise.tensor_parallel import ColumnParallelLinear, RowParallelLinear, layers, mappings, random
from shardwise.tensor_parallel.cross_entropy import _VocabParallelCrossEntropy, vocab_parallel_cross_entropy


def config(**options):
    return TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, use_cpu_initialization=True, **options)


def test_errors_of_the_door_are_assertion_errors_of_the_engine_s_classes():
    defined = [value for value in vars(asserted_errors).values() if isinstance(value, type)]
    own = [error for error in defined if error.__module__ == asserted_errors.__name__]
    assert len(own) == 6
    for error in own:
        engine, assertion = error.__bases__
        assert (engine.__module__, assertion) == (errors.__name__, AssertionError)


def test_asserting_keeps_other_errors_and_says_where():
    @asserted_errors.asserting(asserted_errors.AssertedShardingError)
    def function(error):
        raise error

    with pytest.raises(asserted_errors.AssertedShardingError, match=r"^said$") as info:
        function(ShardingError("said"))
    assert [entry.name for entry in info.traceback][-1] == "function"
    assert info.value.__suppress_context__
    for error in (ConfigError("said"), errors.WeightError("said"), KeyError("said")):
        with pytest.raises(type(error)) as info:
            function(error)
        assert info.value is error


def test_what_the_reference_asserts_is_an_assertion_error():
    view = torch.zeros(2, 3)[0]
    marked = torch.zeros(2)
    tensor_parallel.set_tensor_model_parallel_attributes(marked, True, 0, 1)
    for call in (
        lambda: divide(4, 5),
        lambda: utils.assert_viewless_tensor(view),
        lambda: utils.safely_set_viewless_tensor_data(view, torch.zeros(3)),
        lambda: tensor_parallel.set_tensor_model_parallel_attributes(marked, True, 1, 1),
        lambda: ps.initialize_model_parallel(),
        lambda: ps.get_tensor_model_parallel_group(),
        lambda: ps.get_data_parallel_group(with_context_parallel=True, independent_all_gather=True),
        lambda: mappings._reduce(view, None),
        lambda: utils.drain_embedding_wgrad_compute(config(), [view], [], marked, None),
    ):
        with pytest.raises(AssertionError) as info:
            call()
        assert isinstance(info.value, errors.ShardwiseError)
        assert isinstance(info.value, ValueError | RuntimeError)
    with pytest.raises(RuntimeError, match="'pp' has size 2 but the order 'tp-dp' leaves it out"):
        RankGenerator(1, 1, 1, 2, 1, "tp-dp")


@pytest.mark.ranks(3)
def test_what_the_reference_asserts_of_a_topology_and_of_layers(group):
    ps.initialize_model_parallel(pipeline_model_parallel_size=3, virtual_pipeline_model_parallel_size=2)
    with pytest.raises(AssertionError, match="already initialised"):
        ps.initialize_model_parallel()
    for ask in (ps.is_pipeline_first_stage, ps.is_pipeline_last_stage):
        with pytest.raises(AssertionError, match="vp_stage is None"):
            ask(ignore_virtual=False)
    if group.rank() == 1:
        with pytest.raises(AssertionError, match="rank 1 is in no group 'embd'"):
            ps.get_embedding_group()
    with pytest.raises(AssertionError, match="partial_data_parallel"):
        ps.get_data_parallel_group(partial_data_parallel=True)
    with pytest.raises(AssertionError, match="'inter_dist_opt'"):
        ps.get_inter_distributed_optimizer_instance_group()
    ps.destroy_model_parallel()
    with pytest.raises(AssertionError, match="not initialised"):
        ps.get_embedding_group()
    with pytest.raises(AssertionError, match=r"\[2\] of context parallelism multiply to 2"):
        ps.initialize_model_parallel(context_parallel_size=3, hierarchical_context_parallel_sizes=[2])
    with pytest.raises(AssertionError, match="instances 2 does not divide"):
        ps.initialize_model_parallel(num_distributed_optimizer_instances=2)
    for loss in (vocab_parallel_cross_entropy, _VocabParallelCrossEntropy.apply):
        with pytest.raises(AssertionError, match=r"label_smoothing is 1\.5"):
            loss(torch.zeros(1, 1, 2), torch.zeros(1, 1, dtype=torch.long), 1.5, group)

    init_method = torch.nn.init.zeros_
    column = ColumnParallelLinear(
        4, 6, config=config(), init_method=init_method, skip_weight_param_allocation=True, tp_group=group
    )
    for weight in (None, torch.zeros(3, 4)):
        with pytest.raises(RuntimeError, match="weight"):
            column(torch.zeros(1, 1, 4), weight)
    with pytest.raises(AssertionError, match="6 is not divisible by 4"):
        ColumnParallelLinear(4, 6, config=config(), init_method=init_method, stride=4, tp_group=group)
    row = {"init_method": init_method, "bias": True, "skip_bias_add": False, "tp_group": group}
    with pytest.raises(RuntimeError, match="input_is_parallel=True"):
        RowParallelLinear(
            6, 4, config=config(sequence_parallel=True, tensor_model_parallel_size=3), input_is_parallel=False, **row
        )
    with pytest.raises(AssertionError, match="skip_bias_add=True"):
        RowParallelLinear(6, 4, config=config(), input_is_parallel=True, is_expert=True, **row)
    with pytest.raises(AssertionError, match=r"has no 'b'"):
        tensor_parallel.broadcast_data(["b"], {"a": torch.zeros(1)}, torch.float32, group)


@pytest.mark.ranks(2)
def test_moves_without_autograd(group):
    ps.initialize_model_parallel(2)
    me, t = group.rank(), group.size()
    x = torch.arange(10.0).view(5, 2) + 100 * me
    every = [torch.arange(10.0).view(5, 2) + 100 * rank for rank in range(t)]
    sizes = [3, 2]
    with assert_unmodified(x):
        assert_bit_equal(mappings._reduce(x, group), sum(every))
        assert_bit_equal(mappings._split_along_first_dim(x, group), x.split(sizes)[me])
        assert_bit_equal(mappings._split_along_last_dim(x, group), x.chunk(t, -1)[me])
        assert_bit_equal(mappings._gather_along_last_dim(x, group), torch.cat(every, -1))
        assert_bit_equal(mappings._gather_along_first_dim(x, group), torch.cat(every))
        assert_bit_equal(mappings._reduce_scatter_along_first_dim(x, group), sum(every).split(sizes)[me])
        assert_bit_equal(mappings._reduce_scatter_along_first_dim(x, group, [1, 4]), sum(every).split([1, 4])[me])
        assert_bit_equal(mappings._reduce_scatter_along_last_dim(x, group), sum(every).chunk(t, -1)[me])
        buffered = mappings._gather_along_first_dim(x[: sizes[me]], group, sizes, use_global_buffer=True)
    assert_bit_equal(buffered, torch.cat([whole[:size] for whole, size in zip(every, sizes, strict=True)]))
    again = ps.get_global_memory_buffer().get_tensor((1,), torch.float32, "mpu")
    assert again.data_ptr() == buffered.data_ptr()
    # The moves with autograd take the flag too.
    for move, sizes_of_move in (
        (mappings._GatherFromSequenceParallelRegion, (True, None)),
        (mappings._ReduceScatterToSequenceParallelRegion, (None,)),
    ):
        for function in (move.apply, lambda *given, move=move: move.symbolic(None, *given)):
            result = function(torch.ones(4, 2), group, *sizes_of_move, True)
            again = ps.get_global_memory_buffer().get_tensor((1,), torch.float32, "mpu")
            assert result.data_ptr() == again.data_ptr()
            assert result.tolist() == ([[1.0, 1.0]] * 8 if len(sizes_of_move) == 2 else [[2.0, 2.0]] * 2)
    with pytest.raises(AssertedTopologyError, match="group is None; pass a group"):
        mappings._gather_along_first_dim(x, None)


@pytest.mark.ranks(2)
def test_weights_of_a_program_s_own_layers(group):
    def whole_of(init_method):
        torch.manual_seed(3)
        return init_method(torch.empty(8, 6))

    ps.initialize_model_parallel(2)
    me = group.rank()
    whole = whole_of(torch.nn.init.normal_)
    expected = torch.cat([whole.chunk(4)[me], whole.chunk(4)[2 + me]])
    for keeps_master in (False, True):
        torch.manual_seed(3)
        weight = torch.nn.Parameter(torch.empty(4, 6))
        master = layers._initialize_affine_weight_cpu(
            weight, 8, 6, 4, 0, torch.nn.init.normal_, stride=2, return_master_weight=keeps_master
        )
        assert_bit_equal(weight.data, expected)
        assert (weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride) == (True, 0, 2)
        assert master is None if not keeps_master else torch.equal(master, whole)
    bare = torch.nn.Parameter(torch.empty(8, 2))
    layers._initialize_affine_weight_cpu(
        bare, 8, 6, 2, 1, torch.nn.init.ones_, rank=2, world_size=3, skip_set_tensor_parallel_attributes=True
    )
    assert not hasattr(bare, "partition_dim")
    with pytest.raises(ShardingError, match=r"weight has shape \[8, 2\] .* rank 0 of 2 holds \[8, 3\] of \[8, 6\]"):
        layers._initialize_affine_weight_cpu(bare, 8, 6, 2, 1, torch.nn.init.ones_, rank=0, world_size=2)

    tensor_parallel.model_parallel_cuda_manual_seed(7)
    own = torch.nn.Parameter(torch.empty(5))
    layers._initialize_affine_weight_gpu(own, torch.nn.init.normal_, 0)
    every = [torch.empty(5) for _ in range(2)]
    dist.all_gather(every, own.data, group=group)
    assert not torch.equal(*every)
    assert own.partition_dim == 0
    assert layers._grad_accum_fusion_available


@pytest.mark.ranks(2)
@pytest.mark.parametrize("alone", [False, True], ids=["two ranks", "one rank"])
def test_the_loss_by_the_name_of_its_function(group, alone):
    assert issubclass(_VocabParallelCrossEntropy, torch.autograd.Function)
    if alone:
        group = [dist.new_group([rank]) for rank in range(2)][group.rank()]
    torch.manual_seed(group.rank())
    target = torch.tensor([0, 5, 7]).clamp(max=4 * group.size() - 1)
    results = []
    for function in (_VocabParallelCrossEntropy.apply, vocab_parallel_cross_entropy):
        torch.manual_seed(group.rank())
        logits = torch.randn(3, 4, requires_grad=True)
        values = logits.detach().clone()
        loss = function(logits, target, 0.1, group)
        loss.square().sum().backward()
        assert_bit_equal(logits.detach(), values)
        results.append((loss, logits.grad))
    for actual, expected in zip(*results, strict=True):
        assert_bit_equal(actual, expected)

    class Own(torch.autograd.Function):
        """A function of a program's own on top of it."""

        @staticmethod
        def forward(ctx, *args):
            return 2 * _VocabParallelCrossEntropy.forward(ctx, *args)

        @staticmethod
        def backward(ctx, grad_output):
            return _VocabParallelCrossEntropy.backward(ctx, 2 * grad_output)

    logits = values.clone().requires_grad_()
    Own.apply(logits, target, 0.0, group).sum().backward()
    plain = values.clone().requires_grad_()
    (2 * vocab_parallel_cross_entropy(plain, target, 0.0, group)).sum().backward()
    assert_bit_equal(logits.grad, plain.grad)
    with pytest.raises(ValueError, match="target"):
        _VocabParallelCrossEntropy.apply(logits, target + 999, 0.0, group)


def test_drawing_aside():
    tracker = random.get_cuda_rng_tracker()
    tracker.reset()
    assert random._CUDA_RNG_STATE_TRACKER is tracker
    tracker.add("a", 5)
    torch.manual_seed(1)
    with random._fork_rng():
        aside = torch.rand(3)
        with tracker.fork("a"):
            aside_in_stream = torch.rand(3)
    assert_bit_equal(torch.rand(3), aside)
    with tracker.fork("a"):
        assert_bit_equal(torch.rand(3), aside_in_stream)
    tracker.reset()
    with pytest.raises(AttributeError, match="has no attribute '_NO_SUCH'"):
        random._NO_SUCH  # noqa: B018


@pytest.mark.ranks(4)
def test_a_second_group_for_gathering_and_groups_for_long_samples(group):
    ps.initialize_model_parallel(context_parallel_size=2, create_all_gather_group=True, hybrid_context_parallel=True)
    me = group.rank()
    assert ps.has_separate_all_gather_group()
    apart = ps.get_data_parallel_group(with_context_parallel=True, independent_all_gather=True)
    whole = ps.get_data_parallel_group(with_context_parallel=True)
    assert apart is not whole
    assert dist.get_process_group_ranks(apart) == dist.get_process_group_ranks(whole) == [0, 1, 2, 3]
    assert ps._DATA_PARALLEL_GROUP_WITH_CP_AG is apart
    assert ps._DATA_PARALLEL_GROUP_WITH_CP_GLOO is whole
    # Where there is one group only, it gathers too.
    assert ps.get_data_parallel_group(independent_all_gather=True) is ps.get_data_parallel_group()
    assert mappings._reduce(torch.ones(1), apart).item() == 4

    pair = ps.get_hybrid_data_context_parallel_groups(group_size=2)
    assert dist.get_process_group_ranks(pair) == [me // 2 * 2, me // 2 * 2 + 1]
    assert {2: pair} == ps._HYBRID_DP_CP_GROUPS
    assert ps.get_hybrid_data_context_parallel_groups(group_size=4) is whole
    assert ps.get_hybrid_data_context_parallel_groups(check_initialized=False, group_size=3) is None
    with pytest.raises(AssertedTopologyError, match="'hybrid3'"):
        ps.get_hybrid_data_context_parallel_groups(group_size=3)
    ps.destroy_model_parallel()

    ps.initialize_model_parallel()
    assert not ps.has_separate_all_gather_group()
    assert ps._DATA_PARALLEL_GROUP_WITH_CP_AG is None
    assert ps._HYBRID_DP_CP_GROUPS == {}
    with pytest.raises(TopologyError, match="'dp_cp_all_gather'"):
        ps.get_data_parallel_group(with_context_parallel=True, independent_all_gather=True)


def test_parts_of_the_ranks_by_powers_of_two():
    lists = MegatronSizes(tp=2, cp=2, hybrid_context_parallel=True).rank_lists(24)
    # Of 12 ranks 2 and 4 divide; 8 does not.
    assert [name for name in lists if name.startswith("hybrid")] == ["hybrid2", "hybrid4"]
    assert lists["hybrid4"][:3] == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18, 20, 22]]
    assert not [name for name in MegatronSizes().rank_lists(8) if name.startswith("hybrid")]
    with pytest.raises(ConfigError, match="halves the dp x cp = 3 ranks"):
        MegatronSizes(hybrid_context_parallel=True).rank_lists(3)


@pytest.mark.ranks(2)
def test_small_functions_of_utils(group):
    assert utils.get_pg_src_rank() == 0
    ps.initialize_model_parallel()
    assert utils.get_pg_src_rank(ps.get_data_parallel_group()) == 0
    assert utils.get_pg_src_rank(ps.get_tensor_model_parallel_group()) == group.rank()
    assert utils.is_torch_min_version("1.0")
    assert not utils.is_torch_min_version("99.0")
    assert utils.is_torch_min_version(torch.__version__)
    assert not utils.is_torch_min_version(torch.__version__, check_equality=False)
    assert not utils.is_te_min_version("0.1")
