"""What layers carry beside their arithmetic: experts, marks on parameters, how they start, what checkpoints read."""

import functools

import pytest
import torch
import torch.nn.functional as F
from harness.operators import Operators
from harness.parity import assert_bit_equal, assert_close_to, gather_shards
from torch import nn

from shardwise import parallel_state
from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.errors import ConfigError, ShardingError, TopologyError
from shardwise.core.initialization import Normal
from shardwise.core.sharding import ParamLayout, ParamShard
from shardwise.megatron.config import ModelParallelConfig
from shardwise.tensor_parallel import layers
from shardwise.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    copy_tensor_model_parallel_attributes,
    param_is_not_tensor_parallel_duplicate,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)


def column(group=None, i=7, o=13, *, config=None, init_method=None, **options):
    config = config or ModelParallelConfig(params_dtype=torch.float64)
    return ColumnParallelLinear(i, o, config=config, init_method=init_method or Normal(1.0), tp_group=group, **options)


def row(group=None, i=13, o=7, *, config=None, init_method=None, **options):
    options = {"bias": True, "input_is_parallel": True, "skip_bias_add": False} | options
    config = config or ModelParallelConfig(params_dtype=torch.float64)
    return RowParallelLinear(i, o, config=config, init_method=init_method or Normal(1.0), tp_group=group, **options)


def embedding(group=None, v=13, h=7, *, config=None, init_method=None):
    config = config or ModelParallelConfig(params_dtype=torch.float64)
    return VocabParallelEmbedding(v, h, config=config, init_method=init_method or Normal(1.0), tp_group=group)


def attributes(param):
    return param.tensor_model_parallel, param.partition_dim, param.partition_stride


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [column, row])
@pytest.mark.parametrize("shape", [(3, 2, 5), ()], ids=str)
def test_an_input_of_another_width_is_named(group, make, shape):
    layer = make(group)
    width = 7 if make is column else 7 - group.rank()
    given = torch.ones(shape, dtype=torch.float64)
    with pytest.raises(ShardingError) as info:
        layer(given)
    assert str(info.value) == (
        f"the input has shape {list(shape)}; rank {group.rank()} of 2 needs {width} features in the last dimension"
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [column, row])
def test_the_fusion_of_the_weight_gradient_is_an_attribute(group, make):
    config = ModelParallelConfig(params_dtype=torch.float64, gradient_accumulation_fusion=True)
    layer = make(group, config=config)
    assert layer.gradient_accumulation_fusion
    assert not make(group).gradient_accumulation_fusion
    # Programs turn it off on one layer, such as an output layer that shares its weight.
    layer.gradient_accumulation_fusion = False
    layer(torch.ones(2, 3, layer.weight.size(1), dtype=torch.float64))[0].sum().backward()
    assert layer.weight.grad is not None


class TestExperts:
    """Layers of experts: another group, no communication of their own where tokens are exchanged explicitly."""

    @pytest.mark.ranks(4)
    def test_the_group_is_the_expert_tensor_one(self, group):
        parallel_state.initialize_model_parallel(4, expert_tensor_parallel_size=2)
        config = ModelParallelConfig(tensor_model_parallel_size=4, expert_tensor_parallel_size=2)
        for make, options in ((column, {}), (row, {"skip_bias_add": True})):
            layer = make(config=config, is_expert=True, **options)
            assert layer.tp_group is parallel_state.get_topology().group("expt_tp")
            assert (layer.tp_size, layer.tp_rank) == (2, group.rank() % 2)
            assert make(config=config).tp_size == 4

    @pytest.mark.ranks(1, 3)
    def test_partial_output_and_partial_input_gradient(self, group):
        up, down = column(group, is_expert=True), row(group, is_expert=True, skip_bias_add=True)
        explicit = group.size() > 1
        assert up.explicit_expert_comm == down.explicit_expert_comm == explicit
        weights = [gather_shards(layer.weight, layer.param_layouts["weight"], group) for layer in (up, down)]
        dense = [weight.requires_grad_() for weight in weights]
        x = torch.randn(5, 2, 7, dtype=torch.float64)
        dense_x, own_x = x.clone().requires_grad_(), x.clone().requires_grad_()
        incoming = torch.randn(5, 2, 7, dtype=torch.float64)
        expected = F.linear(F.linear(dense_x, dense[0]).sin(), dense[1])
        expected.backward(incoming)
        with CollectiveCounter() as counter:
            hidden, _ = up(own_x)
            output, bias = down(hidden.sin())
            output.backward(incoming)
        assert counter.launches == []
        assert bias is down.bias
        # Whoever exchanged the tokens sums.
        total, gradient = output.detach().clone(), own_x.grad.clone()
        for tensor in (total, gradient):
            torch.distributed.all_reduce(tensor, group=group)
        assert_close_to(total, expected.detach(), rtol_of_norm=1e-12)
        assert_close_to(gradient, dense_x.grad, rtol_of_norm=1e-12)
        for layer, weight in zip((up, down), dense, strict=True):
            gathered = gather_shards(layer.weight.grad, layer.param_layouts["weight"], group)
            assert_close_to(gathered, weight.grad, rtol_of_norm=1e-12)

    @pytest.mark.ranks(1, 2)
    def test_experts_on_several_ranks_communicate_explicitly_too(self, group):
        config = ModelParallelConfig(expert_model_parallel_size=2, sequence_parallel=group.size() > 1)
        layer = column(group, config=config, is_expert=True)
        assert layer.explicit_expert_comm
        with CollectiveCounter() as counter:
            # The whole input, though the config says sequence parallel: tokens are gathered by their exchange.
            assert layer(torch.randn(5, 2, 7))[0].shape[:2] == (5, 2)
        assert counter.launches == []
        with pytest.raises(ConfigError, match=r"stays a partial sum .* use skip_bias_add=True"):
            row(group, config=config, is_expert=True)

    @pytest.mark.ranks(2)
    @pytest.mark.parametrize(
        ("is_expert", "tp", "etp", "ep", "allreduce"),
        [
            (False, 2, 1, 4, True),
            (True, 2, None, 1, True),
            (True, 2, 2, 1, True),
            (True, 2, 2, 2, False),
            # Experts that are split otherwise have data-parallel groups of their own.
            (True, 2, 1, 1, False),
            (True, 1, 2, 1, False),
        ],
    )
    def test_whose_gradient_reduction(self, group, is_expert, tp, etp, ep, allreduce):
        config = ModelParallelConfig(
            tensor_model_parallel_size=tp, expert_tensor_parallel_size=etp, expert_model_parallel_size=ep
        )
        layers = [
            column(group, config=config, is_expert=is_expert),
            row(group, config=config, is_expert=is_expert, skip_bias_add=True),
        ]
        for layer in layers:
            assert [param.allreduce for param in layer.parameters()] == [allreduce] * 2


@pytest.mark.ranks(2)
def test_a_gradient_may_be_left_to_the_caller(group):
    layer = column(group, disable_grad_reduce=True)
    x = torch.randn(5, 2, 7, dtype=torch.float64, requires_grad=True)
    with CollectiveCounter() as counter:
        layer(x)[0].sum().backward()
    assert counter.launches == []
    assert_close_to(x.grad, layer.weight.detach().sum(0).expand(5, 2, 7).contiguous(), rtol_of_norm=1e-12)


class TestAttributes:
    """The protocol of attributes that programs read."""

    @pytest.mark.ranks(1, 2)
    @pytest.mark.parametrize("initialise", [True, False])
    def test_of_every_parameter(self, group, initialise):
        config = ModelParallelConfig(perform_initialization=initialise, sequence_parallel=group.size() > 1)
        layers = {
            "column": column(group, o=14, stride=2, config=config),
            "row": row(group, i=14, stride=2, config=config),
        }
        layers["embedding"] = embedding(group, config=config)
        found = {
            f"{name}.{key}": (*attributes(param), param.allreduce, param.sequence_parallel)
            for name, layer in layers.items()
            for key, param in layer.named_parameters()
        }
        partial = group.size() > 1
        assert found == {
            "column.weight": (True, 0, 2, True, False),
            "column.bias": (True, 0, 2, True, False),
            "row.weight": (True, 1, 2, True, False),
            "row.bias": (False, -1, 1, True, partial),
            "embedding.weight": (True, 0, 1, True, False),
        }

    @pytest.mark.ranks(2)
    def test_are_set_once(self, group):
        tensor = torch.zeros(3)
        set_tensor_model_parallel_attributes(tensor, True, 1, 2)
        layer = column(group)
        qkv = torch.zeros(3)
        qkv.is_qkv = True
        for marked, name in (
            (tensor, "tensor_model_parallel"),
            (layer.weight, "tensor_model_parallel"),
            (qkv, "is_qkv"),
        ):
            with pytest.raises(AssertionError, match=f"already marked {name}=True; mark it once"):
                set_tensor_model_parallel_attributes(marked, True, 1, 2)
        assert attributes(tensor) == (True, 1, 2)
        assert not hasattr(qkv, "partition_dim")
        # Initial values anew leave the marks as they are.
        layer.reset_parameters()
        assert attributes(layer.weight) == (True, 0, 1)

    def test_defaults_and_copies(self):
        tensor, other = torch.zeros(3), torch.zeros(4)
        copy_tensor_model_parallel_attributes(other, tensor)
        assert not hasattr(other, "tensor_model_parallel")
        tensor.partition_dim = 1
        set_defaults_if_not_set_tensor_model_parallel_attributes(tensor)
        assert attributes(tensor) == (False, 1, 1)
        copy_tensor_model_parallel_attributes(other, tensor)
        assert attributes(other) == (False, 1, 1)
        # As Megatron's dict has them, which programs read.
        defaults = layers._MODEL_PARALLEL_ATTRIBUTE_DEFAULTS
        assert defaults == {
            "expert_tp": False,
            "is_qkv": False,
            "qkv_split_shapes": None,
            "tensor_model_parallel": False,
            "partition_dim": -1,
            "partition_stride": 1,
        }
        assert vars(other) == defaults | {"partition_dim": 1}

    @pytest.mark.ranks(2)
    def test_duplicates(self, group):
        layer, first = row(group), group.rank() == 0
        assert param_is_not_tensor_parallel_duplicate(layer.weight, group)
        assert param_is_not_tensor_parallel_duplicate(layer.bias, group) == first
        assert param_is_not_tensor_parallel_duplicate(torch.zeros(1), group) == first
        with pytest.raises(TopologyError):
            param_is_not_tensor_parallel_duplicate(layer.bias)
        parallel_state.initialize_model_parallel(2)
        assert param_is_not_tensor_parallel_duplicate(layer.bias) == first


XAVIER = functools.partial(nn.init.xavier_normal_, gain=2.0)


class TestStart:
    """How parameters get their first values."""

    @pytest.mark.ranks(3)
    @pytest.mark.parametrize("on_cpu", [False, True])
    def test_the_whole_weight_is_kept_when_asked(self, group, on_cpu):
        config = ModelParallelConfig(use_cpu_initialization=on_cpu)
        for make, shape in ((column, (14, 7)), (row, (7, 14))):
            size = {column: {"o": 14}, row: {"i": 14}}[make]
            torch.manual_seed(3)
            layer = make(group, config=config, init_method=XAVIER, stride=2, keep_master_weight_for_test=True, **size)
            torch.manual_seed(3)
            assert_bit_equal(layer.master_weight, XAVIER(torch.empty(shape)))
            part = layer.param_layouts["weight"].take(layer.master_weight, group.rank())
            assert_bit_equal(layer.weight.detach(), part.contiguous())
            torch.manual_seed(3)
            other = make(group, config=config, init_method=XAVIER, stride=2, **size)
            assert other.master_weight is None
            assert_bit_equal(layer.weight.detach(), other.weight.detach())
            assert "master_weight" not in layer.state_dict()

    @pytest.mark.ranks(3)
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
    def test_drawn_on_the_cpu_in_fp32(self, group, dtype):
        config = ModelParallelConfig(params_dtype=dtype, use_cpu_initialization=True)
        wide = torch.promote_types(dtype, torch.float32)
        for make, shape in ((column, (13, 7)), (row, (7, 13)), (embedding, (13, 7))):
            for method in (Normal(0.5), nn.init.kaiming_uniform_, nn.init.orthogonal_):
                torch.manual_seed(3)
                layer = make(group, config=config, init_method=method)
                torch.manual_seed(3)
                dense = torch.empty(shape, dtype=wide)
                method(dense)
                assert_bit_equal(gather_shards(layer.weight, layer.param_layouts["weight"], group), dense.to(dtype))

    @pytest.mark.ranks(3)
    @pytest.mark.parametrize("to_empty", [False, True])
    def test_from_the_meta_device(self, group, to_empty):
        config = ModelParallelConfig(sequence_parallel=group.size() > 1)
        for make in (column, row, embedding):
            torch.manual_seed(3)
            expected = make(group, config=config)
            state = torch.get_rng_state()
            torch.manual_seed(3)
            with torch.device("meta"):
                layer = make(group, config=config)
            assert all(param.is_meta for param in layer.parameters())
            if to_empty:
                layer.to_empty(device="cpu")
            layer.reset_parameters()
            assert_bit_equal(torch.get_rng_state(), state)
            for (name, param), (_, other) in zip(layer.named_parameters(), expected.named_parameters(), strict=True):
                assert_bit_equal(param.detach(), other.detach(), name=name)
                assert param.requires_grad
                assert attributes(param) == attributes(other)
                assert (param.allreduce, param.sequence_parallel) == (other.allreduce, other.sequence_parallel)

    @pytest.mark.ranks(2)
    def test_again(self, group):
        layer = row(group)
        torch.manual_seed(5)
        layer.reset_parameters()
        first = layer.weight.detach().clone()
        with torch.no_grad():
            layer.bias.fill_(3.0)
        torch.manual_seed(5)
        layer.reset_parameters()
        assert_bit_equal(layer.weight.detach(), first)
        assert not layer.bias.any()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_mode_chooses_the_operator_with_a_fixed_order(group, deterministic):
    layer = embedding(group, config=ModelParallelConfig(deterministic_mode=deterministic))
    ids = torch.randint(13, (2, 5))
    with Operators() as operators:
        layer(ids).sum().backward()
    assert ("aten::embedding_dense_backward" in operators.names) == (not deterministic)


class TestState:
    """State dicts, plain and sharded."""

    @pytest.mark.ranks(2)
    def test_nothing_but_parameters(self, group):
        for make in (column, row):
            layer, other = make(group), make(group)
            assert layer.get_extra_state() is None
            assert layer.set_extra_state(None) is None
            state = layer.state_dict()
            assert list(state) == ["weight", "bias"]
            # As written by the reference, or by a layer of PyTorch.
            for extra in ({}, {"_extra_state": None}):
                other.load_state_dict(state | extra)
                assert_bit_equal(other.weight.detach(), layer.weight.detach())
                with torch.no_grad():
                    other.weight.zero_()
            model = nn.Sequential(make(group))
            model.load_state_dict({f"0.{key}": value for key, value in state.items()})
            assert_bit_equal(model[0].weight.detach(), layer.weight.detach())
            with pytest.raises(RuntimeError, match=r'Missing key.*"bias"'):
                other.load_state_dict({"weight": state["weight"]})

    @pytest.mark.ranks(3)
    def test_sharded_entries_cover_the_whole(self, group):
        made = [column(group, o=14, stride=2), row(group), embedding(group), column(group, bias=False)]
        for layer in made:
            entries = layer.sharded_state_dict()
            assert list(entries) == [name for name, _ in layer.named_parameters()]
            for name, param in layer.named_parameters():
                entry, layout = entries[name], layer.param_layouts[name]
                assert (entry.key, entry.rank, entry.layout) == (name, group.rank(), layout)
                assert entry.data is param
                assert entry.allow_shape_mismatch == isinstance(layer, VocabParallelEmbedding)
                assert entry.is_replica == (name == "bias" and layout.dim is None and group.rank() > 0)
                whole = gather_shards(param, layout, group)
                assert entry.global_shape == tuple(whole.shape)
                for offset, view in entry.pieces():
                    where = tuple(slice(start, start + size) for start, size in zip(offset, view.shape, strict=True))
                    assert_bit_equal(view, whole[where])
                assert sum(view.numel() for _, view in entry.pieces()) == param.numel()

    @pytest.mark.ranks(2)
    def test_prefix_offsets_and_metadata(self, group):
        layer = column(group)
        entries = layer.sharded_state_dict("layers.", ((0, 2, 5), (1, 0, 3)), {"anything": 1})
        assert list(entries) == ["layers.weight", "layers.bias"]
        entry = entries["layers.weight"]
        assert entry.global_shape == (5, 3, 13, 7)
        ((offset, view),) = entry.pieces()
        assert offset == (2, 0, 7 * group.rank(), 0)
        assert view.shape == (1, 1, 7 - group.rank(), 7)
        assert view.data_ptr() == layer.weight.data_ptr()
        for wrong in [((1, 0, 3),), ((0, 3, 3),)]:
            with pytest.raises(ShardingError, match=r"sharded_offsets .* must be"):
                layer.sharded_state_dict("", wrong)
        assert column(group, skip_weight_param_allocation=True, bias=False).sharded_state_dict() == {}

    def test_an_entry_of_another_shape_is_refused(self):
        with pytest.raises(ShardingError, match=r"w: rank 0 should hold shape \[2, 3\] of \[4, 3\], got \[4, 3\]"):
            ParamShard("w", torch.zeros(4, 3), ParamLayout.split((4, 3), 0, 2), 0)


@pytest.mark.ranks(1)
def test_the_name_of_a_buffer_is_kept(group):
    assert column(group, tp_comm_buffer_name="qkv").tp_comm_buffer_name == "qkv"
    assert row(group, tp_comm_buffer_name="proj").tp_comm_buffer_name == "proj"
