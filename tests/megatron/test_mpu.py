"""Megatron's older package: layers without a config, sizes with an underscore, and what its programs call besides."""

import copy
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness.parity import assert_bit_equal, assert_close_to, assert_unmodified, gather_shards
from torch.nn import init

from shardwise import parallel_state, tensor_parallel
from shardwise.core.errors import ConfigError
from shardwise.megatron import initialize as megatron_initialize, mpu
from shardwise.megatron.config import ModelParallelConfig
from shardwise.megatron.errors import AssertedConfigError, AssertedTopologyError, NotInitializedError
from shardwise.megatron.mpu import mappings

I, O, ROWS = 7, 13, 5  # noqa: E741
DOUBLE = ModelParallelConfig(params_dtype=torch.float64)


def whole(layer, name, group):
    return gather_shards(getattr(layer, name), layer.param_layouts[name], group)


def drawn_dense(*shape):
    """What one rank would draw from seed 3, by the method that layers take where none is given."""
    torch.manual_seed(3)
    return init.xavier_normal_(torch.empty(shape, dtype=torch.float64))


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", ["ColumnParallelLinear", "RowParallelLinear"])
def test_linear_layers_take_and_give_whole_tensors_by_default(group, name):
    mpu.initialize_model_parallel(group.size())
    torch.manual_seed(3)
    layer = getattr(mpu, name)(I, O, keep_master_weight_for_test=True, config=DOUBLE)
    dense = drawn_dense(O, I)
    assert_bit_equal(layer.master_weight, dense)
    assert_bit_equal(whole(layer, "weight", group).detach(), dense)
    assert not layer.bias.any()
    with torch.no_grad():
        bias = torch.randn(O, dtype=torch.float64)
        layer.bias.copy_(layer.param_layouts["bias"].take(bias, group.rank()))
    parameters = [tensor.requires_grad_() for tensor in (dense, bias)]
    x, incoming = torch.randn(ROWS, I, dtype=torch.float64), torch.randn(ROWS, O, dtype=torch.float64)
    own_x, dense_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = F.linear(dense_x, *parameters)
    expected.backward(incoming)
    with assert_unmodified(own_x, incoming, *layer.parameters()):
        output, none = layer(own_x)
        output.backward(incoming)
    assert none is None
    assert_close_to(output.detach(), expected.detach(), rtol_of_norm=1e-13)
    assert_close_to(own_x.grad, dense_x.grad, rtol_of_norm=1e-13)
    for own, parameter in zip(("weight", "bias"), parameters, strict=True):
        gradient = gather_shards(getattr(layer, own).grad, layer.param_layouts[own], group)
        assert_close_to(gradient, parameter.grad, rtol_of_norm=1e-13)


@pytest.mark.ranks(1, 2, 3)
def test_an_embedding_without_a_config(group):
    mpu.initialize_model_parallel(group.size())
    torch.manual_seed(3)
    layer = mpu.VocabParallelEmbedding(11, 3, config=DOUBLE)
    dense = drawn_dense(11, 3)
    assert_bit_equal(whole(layer, "weight", group).detach(), dense)
    ids, incoming = torch.randint(11, (2, ROWS)), torch.randn(2, ROWS, 3, dtype=torch.float64)
    expected = F.embedding(ids, dense.requires_grad_())
    expected.backward(incoming)
    output = layer(ids)
    output.backward(incoming)
    assert_bit_equal(output.detach(), expected.detach())
    assert_close_to(
        gather_shards(layer.weight.grad, layer.param_layouts["weight"], group), dense.grad, rtol_of_norm=1e-13
    )
    torch.manual_seed(3)
    single = mpu.VocabParallelEmbedding(11, 3, init.normal_)
    torch.manual_seed(3)
    assert_bit_equal(whole(single, "weight", group).detach(), init.normal_(torch.empty(11, 3)))


@pytest.mark.ranks(2)
def test_a_result_is_a_pair_and_serves_as_its_output(group):
    mpu.initialize_model_parallel(2)
    layer = mpu.RowParallelLinear(I, O)
    x, other = torch.randn(ROWS, I), torch.randn(ROWS, O)
    result = layer(x)
    output = result[0]
    assert tuple(result) == (output, None)
    assert isinstance(result, tuple)
    for of in (
        lambda y: torch.mul(y, other),
        lambda y: torch.cat([y, other], dim=-1),
        lambda y: F.gelu(y),
        lambda y: F.linear(input=y, weight=other),
        lambda y: y + other,
        lambda y: other + y,
        lambda y: y + y,
        lambda y: 2 * y,
        lambda y: y * 2,
        lambda y: (y - other) / 3,
        lambda y: 1 - y,
        lambda y: -(y**2),
        lambda y: y @ other.t(),
        lambda y: other.t() @ y,
        lambda y: y.view(O, ROWS).sum(dim=0),
    ):
        assert_bit_equal(of(result), of(output))
    assert (result.shape, result.requires_grad) == ((ROWS, O), True)
    # Modules, hooks and copies keep it.
    layer.register_full_backward_hook(lambda *_: None)
    torch.nn.Sequential(layer, torch.nn.Tanh())(x.requires_grad_()).sum().backward()
    assert layer.weight.grad.any()
    copied = copy.deepcopy(mpu.LayerOutput(output.detach()))
    assert_bit_equal(copied.output, output.detach())
    assert copied.bias is None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = result.no_such_name
    # What returns its bias is a pair alone, so that no bias is lost.
    apart = mpu.ColumnParallelLinear(I, O, True, False, init.ones_, 1, False, True)
    pair = apart(x)
    assert type(pair) is tuple
    assert pair[0].shape == (ROWS, len(apart.bias))
    assert pair[1] is apart.bias
    with pytest.raises(TypeError):
        torch.mul(pair, other)


@pytest.mark.ranks(2)
def test_layers_are_those_of_tensor_parallel(group):
    mpu.initialize_model_parallel(2)
    alone = [dist.new_group([rank]) for rank in range(2)][group.rank()]
    layer = mpu.ColumnParallelLinear(I, O, tp_group=alone)
    assert isinstance(layer, tensor_parallel.ColumnParallelLinear)
    assert (layer.tp_size, layer.weight.dtype, layer.is_expert_without_slicing) == (1, torch.float32, False)
    for name, width in (("ColumnParallelLinear", O), ("RowParallelLinear", I)):
        expert = getattr(mpu, name)
        with pytest.raises(ConfigError, match=r"whole on each of the 2 ranks.*enable_expert_tensor_parallelism=True"):
            expert(I, O, moe=True)
        assert expert(I, O, moe=True, tp_group=alone).is_expert_without_slicing
        split = expert(I, O, moe=True, enable_expert_tensor_parallelism=True)
        assert width // 2 <= split.local_features <= width // 2 + 1
    # What is not another in mpu is the same.
    assert mpu.layers.set_tensor_model_parallel_attributes is tensor_parallel.set_tensor_model_parallel_attributes
    assert mpu.random.get_cuda_rng_tracker is tensor_parallel.get_cuda_rng_tracker
    assert mpu.vocab_parallel_cross_entropy is tensor_parallel.vocab_parallel_cross_entropy
    assert mpu.initialize._TENSOR_MODEL_PARALLEL_GROUP is parallel_state.get_tensor_model_parallel_group()
    weight, master = torch.empty(3, 4), torch.empty(6, 4)
    torch.manual_seed(3)
    mpu.layers._initialize_affine_weight(weight, 6, 4, 3, 0, init.normal_)
    torch.manual_seed(3)
    assert_bit_equal(weight, init.normal_(master).chunk(2)[group.rank()])


@pytest.mark.ranks(4)
def test_groups_by_the_names_of_mpu(group):
    mpu.initialize_model_parallel(tensor_model_parallel_size_=2)
    assert mpu.get_model_parallel_world_size() == mpu.get_tensor_model_parallel_world_size() == 2
    assert mpu.get_model_parallel_rank() == mpu.get_tensor_model_parallel_rank() == group.rank() % 2
    assert dist.get_process_group_ranks(mpu.get_data_parallel_group()) == [group.rank() % 2, group.rank() % 2 + 2]
    mpu.destroy_tensor_model_parallel()
    assert not mpu.model_parallel_is_initialized()

    with pytest.warns(UserWarning, match="tensor_model_parallel_size_ is 8, and there are 4 ranks: it becomes 4"):
        mpu.initialize_model_parallel(8)
    assert mpu.get_tensor_model_parallel_world_size() == 4
    mpu.destroy_model_parallel()

    mpu.initialize_model_parallel(2, 2, virtual_pipeline_model_parallel_size_=3)
    first, last = group.rank() < 2, group.rank() >= 2
    for part in range(3):
        # Without an argument they are about the part that was set last.
        mpu.set_virtual_pipeline_model_parallel_rank(part)
        assert mpu.is_pipeline_first_stage() == (first and part == 0)
        assert mpu.is_pipeline_last_stage() == (last and part == 2)
        assert mpu.is_pipeline_first_stage(ignore_virtual=True) == first
        assert mpu.is_pipeline_last_stage(True) == last
    for ask in (mpu.get_model_parallel_world_size, mpu.get_model_parallel_rank):
        with pytest.raises(AssertedTopologyError, match="there are 2 stages; call get_tensor_model_parallel_"):
            ask()


@pytest.mark.ranks(2)
def test_moves_that_need_no_group(group):
    mpu.initialize_model_parallel(2)
    me = group.rank()
    every = [torch.arange(6.0).view(2, 3) + 10 * rank for rank in range(2)]
    x = every[me]
    with assert_unmodified(x):
        assert_bit_equal(mappings._reduce(x), every[0] + every[1])
        assert_bit_equal(mappings._split(x), x.split([2, 1], dim=-1)[me].contiguous())
        assert_bit_equal(mappings._gather(x), torch.cat(every, dim=-1))
    for name, function in (
        ("_CopyToModelParallelRegion", mpu.copy_to_tensor_model_parallel_region),
        ("_ReduceFromModelParallelRegion", mpu.reduce_from_tensor_model_parallel_region),
        ("_ScatterToModelParallelRegion", mpu.scatter_to_tensor_model_parallel_region),
        ("_GatherFromModelParallelRegion", mpu.gather_from_tensor_model_parallel_region),
    ):
        move = getattr(mappings, name)
        results = []
        for call in (move.apply, function):
            given = x.clone().requires_grad_()
            output = call(given)
            output.square().sum().backward()
            results.append((output.detach(), given.grad))
        for actual, expected in zip(*results, strict=True):
            assert_bit_equal(actual, expected)
        assert_bit_equal(move.symbolic(None, x), results[0][0])
        assert_bit_equal(move.apply(x, group), results[0][0])
    # Those of the newer package are there, with their group.
    assert_bit_equal(mappings._gather_along_first_dim(x, group), torch.cat(every))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("buffer", [False, True])
def test_recomputation_of_a_function_and_its_arguments(group, buffer):
    mpu.initialize_model_parallel(group.size())
    if buffer:
        mpu.init_checkpointed_activations_memory_buffer()
        with pytest.raises(AssertedConfigError, match="is there already"):
            mpu.init_checkpointed_activations_memory_buffer()
    values = torch.randn(ROWS, I, dtype=torch.float64)
    weight = torch.randn(I, I, dtype=torch.float64, requires_grad=True)

    def function(x, factor):
        return (x @ weight).sin() * factor

    plain = values.clone().requires_grad_()
    function(plain, 3.0).sum().backward()
    expected, weight.grad = weight.grad, None
    # Two that wait for their backward, and one for which the caller decides, as in later releases.
    given = [values.clone().requires_grad_() for _ in range(3)]
    mpu.reset_checkpointed_activations_memory_buffer()
    outputs = [mpu.checkpoint(function, x, 3.0) for x in given[:2]]
    outputs.append(mpu.checkpoint(function, not buffer, given[2], 3.0))
    chunk = -(-values.numel() // group.size())
    for x, is_split in zip(given, (buffer, buffer, not buffer), strict=True):
        assert x.shape == ((chunk,) if is_split else values.shape)
    sum(output.sum() for output in outputs).backward()
    for x in given:
        assert_bit_equal(x.detach(), values)
        assert_bit_equal(x.grad, plain.grad)
    assert_close_to(weight.grad, 3 * expected, rtol_of_norm=1e-13)
    mpu.destroy_model_parallel()
    with pytest.raises(NotInitializedError):
        mpu.init_checkpointed_activations_memory_buffer()
    x = values.clone().requires_grad_()
    mpu.checkpoint(function, x, 3.0)
    assert x.shape == values.shape


def test_quotients():
    assert mpu.divide(12, 4) == 3
    mpu.utils.ensure_divisibility(12, 4)
    with pytest.raises(AssertionError, match="12 is not divisible by 5"):
        mpu.utils.ensure_divisibility(12, 5)


@pytest.mark.ranks(2)
def test_what_megatron_reads_from_its_command_line_is_refused_and_its_seeds_are_set(group):
    for function in (megatron_initialize.initialize_megatron, megatron_initialize._initialize_distributed):
        with pytest.raises(ConfigError, match=r"command line, which is not read here; call .*init_process_group"):
            function()
    with pytest.raises(ConfigError, match="the seed is 0; it must be a positive number"):
        megatron_initialize._set_random_seed(0)
    mpu.initialize_model_parallel(1, 2)
    seed = 1234 + 100 * group.rank()
    megatron_initialize._set_random_seed(1234)
    drawn = random.random(), np.random.rand(), torch.rand(1)
    with mpu.get_cuda_rng_tracker().fork():
        in_stream = torch.rand(3)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    assert drawn == (random.random(), np.random.rand(), torch.rand(1))
    mpu.model_parallel_cuda_manual_seed(seed)
    with mpu.get_cuda_rng_tracker().fork():
        assert_bit_equal(torch.rand(3), in_stream)
