"""Settings are complete and consistent once a config is made, or it is not made."""

import math

import pytest
import torch
import torch.nn.functional as F

from shardwise.config import ModelParallelConfig, TransformerConfig
from shardwise.errors import ConfigError
from shardwise.initialization import Normal

SMALL = {"num_layers": 3, "hidden_size": 24, "num_attention_heads": 4}


def test_defaults_follow_from_the_sizes():
    config = TransformerConfig(**SMALL)
    assert config.heads == (4, 4, 6)
    assert config.ffn_hidden_size == 96
    assert config.add_qkv_bias is True
    assert config.init_method == Normal(0.02)
    assert config.output_layer_init_method == Normal(0.02 / math.sqrt(6))
    assert config.activation_func is F.gelu
    assert config.params_dtype is torch.float32
    assert config.perform_initialization
    assert not config.sequence_parallel


def test_what_is_given_stays():
    config = TransformerConfig(
        **SMALL,
        num_query_groups=2,
        kv_channels=5,
        ffn_hidden_size=7,
        add_bias_linear=False,
        add_qkv_bias=True,
        init_method=torch.nn.init.ones_,
        output_layer_init_method=torch.nn.init.zeros_,
        init_method_std=0.5,
    )
    assert config.heads == (4, 2, 5)
    assert config.ffn_hidden_size == 7
    assert config.add_qkv_bias is True
    assert config.init_method is torch.nn.init.ones_
    assert config.output_layer_init_method is torch.nn.init.zeros_
    assert TransformerConfig(**SMALL, add_bias_linear=False).add_qkv_bias is False
    assert TransformerConfig(**SMALL, init_method_std=0.5).init_method == Normal(0.5)


def test_heads_that_divide_nothing_need_their_width():
    with pytest.raises(ConfigError, match=r"hidden_size 25 is not a multiple of num_attention_heads 4; .*kv_channels"):
        TransformerConfig(**(SMALL | {"hidden_size": 25}))
    assert TransformerConfig(**(SMALL | {"hidden_size": 25}), kv_channels=6).heads == (4, 4, 6)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_layers", 0, "num_layers is 0; it must be at least 1"),
        ("hidden_size", -24, "hidden_size is -24"),
        ("num_attention_heads", 0, "num_attention_heads is 0"),
        ("hidden_dropout", 1.0, "hidden_dropout is 1.0; it must be at least 0 and under 1"),
        ("hidden_dropout", -0.1, "hidden_dropout is -0.1"),
        ("attention_dropout", 1.5, "attention_dropout is 1.5"),
        ("attention_dropout", math.nan, "attention_dropout is nan"),
        ("normalization", "BatchNorm", "normalization is 'BatchNorm'; it must be 'LayerNorm' or 'RMSNorm'"),
        ("num_query_groups", 3, "num_attention_heads 4 is not a multiple of num_query_groups 3"),
        ("num_query_groups", 0, "num_query_groups 0"),
        ("num_query_groups", 8, "num_attention_heads 4 is not a multiple of num_query_groups 8"),
        ("ffn_hidden_size", 0, "ffn_hidden_size 0 and kv_channels 6 must be at least 1"),
        ("kv_channels", 0, "kv_channels 0 must be at least 1"),
        ("tensor_model_parallel_size", 0, "tensor_model_parallel_size is 0; it must be at least 1"),
    ],
)
def test_values_that_cannot_be(name, value, message):
    with pytest.raises(ConfigError, match=message) as info:
        TransformerConfig(**(SMALL | {name: value}))
    # Callers who do not know Shardwise catch what they expect.
    assert isinstance(info.value, ValueError)


def test_the_parallel_part_alone():
    config = ModelParallelConfig(4, sequence_parallel=True, params_dtype=torch.bfloat16)
    assert (config.tensor_model_parallel_size, config.sequence_parallel) == (4, True)
    with pytest.raises(ConfigError, match="tensor_model_parallel_size is -1"):
        ModelParallelConfig(-1)
