"""A config that is changed after layers were made: the next forward reads the new value, or the change is an error."""

import copy

import pytest
import torch
import torch.nn.functional as F
from harness.parity import assert_bit_equal

from shardwise import parallel_state
from shardwise.core.errors import ConfigError
from shardwise.megatron.absent import say_once
from shardwise.megatron.config import TransformerConfig
from shardwise.megatron.distributed import DistributedDataParallelConfig
from shardwise.megatron.layer_parts import MLP, SelfAttention
from shardwise.megatron.layer_specs import get_gpt_layer_local_spec
from shardwise.megatron.models.gpt import GPTModel
from shardwise.megatron.moe import MoELayer, TopKRouter

H, E = 12, 4


def config_of(**settings):
    sizes = {"num_layers": 2, "hidden_size": H, "num_attention_heads": 4, "add_bias_linear": False}
    return TransformerConfig(**sizes, params_dtype=torch.float64, hidden_dropout=0.0, attention_dropout=0.0, **settings)


def experts_of(**settings):
    return config_of(num_moe_experts=E, **settings)


SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
LIVE = {
    "moe_aux_loss_coeff": (0.0, 0.5, {}),
    "moe_z_loss_coeff": (None, 0.5, {"moe_aux_loss_coeff": 0.1}),
    "moe_router_topk_scaling_factor": (None, 1.7, {}),
    "moe_router_force_load_balancing": (False, True, {}),
    "moe_router_bias_update_rate": (1e-3, 0.5, SIGMOID),
}


def gradients_of(layer):
    """Gradients of a forward, and the bias that its loads move."""
    hidden = torch.randn(8, 2, H, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    layer(hidden)[0].square().sum().backward()
    if layer.statistics is not None:
        layer.router.balance_(layer.statistics[:E])
    bias = () if layer.router.expert_bias is None else (layer.router.expert_bias,)
    return [hidden.grad, *(param.grad for param in layer.parameters()), *bias]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", LIVE)
def test_what_a_router_reads_at_each_forward(group, name):
    parallel_state.initialize_model_parallel()
    before, after, others = LIVE[name]

    def made(value):
        torch.manual_seed(0)
        config = experts_of(**others, **{name: value})
        return config, MoELayer(config)

    config, changed = made(before)
    _, unchanged = made(before)
    setattr(config, name, after)
    expected, found, old = (gradients_of(layer) for layer in (made(after)[1], changed, unchanged))
    for each, other in zip(found, expected, strict=True):
        assert_bit_equal(each, other)
    assert not all(map(torch.equal, found, old))
    # And back.
    setattr(config, name, before)
    assert changed.spec == changed.router.experts == unchanged.spec
    if isinstance(after, float):
        with pytest.raises(ConfigError, match="it must be a finite number of at least 0"):
            setattr(config, name, -1.0)
        assert getattr(config, name) == before


ONCE = {
    "activation_func": F.silu,
    "gated_linear_unit": True,
    "moe_apply_probs_on_input": True,
    "moe_router_group_topk": 1,
    "moe_router_num_groups": 2,
    "moe_router_pre_softmax": True,
    "no_rope_freq": 2,
    "rotary_interleaved": True,
    "sequence_parallel": True,
    "defer_embedding_wgrad_compute": True,
}
MAKERS = {
    "GPTModel": lambda config: GPTModel(config, get_gpt_layer_local_spec(E), 23, 8),
    "MoELayer": MoELayer,
    "TopKRouter": TopKRouter,
    "SelfAttention": SelfAttention,
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("maker", MAKERS)
def test_what_layers_have_read_for_good_cannot_be_changed(group, maker):
    parallel_state.initialize_model_parallel()
    config = experts_of()
    config.rotary_interleaved = True
    config.rotary_interleaved = False
    MAKERS[maker](config)
    for name, value in ONCE.items():
        setattr(config, name, getattr(config, name))
        with pytest.raises(ConfigError, match=f"{name} is set to .* after layers were made with .* read once"):
            setattr(config, name, value)
    # No layer was made from a copy, or from another config.
    for other in (copy.copy(config), copy.deepcopy(config), experts_of()):
        other.rotary_interleaved = True
    # What Megatron reads once has no effect there either.
    config.hidden_dropout = 0.3


@pytest.mark.ranks(1)
def test_what_only_memory_depends_on_is_said(group):
    parallel_state.initialize_model_parallel()
    config = config_of()
    config.recompute_granularity = "selective"
    MLP(config)
    say_once.cache_clear()
    for name, value in {"recompute_granularity": None, "wgrad_deferral_limit": 3}.items():
        with pytest.warns(UserWarning, match=f"{name} of a config that layers were made from changes nothing here"):
            setattr(config, name, value)


@pytest.mark.ranks(2)
def test_changes_reach_the_config_that_a_stage_was_made_from(group):
    parallel_state.initialize_model_parallel(1, 2)
    config = experts_of()
    first = parallel_state.is_pipeline_first_stage()
    model = GPTModel(config, get_gpt_layer_local_spec(E), 23, 8, pre_process=first, post_process=not first)
    assert (config.pipeline_model_parallel_size, model.config.pipeline_model_parallel_size) == (1, 2)
    config.moe_aux_loss_coeff, config.grad_scale_func = 0.25, str
    assert model.config.grad_scale_func is str
    assert {layer.mlp.spec.aux_loss for layer in model.decoder.layers} == {0.25}


def test_a_setting_is_checked_whenever_it_is_set():
    say_once.cache_clear()
    with pytest.raises(ConfigError, match="fp8 is 'hybrid', which is not offered here"):
        config_of().fp8 = "hybrid"
    with pytest.raises(ConfigError, match=r"moe_expert_capacity_factor is 1\.5.*capacity_factor and drops_by"):
        experts_of().moe_expert_capacity_factor = 1.5
    with pytest.raises(ConfigError, match="use_megatron_fsdp is True"):
        DistributedDataParallelConfig().use_megatron_fsdp = True
    config = config_of()
    with pytest.warns(UserWarning, match="masked_softmax_fusion changes nothing here"):
        config.masked_softmax_fusion = True
    config.fp8 = None
