"""Settings are complete and consistent once a config is made, or it is not made."""

import dataclasses
import enum
import math
import warnings

import pytest
import torch
import torch.nn.functional as F

from shardwise.core.errors import ConfigError
from shardwise.core.initialization import CounterNormal
from shardwise.megatron.absent import say_once
from shardwise.megatron.config import ModelParallelConfig, TransformerConfig
from shardwise.models.experts import Experts

SMALL = {"num_layers": 3, "hidden_size": 24, "num_attention_heads": 4}


def test_defaults_follow_from_the_sizes():
    config = TransformerConfig(**SMALL)
    assert config.heads == (4, 4, 6)
    assert config.ffn_hidden_size == 96
    assert config.add_qkv_bias is True
    assert config.init_method == CounterNormal(0.02)
    assert config.output_layer_init_method == CounterNormal(0.02 / math.sqrt(6))
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
    # As in the reference, whose programs give its default explicitly.
    assert TransformerConfig(**SMALL, add_qkv_bias=False).add_qkv_bias is True
    assert TransformerConfig(**SMALL, init_method_std=0.5).init_method == CounterNormal(0.5)


@pytest.mark.parametrize(("given", "windowed"), [(3, (True, True, False)), ([1, 0, 1], (True, False, True))])
def test_layers_with_a_window_or_without_rotary_positions(given, windowed):
    config = TransformerConfig(**SMALL, window_size=(4, 0), window_attn_skip_freq=given, no_rope_freq=given)
    assert config.windowed_layers == windowed
    assert config.rotary_layers == ((False, True, False) if isinstance(given, list) else windowed)
    assert dataclasses.replace(config, hidden_dropout=0.0).windowed_layers == windowed
    assert TransformerConfig(**SMALL, window_attn_skip_freq=given).windowed_layers is None


@pytest.mark.parametrize("name", ["window_attn_skip_freq", "no_rope_freq"])
def test_patterns_of_layers_out_of_range(name):
    with pytest.raises(ConfigError, match=rf"{name} is \[1, 2, 0\]; it must be 0 or 1 for each of the 3 layers"):
        TransformerConfig(**SMALL, window_size=(4, 0), **{name: [1, 2, 0]})
    with pytest.raises(ConfigError, match=rf"{name} is -1; it must be at least 1"):
        TransformerConfig(**SMALL, window_size=(4, 0), **{name: -1})


def test_heads_that_divide_nothing_need_their_width():
    with pytest.raises(ConfigError, match=r"hidden_size 25 is not a multiple of num_attention_heads 4; .*kv_channels"):
        TransformerConfig(**(SMALL | {"hidden_size": 25}))
    assert TransformerConfig(**(SMALL | {"hidden_size": 25}), kv_channels=6).heads == (4, 4, 6)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_layers", 0, "num_layers is 0; it must be at least 1"),
        ("rotary_base", 5e5, "rotary_base is 500000.0, which no TransformerConfig has; give it to the model"),
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
        (
            "activation_func",
            "gelu",
            r"activation_func is 'gelu'; it must be a function \(by name they are in shardwise",
        ),
        ("norm_position", "between", "norm_position is 'between'; it must be one of pre, post, sandwich"),
        ("attention_backend", "flash3", "attention_backend is 'flash3'; it must be one of auto, flash, fused, unfused"),
        ("cp_comm_type", "ring", "cp_comm_type is 'ring'; it must be one of auto, all_gather, a2a"),
        ("cp_comm_type", ["a2a", "all_gather"], "a list must have the same value for each of the 3 layers"),
        ("softmax_scale", 0.0, "softmax_scale is 0.0; it must be over 0, or None for 1/sqrt"),
        ("softmax_scale", math.nan, "softmax_scale is nan"),
        ("window_size", 4, "window_size is 4; it must be a pair of numbers of positions before and after"),
        ("window_size", (4,), r"window_size is \(4,\)"),
        ("window_size", (4, -2), r"window_size is \(4, -2\)"),
        ("window_size", (4, 0.5), r"window_size is \(4, 0.5\)"),
    ],
)
def test_values_that_cannot_be(name, value, message):
    with pytest.raises(ConfigError, match=message) as info:
        TransformerConfig(**(SMALL | {name: value}))
    # Callers who do not know Shardwise catch what they expect.
    assert isinstance(info.value, ValueError)


def test_a_residual_after_a_norm_that_is_not_there():
    with pytest.raises(
        ConfigError, match="apply_residual_connection_post_layernorm is about a layer with norms before attention"
    ):
        TransformerConfig(**SMALL, norm_position="post", apply_residual_connection_post_layernorm=True)


def test_what_programs_write_otherwise():
    backends = enum.Enum("AttnBackend", ["flash", "fused", "unfused", "local", "auto"])
    assert TransformerConfig(**SMALL, attention_backend=backends.unfused).attention_backend == "unfused"
    assert TransformerConfig(**SMALL).cp_comm_type == "auto"
    assert TransformerConfig(**SMALL, cp_comm_type=["a2a"] * 3).cp_comm_type == "a2a"
    assert TransformerConfig(**SMALL, window_size=[4, -1]).window_size == (4, -1)


def test_the_parallel_part_alone():
    config = ModelParallelConfig(4, sequence_parallel=True, params_dtype=torch.bfloat16)
    assert (config.tensor_model_parallel_size, config.sequence_parallel) == (4, True)
    with pytest.raises(ConfigError, match="tensor_model_parallel_size is -1"):
        ModelParallelConfig(-1)


def test_a_float_is_no_integer():
    with pytest.raises(ConfigError, match=r"hidden_size is 8\.0; it must be an integer"):
        TransformerConfig(num_layers=1, hidden_size=8.0, num_attention_heads=2)
    with pytest.raises(ConfigError, match=r"num_query_groups is 1\.0; it must be an integer"):
        TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, num_query_groups=1.0)
    with pytest.raises(ConfigError, match=r"tensor_model_parallel_size is 2\.0; it must be an integer"):
        ModelParallelConfig(2.0)


def test_parallel_defaults_follow_from_what_is_given():
    config = ModelParallelConfig(tensor_model_parallel_size=4, params_dtype=torch.float64)
    assert config.expert_tensor_parallel_size == 4
    assert config.autocast_dtype is torch.float64
    assert config.pipeline_dtype is None
    assert config.microbatch_group_size_per_vp_stage == 1
    staged = ModelParallelConfig(pipeline_model_parallel_size=3, bf16=True, params_dtype=torch.bfloat16)
    # That of the parameters at the time, also where the config is replaced by one with others.
    assert staged.pipeline_dtype is None
    assert staged.microbatch_group_size_per_vp_stage == 3
    given = ModelParallelConfig(
        tensor_model_parallel_size=4,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        expert_tensor_parallel_size=1,
        autocast_dtype=torch.float16,
        pipeline_dtype=torch.float32,
        microbatch_group_size_per_vp_stage=5,
        context_parallel_size=4,
        hierarchical_context_parallel_sizes=[2, 2],
        # One rank's share is the whole; deferral needs no stages.
        sequence_parallel=True,
        defer_embedding_wgrad_compute=True,
        wgrad_deferral_limit=3,
    )
    assert (given.expert_tensor_parallel_size, given.autocast_dtype) == (1, torch.float16)
    assert (given.pipeline_dtype, given.microbatch_group_size_per_vp_stage) == (torch.float32, 5)
    # What follows is not checked anew against what it followed from.
    assert dataclasses.replace(given, wgrad_deferral_limit=4).microbatch_group_size_per_vp_stage == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fp16": True, "bf16": True}, "fp16 and bf16 are both set; choose one"),
        ({"wgrad_deferral_limit": -1}, "wgrad_deferral_limit is -1; it must be at least 0"),
        ({"pipeline_model_parallel_size": 0}, "pipeline_model_parallel_size is 0; it must be at least 1"),
        ({"context_parallel_size": 0}, "context_parallel_size is 0"),
        ({"expert_model_parallel_size": 0}, "expert_model_parallel_size is 0"),
        ({"expert_tensor_parallel_size": 0}, "expert_tensor_parallel_size is 0"),
        (
            {"virtual_pipeline_model_parallel_size": 2},
            "virtual_pipeline_model_parallel_size is 2 and pipeline_model_parallel_size is 1; interleaving needs",
        ),
        (
            {"virtual_pipeline_model_parallel_size": 0, "pipeline_model_parallel_size": 2},
            "virtual_pipeline_model_parallel_size is 0; it must be at least 1",
        ),
        (
            {"context_parallel_size": 4, "hierarchical_context_parallel_sizes": (2, 3)},
            r"hierarchical_context_parallel_sizes \[2, 3\] multiply to 6; they must .* context_parallel_size 4",
        ),
    ],
)
def test_parallel_settings_that_cannot_be(options, message):
    with pytest.raises(ConfigError, match=message):
        ModelParallelConfig(**options)
    with pytest.raises(ConfigError, match=message):
        TransformerConfig(**SMALL, **options)


def marked(kind):
    return [spec for spec in dataclasses.fields(TransformerConfig) if kind in spec.metadata]


def other_than(default):
    return {bool: not default, int: 7, float: 0.25, str: "other"}.get(type(default), "other")


@pytest.mark.parametrize("spec", marked("unused"), ids=lambda spec: spec.name)
def test_a_field_that_changes_nothing_says_so_once(spec):
    say_once.cache_clear()
    TransformerConfig(**SMALL, **{spec.name: spec.default})
    message = rf"^{spec.name} changes nothing here: \w"
    with pytest.warns(UserWarning, match=message) as caught:
        config = TransformerConfig(**SMALL, **{spec.name: other_than(spec.default)})
    # It points at the line that made the config.
    (warning,) = caught
    assert warning.filename == __file__
    assert getattr(config, spec.name) == other_than(spec.default)
    with warnings.catch_warnings(record=True) as again:
        warnings.simplefilter("always")
        TransformerConfig(**SMALL, **{spec.name: other_than(spec.default)})
        dataclasses.replace(config, hidden_dropout=0.5)
    assert again == []


@pytest.mark.parametrize("spec", marked("refused"), ids=lambda spec: spec.name)
def test_a_field_that_would_change_numbers_is_refused(spec):
    value = other_than(spec.default)
    with pytest.raises(ConfigError) as info:
        TransformerConfig(**SMALL, **{spec.name: value})
    start = f"{spec.name} is {value!r}, which is not offered here: {spec.metadata['refused']}; leave it at"
    assert str(info.value) == f"{start} {spec.default!r}"


def test_a_refusal_comes_before_any_word():
    say_once.cache_clear()
    with pytest.raises(ConfigError, match="mtp_num_layers is 8"):
        TransformerConfig(**SMALL, mtp_num_layers=8, persist_layer_norm=True)


EXPERTS = {**SMALL, "num_moe_experts": 8, "add_bias_linear": False}


def test_experts_by_megatron_s_fields():
    plain = Experts(
        num=8,
        per_token=2,
        ffn_hidden_size=96,
        softmax_after_choice=True,
        normalizes_weights=False,
        balances="micro_batch",
    )
    sigmoid = {"moe_router_score_function": "sigmoid", "moe_router_topk": 4, "moe_router_enable_expert_bias": True}
    of_sigmoid = {"scores": "sigmoid", "per_token": 4, "softmax_after_choice": False, "normalizes_weights": True}
    for given, expected in (
        ({}, {}),
        ({"moe_router_pre_softmax": True, "moe_router_topk": 1}, {"softmax_after_choice": False, "per_token": 1}),
        ({"moe_ffn_hidden_size": 7, "moe_layer_freq": 2}, {"ffn_hidden_size": 7, "layers": (True, False, True)}),
        ({"ffn_hidden_size": 5, "moe_layer_freq": [0, 1, 1]}, {"ffn_hidden_size": 5, "layers": (False, True, True)}),
        (
            {**sigmoid, "moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk_scaling_factor": 2.5},
            {**of_sigmoid, "selection_bias": True, "num_groups": 4, "groups_per_token": 2, "weight_scale": 2.5},
        ),
        ({"moe_router_num_groups": 4}, {}),
        (
            {"moe_shared_expert_intermediate_size": 5, "moe_shared_expert_gate": True},
            {"shared_ffn_hidden_size": 5, "shared_gate": True},
        ),
        ({"moe_apply_probs_on_input": True, "moe_token_dispatcher_type": "alltoall"}, {"weighs_input": True}),
        ({"moe_router_dtype": "fp32", "moe_grouped_gemm": True}, {}),
        ({"moe_router_force_load_balancing": True}, {}),
    ):
        config = TransformerConfig(**EXPERTS | given)
        assert config.experts == dataclasses.replace(plain, **expected)
        assert dataclasses.replace(config, hidden_dropout=0.0).experts == config.experts
    # What two experts do not differ in outside of training.
    trained = TransformerConfig(**EXPERTS | sigmoid, moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.2).experts
    assert (trained.aux_loss, trained.balances, trained.z_loss, trained.bias_rate) == (0.1, "micro_batch", 0.2, 1e-3)
    kind = {"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "seq_aux_loss"}
    assert TransformerConfig(**EXPERTS | kind).experts.balances == "sequence"
    kind["moe_router_load_balancing_type"] = "none"
    assert TransformerConfig(**EXPERTS | kind).experts.aux_loss == 0.0
    assert TransformerConfig(**EXPERTS, moe_router_force_load_balancing=True).experts.forces_balance
    ways = {None: "all_gather", "allgather": "all_gather", "alltoall": "a2a", "flex": "a2a"}
    for kind, way in ways.items():
        given = {} if kind is None else {"moe_token_dispatcher_type": kind}
        assert TransformerConfig(**EXPERTS, **given).ep_comm_type == way
    # A dense model ignores the fields.
    assert TransformerConfig(**SMALL, moe_router_topk=1, moe_aux_loss_coeff=0.1).experts is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"moe_router_load_balancing_type": "sinkhorn"}, "moe_router_load_balancing_type is 'sinkhorn'; it must be"),
        ({"moe_router_load_balancing_type": ["aux_loss"]}, r"moe_router_load_balancing_type is \['aux_loss'\]"),
        ({"moe_router_score_function": "relu"}, "moe_router_score_function is 'relu'; it must be one of 'softmax'"),
        ({"moe_router_dtype": "fp64"}, "moe_router_dtype is 'fp64'; it must be one of None, 'fp32' here"),
        ({"moe_token_dispatcher_type": "ring"}, "moe_token_dispatcher_type is 'ring'"),
        ({"add_bias_linear": True}, "num_moe_experts is set, and experts have no biases here; set add_bias"),
        ({"moe_router_enable_expert_bias": True}, "moe_router_enable_expert_bias needs moe_router_score_function='sig"),
        ({"moe_router_topk": 1}, "moe_router_topk is 1, and a softmax over one expert is 1; set moe_router_pre"),
        ({"moe_router_group_topk": 2}, "moe_router_group_topk is about moe_router_num_groups, which is None; set both"),
        (
            {"moe_router_group_topk": 1, "moe_router_num_groups": 4},
            "moe_router_topk 2 with moe_router_group_topk 1 compares groups by the sum of their 2 highest scores, and "
            "a router with softmax scores sums 1 here",
        ),
        ({"num_moe_experts": 0}, "experts: num is 0; it must be from 1 to 65536"),
        ({"num_moe_experts": 8.0}, r"num_moe_experts is 8\.0; it must be an integer"),
        ({"moe_layer_freq": 0}, "moe_layer_freq is 0; it must be at least 1"),
        ({"moe_layer_freq": [1, 0]}, r"moe_layer_freq is \[1, 0\]; it must be 0 or 1 for each of the 3 layers"),
    ],
)
def test_experts_that_cannot_be(options, message):
    with pytest.raises(ConfigError, match=message):
        TransformerConfig(**EXPERTS | options)


def test_a_training_dtype_that_layers_do_not_have():
    say_once.cache_clear()
    ModelParallelConfig(bf16=True, params_dtype=torch.bfloat16)
    ModelParallelConfig(fp16=True, params_dtype=torch.float16)
    with pytest.warns(UserWarning, match=r"^bf16 changes nothing here: layers go by params_dtype") as caught:
        ModelParallelConfig(bf16=True)
    assert caught[0].filename == __file__
    ModelParallelConfig(bf16=True)


def test_the_word_is_said_for_the_parallel_part_too():
    say_once.cache_clear()
    with pytest.warns(UserWarning, match="^tp_comm_overlap_rs_dgrad changes nothing here") as caught:
        ModelParallelConfig(tp_comm_overlap_rs_dgrad=True)
    assert caught[0].filename == __file__


def test_the_types_of_fields_make_options_of_a_program():
    """Megatron's factory of arguments takes types and unions of them, not their names as text."""
    found = {field.name: field.type for field in dataclasses.fields(TransformerConfig)}
    assert [name for name, kind in found.items() if isinstance(kind, str)] == []
    assert (found["num_layers"], found["bf16"], found["moe_expert_capacity_factor"]) == (int, bool, float | None)
    assert found["fp8"] == str | None
    assert found["qk_clip_threshold"] is type(TransformerConfig(**SMALL).qk_clip_threshold)


def test_a_config_without_a_width_is_completed_later():
    config = TransformerConfig(num_layers=3, num_attention_heads=4)
    assert config.hidden_size == 0
    with pytest.raises(ConfigError, match="hidden_size is 0; set it before layers are made"):
        config.check_complete()
    config.hidden_size = 24
    config.check_complete()
    assert dataclasses.asdict(config) == dataclasses.asdict(TransformerConfig(**SMALL))
    with pytest.raises(ConfigError, match="hidden_size is -1; it must be at least 1"):
        TransformerConfig(**SMALL | {"hidden_size": -1})
