"""Megatron's names of the layers for inference: pairs, biases, steps that a subclass overrides, and what is refused."""

import pytest
import torch
import torch.nn.functional as F
from harness.parity import assert_bit_equal, assert_close_to
from torch import nn

from shardwise import parallel_state
from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.errors import ConfigError
from shardwise.core.initialization import Normal
from shardwise.core.sharding import balanced_sizes
from shardwise.megatron.config import ModelParallelConfig, TransformerConfig
from shardwise.nn.norm import RMSNorm
from shardwise.tensor_parallel.inference_layers import (
    InferenceColumnParallelLinear,
    InferenceLayerNormColumnParallelLinear,
    InferenceRowParallelLinear,
    _te_rms_norm_kernel,
    inference_all_gather_from_tensor_model_parallel_region,
    inference_reduce_scatter_to_sequence_parallel_region,
)
from shardwise.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

S, B, H, FFN = 13, 2, 6, 11


def config_of(group, normalization="RMSNorm"):
    return TransformerConfig(
        num_layers=1,
        hidden_size=H,
        num_attention_heads=2,
        normalization=normalization,
        sequence_parallel=group.size() > 1,
        params_dtype=torch.float64,
    )


def column(kind, group, config, **options):
    torch.manual_seed(1)
    common = {"gather_output": False, "bias": True, "skip_bias_add": False, "is_expert": False} | options
    layer = kind(H, FFN, config=config, init_method=Normal(1.0), tp_group=group, **common)
    return with_random_vectors(layer, group)


def row(kind, group, config, **options):
    torch.manual_seed(2)
    common = {"bias": True, "skip_bias_add": False, "input_is_parallel": True, "is_expert": False} | options
    layer = kind(FFN, H, config=config, init_method=Normal(1.0), tp_group=group, **common)
    return with_random_vectors(layer, group)


def with_random_vectors(layer, group):
    """Biases and norms that are not where they start, and the same layer at every number of ranks."""
    for name, param in layer.named_parameters():
        if name != "weight":
            whole = torch.randn(layer.param_layouts[name].global_shape, dtype=param.dtype)
            param.data.copy_(layer.param_layouts[name].take(whole, group.rank()))
    return layer


def shard(group, *shape):
    return torch.randn(*shape, dtype=torch.float64).split(balanced_sizes(shape[0], group.size()))[group.rank()]


def norm_with(layer, config):
    norm = {"LayerNorm": nn.LayerNorm, "RMSNorm": RMSNorm}[config.normalization]
    norm = norm(H, eps=config.layernorm_epsilon, dtype=torch.float64)
    norm.load_state_dict(
        {name: getattr(layer, f"layer_norm_{name}") for name in norm.state_dict()}, assign=True, strict=True
    )
    return norm


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("skip_bias_add", [False, True])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_layers_equal_norm_and_training_layers(group, skip_bias_add, normalization):
    config = config_of(group, normalization)
    x, inner = shard(group, S, B, H), torch.randn(S, B, FFN, dtype=torch.float64)
    for bias in (True, False):
        for gather_output in (True, False):
            options = {"skip_bias_add": skip_bias_add, "bias": bias}
            ours = column(InferenceLayerNormColumnParallelLinear, group, config, gather_output=gather_output, **options)
            plain = column(InferenceColumnParallelLinear, group, config, gather_output=gather_output, **options)
            trained = column(ColumnParallelLinear, group, config, **options)
            assert_bit_equal(ours.weight.data, trained.weight.data)
            for layer, input_ in ((ours, norm_with(ours, config)(x)), (plain, x)):
                output, returned = layer(x, sequence_length=S)
                expected, expected_bias = trained(input_, sequence_length=S)
                expected = trained.gather(expected) if gather_output else expected
                assert_close_to(output, expected.detach(), rtol_of_norm=1e-12)
                assert not output.requires_grad
                assert (returned is None) == (expected_bias is None) == (not (skip_bias_add and bias))
                if returned is not None:
                    assert_bit_equal(returned.data, expected_bias.data)
    for input_is_parallel in (True, False) if group.size() == 1 else (True,):
        options = {"skip_bias_add": skip_bias_add, "input_is_parallel": input_is_parallel}
        ours = row(InferenceRowParallelLinear, group, config, **options)
        trained = row(RowParallelLinear, group, config, **options)
        part = trained.scatter(inner)
        output, returned = ours(part)
        expected, expected_bias = trained(part)
        assert_close_to(output, expected.detach(), rtol_of_norm=1e-12)
        assert (returned is ours.bias) == (expected_bias is trained.bias) == skip_bias_add


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("skip_bias_add", [False, True])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_fused_mode_as_programs_for_megatron_use_it(group, skip_bias_add, normalization):
    """With the residual set before or given; a bias is in the new residual, whoever was to add it."""
    config = config_of(group, normalization)
    up = column(InferenceLayerNormColumnParallelLinear, group, config)
    down = row(InferenceRowParallelLinear, group, config, skip_bias_add=skip_bias_add)
    trained_up, trained_down = column(ColumnParallelLinear, group, config), row(RowParallelLinear, group, config)
    norm = norm_with(up, config)
    x = shard(group, S, B, H)
    with torch.no_grad():
        expected = x + trained_down(F.gelu(trained_up(norm(x), sequence_length=S)[0]))[0]
        following = trained_up(norm(expected), sequence_length=S)[0]
    down._set_next_layer_norm_weights(up.layer_norm_weight, up.layer_norm_bias)
    assert down.next_layer_norm_weights is up.layer_norm_weight
    for given in (False, True):
        up.skip_norm_and_all_gather = False
        inner = F.gelu(up(x, sequence_length=S)[0])
        if not given:
            down._set_residual(x)
        with CollectiveCounter() as counter:
            hidden, bias = down(inner, x) if given else down(inner)
            up.skip_norm_and_all_gather = True
            output = up(hidden, sequence_length=S)[0]
        assert bias is None
        assert down.residual is None
        assert_close_to(hidden, expected, rtol_of_norm=1e-12)
        assert_close_to(output, following, rtol_of_norm=1e-12)
        assert [launch.name for launch in counter.launches] == ["all_reduce"] * (group.size() > 1)
    if group.size() > 1:
        with pytest.raises(ConfigError, match="no row-parallel layer"):
            up(hidden, sequence_length=S)
        with pytest.raises(ConfigError, match="call _set_residual before"):
            down(inner)
    down._set_next_layer_norm_weights(None)
    expected = row(RowParallelLinear, group, config, skip_bias_add=skip_bias_add)(inner)[0]
    assert_close_to(down(inner)[0], expected.detach(), rtol_of_norm=1e-12)


@pytest.mark.ranks(2)
def test_steps_that_a_subclass_overrides(group):
    """With Megatron's arguments, and nothing else."""
    steps = []

    class Column(InferenceLayerNormColumnParallelLinear):
        def _maybe_allocate_symmetric_buffer(self, x):
            steps.append(("allocate", tuple(x.shape)))
            return super()._maybe_allocate_symmetric_buffer(x)

        def _all_gather(self, x, symm_mem_buffer):
            steps.append(("gather", tuple(symm_mem_buffer["tensor"].shape)))
            return super()._all_gather(x, symm_mem_buffer)

    class Row(InferenceRowParallelLinear):
        def _matmul_reduce_scatter(self, x, residual=None):
            steps.append(("reduce", None if residual is None else tuple(residual.shape)))
            return super()._matmul_reduce_scatter(x, residual)

    config = config_of(group)
    x = torch.randn(3, B, H, dtype=torch.float64)
    up, down = column(Column, group, config), row(Row, group, config)
    expected = column(InferenceLayerNormColumnParallelLinear, group, config)(x)[0]
    inner = up(x)[0]
    assert_bit_equal(inner, expected)
    down(inner)
    down._set_next_layer_norm_weights(up.layer_norm_weight)
    down(inner, x)
    assert steps == [("allocate", (3, B, H)), ("gather", (6, B, H)), ("reduce", None), ("reduce", (3, B, H))]


@pytest.mark.ranks(2)
def test_configs_and_norms_that_do_not_fit(group):
    plain = ModelParallelConfig(sequence_parallel=True, params_dtype=torch.float64)
    with pytest.raises(ConfigError, match="needs a TransformerConfig, and config is a ModelParallelConfig"):
        column(InferenceLayerNormColumnParallelLinear, group, plain)
    with pytest.raises(ConfigError, match="needs a TransformerConfig"):
        row(InferenceRowParallelLinear, group, plain)._set_next_layer_norm_weights(torch.ones(H))
    down = row(InferenceRowParallelLinear, group, config_of(group, "LayerNorm"))
    with pytest.raises(ConfigError, match="norm is LayerNorm, and no bias is given"):
        down._set_next_layer_norm_weights(torch.ones(H))
    with pytest.raises(ConfigError, match=r"next norm's weight has shape \[7\]; it needs \[6\]"):
        down._set_next_layer_norm_weights(torch.ones(7), torch.ones(H))
    down = row(InferenceRowParallelLinear, group, config_of(group))
    with pytest.raises(ConfigError, match="norm is RMSNorm, and a bias is given"):
        down._set_next_layer_norm_weights(torch.ones(H), torch.ones(H))


@pytest.mark.ranks(2)
def test_regions_and_the_norm_helper(group):
    parallel_state.initialize_model_parallel(2)
    x = torch.arange(8.0).view(4, 2) + 10 * group.rank()
    for arguments in ((), (group, config_of(group))):
        whole = inference_all_gather_from_tensor_model_parallel_region(x, *arguments)
        assert_bit_equal(whole, torch.cat([torch.arange(8.0).view(4, 2), torch.arange(8.0).view(4, 2) + 10], -1))
        rows = inference_reduce_scatter_to_sequence_parallel_region(x, *arguments)
        assert_bit_equal(rows, (2 * torch.arange(8.0).view(4, 2) + 10).split(2)[group.rank()])
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    assert_close_to(_te_rms_norm_kernel(x, weight, 1e-5), F.rms_norm(x, (2,), weight.detach(), 1e-5), rtol_of_norm=1e-6)
