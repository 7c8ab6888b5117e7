"""Each layer at any number of ranks equals PyTorch's dense one: outputs, input gradients, every gradient shard."""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness.parity import assert_bit_equal, assert_close_to, assert_unmodified, gather_shards
from torch import nn

from shardwise import parallel_state
from shardwise.core.errors import ConfigError, ShardingError, TopologyError, VocabularyError
from shardwise.core.initialization import Normal
from shardwise.core.sharding import ParamLayout
from shardwise.exact import sum_in_parts
from shardwise.megatron.config import ModelParallelConfig
from shardwise.megatron.process_groups_config import ProcessGroupCollection
from shardwise.nn.recompute import recomputed
from shardwise.tensor_parallel.inference_layers import InferenceColumnParallelLinear, InferenceRowParallelLinear
from shardwise.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    named_param_layouts,
)

S, B = 13, 2


def config_of(sequence_parallel=False, dtype=torch.float64, **options):
    return ModelParallelConfig(sequence_parallel=sequence_parallel, params_dtype=dtype, **options)


@contextlib.contextmanager
def told_if_alone(group, config):
    """On one rank sequence parallelism is off, and says so."""
    if config.sequence_parallel and group.size() == 1:
        with pytest.warns(UserWarning, match="sequence_parallel is set, but the tensor-parallel group has 1 rank"):
            yield
    else:
        yield


def column(group, i, o, *, config=None, **options):
    config = config or config_of()
    with told_if_alone(group, config):
        layer = ColumnParallelLinear(i, o, config=config, init_method=Normal(1.0), tp_group=group, **options)
    assert layer.sequence_parallel == (config.sequence_parallel and layer.tp_size > 1)
    return with_random_bias(layer)


def row(group, i, o, *, config=None, bias=True, input_is_parallel=True, skip_bias_add=False, **options):
    config = config or config_of()
    with told_if_alone(group, config):
        layer = RowParallelLinear(
            i,
            o,
            config=config,
            init_method=Normal(1.0),
            bias=bias,
            input_is_parallel=input_is_parallel,
            skip_bias_add=skip_bias_add,
            tp_group=group,
            **options,
        )
    assert layer.sequence_parallel == (config.sequence_parallel and layer.tp_size > 1)
    return with_random_bias(layer)


def with_random_bias(layer):
    """A bias of zeros would hide mistakes."""
    if layer.bias is not None:
        layout = layer.param_layouts["bias"]
        noise = torch.randn(layout.global_shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        with torch.no_grad():
            layer.bias.copy_(layout.take(noise, layer.tp_rank))
    return layer


def whole_parameters(layer, group):
    return {
        name: gather_shards(param, layout, group).double().requires_grad_()
        for name, param, layout in named_param_layouts(layer, group.size())
    }


def split(whole, dim, group, sizes=None, stride=1):
    return ParamLayout.split(whole.shape, dim, group.size(), stride=stride, sizes=sizes).take(whole, group.rank())


def leaf(tensor):
    return tensor.detach().clone().requires_grad_()


def assert_gradients(layer, dense, group, rtol):
    for name, param, layout in named_param_layouts(layer, group.size()):
        gradient = param.grad
        if getattr(param, "sequence_parallel", False):
            gradient = gradient.clone()
            torch.distributed.all_reduce(gradient, group=group)
        gradient = gather_shards(gradient, layout, group).double()
        assert_close_to(gradient, dense[name].grad, rtol_of_norm=rtol, name=f"gradient of {name}")


def check(group, layer, *, sizes=None, gathered=False, recompute=False, s=S):
    """Output, input gradient and every gradient shard equal those of the dense layer."""
    is_column, sequence_parallel, stride = (
        isinstance(layer, ColumnParallelLinear),
        layer.sequence_parallel,
        layer.stride,
    )

    def part_of_input(whole):
        if is_column:
            return split(whole, 0, group) if sequence_parallel else whole
        return split(whole, 2, group, sizes, stride) if layer.input_is_parallel else whole

    def part_of_output(whole):
        if not is_column:
            return split(whole, 0, group) if sequence_parallel else whole
        return whole if gathered else split(whole, 2, group, sizes, stride)

    x = torch.randn(s, B, layer.input_size, dtype=torch.float64)
    incoming = torch.randn(s, B, layer.output_size, dtype=torch.float64)
    dense, dense_x = whole_parameters(layer, group), leaf(x)
    expected = F.linear(dense_x, dense["weight"], None if layer.skip_bias_add else dense.get("bias"))
    expected.backward(incoming)
    own_x, own_incoming = leaf(part_of_input(x)), part_of_output(incoming)
    options = {"sequence_length": s} if is_column else {}
    with assert_unmodified(own_x, own_incoming, *layer.parameters()):
        output, bias = recomputed(layer, own_x, **options) if recompute else layer(own_x, **options)
        output.backward(own_incoming)
    assert bias is (layer.bias if layer.skip_bias_add else None)
    assert_close_to(output.detach(), part_of_output(expected.detach()), rtol_of_norm=1e-12, name="output")
    assert_close_to(own_x.grad, part_of_input(dense_x.grad), rtol_of_norm=1e-12, name="input gradient")
    if layer.skip_bias_add:
        dense.pop("bias", None)
        layer.bias = None
    assert_gradients(layer, dense, group, 1e-12)


def sizes_of_ranks(group):
    return {1: [9], 3: [5, 1, 3]}[group.size()]


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
class TestColumn:
    """``Y = X A + b``, the columns of ``A`` split."""

    def test_equals_dense(self, group, sequence_parallel):
        config, sizes = config_of(sequence_parallel), sizes_of_ranks(group)
        check(group, column(group, 8, 12, config=config), s=12)
        check(group, column(group, 7, 13, config=config, bias=False), recompute=True)
        check(group, column(group, 7, 13, config=config, skip_bias_add=True))
        check(group, column(group, 7, 26, config=config, stride=2))
        layer = column(group, 7, 9, config=config, sizes=sizes)
        assert layer.output_size_per_partition == sizes[group.rank()]
        check(group, layer, sizes=sizes)
        check(group, column(group, 7, 18, config=config, sizes=sizes, stride=2), sizes=sizes)

    def test_a_weight_that_is_passed_in(self, group, sequence_parallel):
        config = config_of(sequence_parallel)
        layer = column(group, 7, 13, config=config, bias=False, skip_weight_param_allocation=True)
        assert layer.weight is None
        assert list(layer.parameters()) == []
        assert layer.param_layouts == {}
        with pytest.raises(ShardingError, match="skip_weight_param_allocation; pass a weight to forward"):
            layer(torch.randn(12, B, 7, dtype=torch.float64))
        owner = column(group, 7, 13, config=config, bias=False)
        x = torch.randn(12 // group.size() if sequence_parallel else 12, B, 7, dtype=torch.float64)
        outputs, gradients = [], []
        for output in (layer(x, owner.weight)[0], owner(x)[0]):
            owner.weight.grad = None
            output.sum().backward()
            outputs.append(output.detach())
            gradients.append(owner.weight.grad)
        assert_bit_equal(*outputs)
        assert_bit_equal(*gradients)

    def test_gathers_its_output(self, group, sequence_parallel):
        config, sizes = config_of(sequence_parallel), sizes_of_ranks(group)
        check(group, column(group, 7, 13, config=config, gather_output=True), gathered=True)
        # Sections in their order.
        layer = column(group, 7, 27, config=config, gather_output=True, stride=3, sizes=sizes)
        check(group, layer, gathered=True)
        x = torch.randn(6, B, 7, dtype=torch.float64)
        shape = layer(x, runtime_gather_output=False)[0].shape
        assert shape == (6 * group.size() if layer.sequence_parallel else 6, B, layer.output_size_per_partition)
        layer = column(group, 7, 13, config=config)
        assert layer(x, runtime_gather_output=True)[0].size(2) == 13


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
def test_row_equals_dense(group, sequence_parallel):
    config, sizes = config_of(sequence_parallel), sizes_of_ranks(group)
    check(group, row(group, 12, 8, config=config), s=12)
    check(group, row(group, 13, 7, config=config, bias=False), recompute=True)
    check(group, row(group, 13, 7, config=config, skip_bias_add=True))
    layer = row(group, 9, 7, config=config, sizes=sizes)
    assert layer.input_size_per_partition == sizes[group.rank()]
    check(group, layer, sizes=sizes)
    check(group, row(group, 18, 7, config=config, sizes=sizes, stride=2), sizes=sizes)


@pytest.mark.ranks(1, 3)
def test_row_splits_its_own_input(group):
    check(group, row(group, 13, 7, input_is_parallel=False))
    sizes = sizes_of_ranks(group)
    check(group, row(group, 27, 7, input_is_parallel=False, stride=3, sizes=sizes), sizes=sizes)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_an_output_of_a_dtype_of_its_own(group, sequence_parallel, frozen):
    """Logits in fp32 of factors in bf16 have the sums of fp32: rounding them to bf16 would be off by 2e-3."""
    config = config_of(sequence_parallel, torch.bfloat16)
    layer = column(group, 37, 13, config=config, output_dtype=torch.float32)
    layer.weight.requires_grad_(not frozen)
    x = torch.randn(S, B, 37).bfloat16()
    incoming = torch.randn(S, B, 13)
    dense = whole_parameters(layer, group)
    dense_x = leaf(x.double())
    expected = F.linear(dense_x, dense["weight"], dense["bias"])
    # Gradients are those of the incoming one in the factors' dtype.
    expected.backward(incoming.bfloat16().double())
    own_x, own_incoming = leaf(split(x, 0, group) if sequence_parallel else x), split(incoming, 2, group)
    with assert_unmodified(own_x, own_incoming, *layer.parameters()):
        output, _ = layer(own_x, sequence_length=S)
        output.backward(own_incoming)
    assert (output.dtype, own_x.grad.dtype, layer.bias.grad.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    assert_close_to(output.detach().double(), split(expected.detach(), 2, group), rtol_of_norm=1e-6, name="output")
    expected_x = split(dense_x.grad, 0, group) if sequence_parallel else dense_x.grad
    assert_close_to(own_x.grad.double(), expected_x, rtol_of_norm=4 * 2**-8, name="input gradient")
    if frozen:
        assert layer.weight.grad is None
    else:
        assert_gradients(layer, dense, group, rtol=4 * 2**-8)
    with torch.no_grad():
        assert_bit_equal(layer(own_x, sequence_length=S)[0], output)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_bit_equal(layer(own_x, sequence_length=S)[0], output)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_bias_of_fp32_widens_the_output_under_autocast(group, sequence_parallel):
    """Megatron multiplies in autocast's dtype and adds the bias to the product in its own."""
    config = config_of(dtype=torch.float32, sequence_parallel=sequence_parallel)
    for layer, cut in ((column(group, 7, 13, config=config), 2), (row(group, 7, 13, config=config), 0)):
        torch.nn.init.constant_(layer.bias, 0.3)
        dense = whole_parameters(layer, group)
        x = torch.randn(S, B, 7)
        own = (split(x, 0, group) if sequence_parallel else x) if cut == 2 else split(x, 2, group)
        with torch.autocast("cpu", torch.bfloat16):
            output = layer(own, **({"sequence_length": S} if cut == 2 else {}))[0]
        assert output.dtype == torch.float32
        output.sum().backward()
        product = F.linear(x.bfloat16().double(), dense["weight"].bfloat16().double())
        expected = product + dense["bias"].double()
        expected = split(expected, cut, group) if cut == 2 or sequence_parallel else expected
        # The products are rounded to bf16, the bias is not.
        assert_close_to(output.detach().double(), expected.detach(), rtol_of_norm=2**-7)
        assert layer.bias.grad.unique().tolist() == [float(len(output) * B)]


@pytest.mark.ranks(2)
def test_an_output_of_a_dtype_of_its_own_beside_other_options(group):
    config = config_of(dtype=torch.bfloat16, gradient_accumulation_fusion=True)
    fused = column(group, 37, 13, config=config, output_dtype=torch.float32)
    x = torch.randn(S, B, 37).bfloat16()
    fused.weight.main_grad = torch.zeros_like(fused.weight, dtype=torch.float32)
    output, _ = fused(x)
    output.backward(incoming := torch.randn_like(output))
    expected = incoming.bfloat16().float().flatten(0, 1).t() @ x.float().flatten(0, 1)
    assert_close_to(fused.weight.main_grad, expected, rtol_of_norm=1e-6)
    gathered = fused(x, runtime_gather_output=True)[0]
    assert (gathered.dtype, gathered.shape) == (torch.float32, (S, B, 13))
    # A narrower one is the wider one, rounded.
    narrow = column(group, 7, 13, config=config_of(dtype=torch.float32), output_dtype=torch.bfloat16)
    plain = column(group, 7, 13, config=config_of(dtype=torch.float32))
    plain.load_state_dict(narrow.state_dict())
    given = torch.randn(S, B, 7)
    assert_bit_equal(narrow(given)[0], plain(given)[0].bfloat16())
    with pytest.raises(ConfigError, match=r"output_dtype is torch\.int32; it must be a floating-point dtype"):
        column(group, 4, 6, output_dtype=torch.int32)
    sum_in_parts(exact := dist.new_group(), 2)
    with pytest.raises(ConfigError, match="the group's sums are exact"):
        column(exact, 4, 6, output_dtype=torch.float32)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("reduce_scatter", [False, True], ids=["", "reduce-scatter"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_embedding_equals_dense(group, reduce_scatter, deterministic):
    vocab, h = 101, 7
    layer = VocabParallelEmbedding(
        vocab,
        h,
        init_method=Normal(1.0),
        reduce_scatter_embeddings=reduce_scatter,
        config=config_of(reduce_scatter, deterministic_mode=deterministic),
        tp_group=group,
    )
    ids = torch.randint(vocab, (B, S))
    ids[0, 0], ids[1, 1], ids[0, 2] = 0, vocab - 1, vocab - 1
    incoming = torch.randn(B, S, h, dtype=torch.float64)
    dense = whole_parameters(layer, group)
    expected = F.embedding(ids, dense["weight"])
    expected.backward(incoming)
    expected = expected.detach()
    if reduce_scatter:
        expected, incoming = (split(x.transpose(0, 1), 0, group) for x in (expected, incoming))
    for given in (ids, ids.int()):
        layer.weight.grad = None
        with assert_unmodified(given, layer.weight, incoming):
            output = layer(given)
            output.backward(incoming)
        assert output.is_contiguous()
        # Exactly: one rank's value plus zeros.
        assert torch.equal(output, expected)
        assert_gradients(layer, dense, group, 1e-12)
    with torch.no_grad():
        assert torch.equal(layer(ids), expected)
    start, stop = layer.vocab_start_index, layer.vocab_end_index
    assert layer.num_embeddings_per_partition == stop - start == layer.weight.size(0)
    assert_bit_equal(layer.weight.detach(), dense["weight"].detach()[start:stop])


@pytest.mark.ranks(3)
def test_embedding_of_fewer_ids_than_ranks(group):
    layer = VocabParallelEmbedding(2, 5, init_method=Normal(1.0), config=config_of(), tp_group=group)
    dense = whole_parameters(layer, group)
    ids = torch.tensor([[0, 1, 1]])
    output = layer(ids)
    output.sum().backward()
    assert torch.equal(output, F.embedding(ids, dense["weight"]))
    counts = torch.tensor([1.0, 2.0], dtype=torch.float64)[:, None].expand(2, 5).contiguous()
    assert_bit_equal(gather_shards(layer.weight.grad, layer.param_layouts["weight"], group), counts)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrong", [101, -1])
def test_embedding_names_an_id_outside(group, wrong):
    layer = VocabParallelEmbedding(101, 3, init_method=Normal(1.0), config=config_of(), tp_group=group)
    ids = torch.randint(101, (B, S))
    ids[1, 4] = wrong
    message = rf"token id {wrong} at position \[1, 4\] is outside the vocabulary of 101 ids"
    with pytest.raises(VocabularyError, match=message):
        layer(ids)


@pytest.mark.ranks(2)
def test_initialisation_may_be_left_out(group):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    layer = ColumnParallelLinear(
        7, 13, config=config_of(perform_initialization=False), init_method=Normal(1.0), tp_group=group
    )
    assert_bit_equal(torch.get_rng_state(), before)
    # How a parameter is split does not depend on who gives it its values.
    assert (layer.weight.tensor_model_parallel, layer.weight.partition_dim) == (True, 0)
    assert layer.weight.shape == (7 - group.rank(), 7)


@pytest.mark.ranks(2)
def test_layouts_of_a_model(group):
    model = nn.ModuleDict(
        {
            "embedding": VocabParallelEmbedding(9, 4, init_method=Normal(1.0), config=config_of(), tp_group=group),
            "norm": nn.LayerNorm(4),
            "up": column(group, 4, 6),
            "output": column(group, 4, 9, bias=False),
        }
    )
    model["output"].weight = model["embedding"].weight
    found = {name: (param, layout) for name, param, layout in named_param_layouts(model, 2)}
    # The tied weight once, under its first name.
    assert list(found) == ["embedding.weight", "norm.weight", "norm.bias", "up.weight", "up.bias"]
    assert {name: layout.dim for name, (_, layout) in found.items()} == {
        "embedding.weight": 0,
        "norm.weight": None,
        "norm.bias": None,
        "up.weight": 0,
        "up.bias": 0,
    }
    for param, layout in found.values():
        assert layout.local_shape(group.rank()) == tuple(param.shape)
    assert next(named_param_layouts(column(group, 4, 6), 2))[0] == "weight"


@pytest.mark.ranks(2)
def test_no_group_means_the_ambient_one(group):
    with pytest.raises(TopologyError, match="no group was given and model parallelism is not initialised"):
        column(None, 4, 6)
    parallel_state.initialize_model_parallel(2)
    for layer in (
        column(None, 4, 6),
        row(None, 4, 6),
        VocabParallelEmbedding(9, 4, init_method=Normal(1.0), config=config_of()),
    ):
        assert layer.tp_group is parallel_state.get_tensor_model_parallel_group()
        assert (layer.tp_size, layer.tp_rank) == (2, group.rank())


@pytest.mark.ranks(2)
def test_a_collection_of_groups_says_which(group):
    """Without ambient groups; a group that is given by itself comes first, and an ambient one last."""
    alone = [dist.new_group([rank]) for rank in range(2)][group.rank()]
    groups = ProcessGroupCollection(tp=group, expt_tp=alone)
    options = {"init_method": Normal(1.0), "config": config_of()}
    linear_options = options | {"bias": True, "skip_bias_add": True, "pg_collection": groups, "name": "decoder.0.fc"}
    row_options = linear_options | {"input_is_parallel": True}
    for layer, size in (
        (VocabParallelEmbedding(9, 4, pg_collection=groups, name="word", **options), 2),
        (ColumnParallelLinear(4, 6, **linear_options), 2),
        (ColumnParallelLinear(4, 6, is_expert=True, **linear_options), 1),
        (ColumnParallelLinear(4, 6, tp_group=alone, **linear_options), 1),
        (RowParallelLinear(4, 6, **row_options), 2),
        (RowParallelLinear(4, 6, is_expert=True, **row_options), 1),
        (InferenceColumnParallelLinear(4, 6, gather_output=False, is_expert=False, **linear_options), 2),
        (InferenceRowParallelLinear(4, 6, is_expert=False, **row_options), 2),
    ):
        assert layer.tp_group is (group if size == 2 else alone)
    parallel_state.initialize_model_parallel(2)
    layer = ColumnParallelLinear(4, 6, **options, pg_collection=ProcessGroupCollection(pp=alone))
    assert layer.tp_group is parallel_state.get_tensor_model_parallel_group()
