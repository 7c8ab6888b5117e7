"""Layers with the parameters of Transformer Engine's: the numbers of the local spec, and its checkpoints."""

import copy

import pytest
import torch
import torch.nn.functional as F
from harness.parity import assert_bit_equal, assert_close_to

from shardwise import parallel_state
from shardwise.core.errors import ConfigError
from shardwise.megatron import dist_checkpointing
from shardwise.megatron.config import TransformerConfig
from shardwise.megatron.core.extensions import TELayerNormColumnParallelLinear
from shardwise.megatron.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from shardwise.megatron.layer_parts import (
    MLP,
    FusedLayerNorm,
    MLPSubmodules,
    SelfAttention,
    SelfAttentionSubmodules,
)
from shardwise.megatron.layer_specs import get_gpt_decoder_block_spec
from shardwise.megatron.models.gpt import GPTModel
from shardwise.megatron.optimizer import OptimizerConfig, get_megatron_optimizer
from shardwise.megatron.schedules import get_forward_backward_func
from shardwise.megatron.transformer_layer import TransformerLayer
from shardwise.tensor_parallel import ColumnParallelLinear

V, S, B, H = 23, 8, 4, 12
MOVED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 9, "moe_grouped_gemm": True}


def made(fused, *, rms=False, **options):
    """Make the model of this rank's stage, its wrapper and its optimizer."""
    torch.manual_seed(3)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=H,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm" if rms else "LayerNorm",
        layernorm_epsilon=0.01,
        params_dtype=torch.float64,
        pipeline_dtype=torch.float64,
        finalize_model_grads_func=finalize_model_grads,
        **options,
    )
    model = GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=fused),
        V,
        S,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
    )
    for name, param in model.named_parameters():
        if "norm" in name:
            param.data += torch.linspace(-0.3, 0.3, H, dtype=param.dtype)
    return model


def with_optimizer(model, *, zero=False):
    settings = DistributedDataParallelConfig(use_distributed_optimizer=zero)
    wrapped = DistributedDataParallel(model.config, settings, model)
    return wrapped, get_megatron_optimizer(OptimizerConfig(lr=0.05, use_distributed_optimizer=zero), [wrapped])


def forward_step(data_iterator, model):
    ids = next(data_iterator)
    return model(ids, torch.arange(S), None, labels=ids.flip(1)), lambda output: (output.mean(), output.detach().mean())


def losses_of(wrapped, optimizer, steps):
    """Train on this rank's samples; return the losses of the last stage."""
    ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    losses = []
    for step in steps:
        wrapped.zero_grad_buffer()
        ids = torch.randint(V, (B, S), generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]
        losses += get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([ids]),
            model=[wrapped],
            num_microbatches=1,
            seq_length=S,
            micro_batch_size=B // ranks,
        )
        optimizer.step()
    return losses


def local_name(name):
    for plain, fused in MOVED.items():
        name = name.replace(fused, plain)
    return name


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("tp", "pp", "rms"),
    [
        pytest.param(1, 1, False, marks=pytest.mark.slow, id="dp 2"),
        pytest.param(2, 1, False, id="tp 2"),
        pytest.param(2, 1, True, marks=pytest.mark.slow, id="tp 2, RMSNorm"),
        pytest.param(1, 2, True, id="pp 2, RMSNorm"),
    ],
)
def test_norms_in_linear_layers_compute_what_those_before_them_do(group, tp, pp, rms):
    parallel_state.initialize_model_parallel(tp, pp)
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "sequence_parallel": tp > 1}
    local, fused = (made(is_fused, rms=rms, **sizes) for is_fused in (False, True))
    plain = dict(local.named_parameters())
    names = {local_name(name): name for name, _ in fused.named_parameters()}
    assert names.keys() == plain.keys() == local.state_dict().keys()
    assert fused.state_dict().keys() == {*names.values()}
    # Sharded states number the layers of all stages. In a checkpoint a norm has one key.
    states = [model.sharded_state_dict() for model in (local, fused)]
    assert [*map(local_name, states[1])] == [shard.key for shard in states[1].values()]
    assert {*states[0]} == {shard.key for shard in states[1].values()}
    assert len({*states[1]} - {*states[0]}) == len({*names} - {*names.values()}) > 0
    kinds = {"layer_norm_weight"} if rms else {"layer_norm_weight", "layer_norm_bias"}
    assert {new.rpartition(".")[2] for old, new in names.items() if old != new} == kinds
    first, second = (losses_of(*with_optimizer(model), range(2)) for model in (local, fused))
    assert len(first) == 2 * parallel_state.is_pipeline_last_stage()
    for own, expected in zip(second, first, strict=True):
        assert_bit_equal(own, expected)
    for name, param in plain.items():
        own = fused.get_parameter(names[name])
        assert_bit_equal(own.main_grad, param.main_grad)
        assert_bit_equal(own, param)
        for mark, usual in (("tensor_model_parallel", False), ("partition_dim", -1), ("sequence_parallel", False)):
            assert getattr(own, mark, usual) == getattr(param, mark, usual)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("tp", "zero", "experts"),
    [
        pytest.param(1, True, {}, marks=pytest.mark.slow, id="zero"),
        pytest.param(2, False, {}, id="tp 2"),
        pytest.param(1, True, EXPERTS, id="ep 2, zero"),
        pytest.param(2, False, EXPERTS, marks=pytest.mark.slow, id="tp 2, experts"),
    ],
)
def test_checkpoints_open_under_both_names(group, tp, zero, experts, tmp_path):
    parallel_state.initialize_model_parallel(tp, expert_model_parallel_size=2 // tp if experts else 1)
    for saved_by, opened_by in ((False, True), (True, False)):
        first = with_optimizer(made(saved_by, tensor_model_parallel_size=tp, **experts), zero=zero)
        losses_of(*first, range(1))
        weights = first[0].module.sharded_state_dict()
        assert weights.keys() == {*first[0].module.state_dict()} or (experts and not saved_by)
        folder = tmp_path / f"{saved_by}"
        dist_checkpointing.save({"model": weights, "optimizer": first[1].sharded_state_dict(weights)}, folder)
        second = with_optimizer(made(opened_by, tensor_model_parallel_size=tp, **experts), zero=zero)
        for param in second[0].parameters():
            param.data.zero_()
        weights = second[0].module.sharded_state_dict()
        state = {"model": weights, "optimizer": second[1].sharded_state_dict(weights, is_loading=True)}
        loaded = dist_checkpointing.load(state, folder)
        copied = {name: tensor.clone() for name, tensor in loaded["model"].items()}
        for param in second[0].parameters():
            param.data.zero_()
        second[0].module.load_state_dict(copied)
        second[1].load_state_dict(loaded["optimizer"])
        for own, expected in zip(*(losses_of(*pair, range(1, 4)) for pair in (second, first)), strict=True):
            assert_close_to(own, expected, rtol_of_norm=1e-13)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("tp", "ep", "etp"),
    [
        pytest.param(1, 2, 1, id="ep 2"),
        pytest.param(2, 1, 2, marks=pytest.mark.slow, id="tp 2"),
        pytest.param(2, 2, 1, marks=pytest.mark.slow, id="tp 2, ep 2"),
    ],
)
def test_each_expert_has_its_weights(group, tp, ep, etp):
    parallel_state.initialize_model_parallel(tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)
    options = {"tensor_model_parallel_size": tp, "sequence_parallel": tp > 1, **EXPERTS}
    local, single = (made(fused, **options) for fused in (False, True))
    for _ in range(2):
        for ours, theirs in zip(single.decoder.layers, local.decoder.layers, strict=True):
            up, down = (getattr(theirs.mlp.experts, name).unflatten(0, (4 // ep, -1)) for name in ("up", "down"))
            names = {f"linear_fc{part}.weight{i}" for part in (1, 2) for i in range(4 // ep)}
            assert (
                {*ours.mlp.experts.state_dict()} == {name for name, _ in ours.mlp.experts.named_parameters()} == names
            )
            for i, (each, other) in enumerate(zip(up, down, strict=True)):
                assert_bit_equal(getattr(ours.mlp.experts.linear_fc1, f"weight{i}"), each)
                assert_bit_equal(getattr(ours.mlp.experts.linear_fc2, f"weight{i}"), other.t())
            weight = ours.mlp.experts.linear_fc2.weight0
            assert weight.is_contiguous()
            assert (weight.tensor_model_parallel, weight.partition_dim) == (True, 1)
            assert weight.allreduce == theirs.mlp.experts.up.allreduce
        # The same initial values again, also after weights that had no memory.
        for model in (local, single):
            model.to_empty(device="meta")
            model.to_empty(device="cpu")
            torch.manual_seed(4)
            model.reset_parameters()
    assert copy.deepcopy(single).state_dict().keys() == single.state_dict().keys()
    first, second = (losses_of(*with_optimizer(model), range(3)) for model in (local, single))
    for own, expected in zip(second, first, strict=True):
        assert_close_to(own, expected, rtol_of_norm=1e-13)
    with pytest.raises(ConfigError, match="delay_wgrad_compute is True"):
        made(True, delay_wgrad_compute=True, **options)


@pytest.mark.ranks(2)
def test_a_linear_layer_with_a_norm_alone(group):
    parallel_state.initialize_model_parallel(2)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=H,
        num_attention_heads=4,
        params_dtype=torch.float64,
        sequence_parallel=True,
        layernorm_epsilon=0.01,
        layernorm_zero_centered_gamma=True,
    )
    options = {"config": config, "init_method": config.init_method, "bias": True, "gather_output": False}
    torch.manual_seed(3)
    norm, linear = FusedLayerNorm(config, H, 0.01), ColumnParallelLinear(H, 7, **options)
    torch.manual_seed(3)
    both = TELayerNormColumnParallelLinear(H, 7, **options)
    assert both.state_dict().keys() == {"weight", "bias", "layer_norm_weight", "layer_norm_bias"}
    assert both.layer_norm_weight.sequence_parallel
    assert both.sharded_state_dict()["layer_norm_weight"].global_shape == (H,)
    x = torch.randn(4, 2, H, dtype=torch.float64)
    for _ in range(2):
        output, expected = both(x)[0], linear(norm(x))[0]
        assert_bit_equal(output, expected)
        output.square().sum().backward()
        expected.square().sum().backward()
        assert_bit_equal(both.layer_norm_weight.grad, norm.weight.grad)
        assert_bit_equal(both.weight.grad, linear.weight.grad)
        both, linear, norm = (copy.deepcopy(each) for each in (both, linear, norm))
        torch.nn.init.ones_(both.layer_norm_weight)
        torch.nn.init.ones_(norm.weight)
    both.reset_parameters()
    assert_bit_equal(both.layer_norm_weight, torch.zeros(H, dtype=torch.float64))


@pytest.mark.ranks(2)
def test_parts_that_begin_with_a_norm(group):
    """An attention and an MLP without a layer around them: their first linear layer has the norm of the input."""
    parallel_state.initialize_model_parallel(2)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=H,
        num_attention_heads=4,
        attention_dropout=0.0,
        params_dtype=torch.float64,
        sequence_parallel=True,
        layernorm_epsilon=0.01,
    )
    for kind, parts, first in (
        (MLP, MLPSubmodules, "linear_fc1"),
        (SelfAttention, SelfAttentionSubmodules, "linear_qkv"),
    ):
        norm, plain = FusedLayerNorm(config, H, 0.01), kind(config, parts())
        both = kind(config, parts(**{first: TELayerNormColumnParallelLinear}))
        torch.nn.init.normal_(norm.weight)
        moved = {f"{first}.layer_norm_{name}": tensor for name, tensor in norm.state_dict().items()}
        both.load_state_dict(plain.state_dict() | moved)
        x = torch.randn(4, 2, H, dtype=torch.float64)
        assert_bit_equal(both(x, None)[0], plain(norm(x), None)[0])


@pytest.mark.ranks(1)
def test_a_layer_alone_has_the_names(group):
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(num_layers=2, hidden_size=H, num_attention_heads=4, params_dtype=torch.float64)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    layer = TransformerLayer(config, spec.submodules)
    fused = {name for name in layer.state_dict() if "norm" in name}
    assert fused == {f"{name}{kind}" for name in MOVED.values() for kind in ("weight", "bias")}
    plain = TransformerLayer(config, get_gpt_decoder_block_spec(config, use_transformer_engine=False).submodules)
    plain.load_state_dict({local_name(name): tensor for name, tensor in layer.state_dict().items()})
    hidden = torch.randn(S, 1, H, dtype=torch.float64)
    assert_bit_equal(layer.eval()(hidden)[0], plain.eval()(hidden)[0])
