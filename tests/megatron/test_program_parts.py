"""Parts that programs build models of: blocks of layers, projections of features, softmax with masks, and timers."""

import logging
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness.parity import assert_bit_equal, assert_close_to

from shardwise import parallel_state
from shardwise.core.errors import ConfigError
from shardwise.megatron.config import TransformerConfig
from shardwise.megatron.core import timers
from shardwise.megatron.core.functions import FusedScaleMaskSoftmax, SoftmaxOne
from shardwise.megatron.core.models.vision import MultimodalProjector, VisionModule
from shardwise.megatron.core.transformer.multi_token_prediction import get_default_pg_collection, router_gating_linear
from shardwise.megatron.core.transformer.transformer_block import TransformerBlock
from shardwise.megatron.layer_parts import MLPSubmodules
from shardwise.megatron.layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_mlp_module_spec,
)
from shardwise.megatron.models.gpt import GPTModel
from shardwise.megatron.moe import GroupedMLP, SequentialMLP, TEGroupedMLP
from shardwise.megatron.spec_utils import build_module
from shardwise.megatron.utils import attention_mask_func
from shardwise.models.transformer.masks import AttnMaskType
from shardwise.tensor_parallel import ColumnParallelLinear

H, S, B = 12, 6, 2


def config_of(**options):
    sizes = {"num_layers": 4, "hidden_size": H, "num_attention_heads": 4, "hidden_dropout": 0.0}
    sizes |= {"attention_dropout": 0.0, "params_dtype": torch.float64, "use_cpu_initialization": True}
    return TransformerConfig(**sizes | options)


def hidden_states():
    return torch.randn(S, B, H, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.ranks(2)
def test_a_block_computes_as_the_block_of_a_model(group):
    parallel_state.initialize_model_parallel(2)
    config = config_of(tensor_model_parallel_size=2)
    model = GPTModel(config, get_gpt_layer_local_spec(), 16, S)
    block = TransformerBlock(config, get_gpt_layer_local_spec())
    block.load_state_dict(model.decoder.state_dict())
    x, y = (hidden_states().requires_grad_() for _ in range(2))
    output = block(x, None)
    expected = model.decoder(y)
    assert_bit_equal(output, expected)
    output.square().sum().backward()
    expected.square().sum().backward()
    assert_bit_equal(x.grad, y.grad)
    masked = block(x, attention_mask=torch.ones(B, 1, S, S, dtype=torch.bool).triu(1))
    assert_close_to(masked, expected, rtol_of_norm=1e-12)

    class Own(TransformerBlock):
        pass

    assert isinstance(model.decoder, TransformerBlock)
    assert not isinstance(model.decoder, Own)
    assert isinstance(Own(config, get_gpt_layer_local_spec(), post_layer_norm=False), Own)
    assert Own(config, get_gpt_layer_local_spec(), post_layer_norm=False).final_layernorm is None
    with pytest.raises(ConfigError, match="context_mask is given"):
        block(x, None, context_mask=x)


@pytest.mark.ranks(2)
def test_blocks_of_stages_make_up_the_whole(group):
    parallel_state.initialize_model_parallel(1, 2)
    stage = group.rank()
    torch.manual_seed(3)
    whole = TransformerBlock(config_of(), get_gpt_layer_local_spec())
    staged = config_of(pipeline_model_parallel_size=2, pipeline_dtype=torch.float64)
    own = TransformerBlock(staged, get_gpt_layer_local_spec(), pre_process=stage == 0, post_process=stage == 1)
    assert [layer.layer_number for layer in own.layers] == [2 * stage + 1, 2 * stage + 2]
    assert own.num_layers_per_pipeline_rank == 2
    own.layers.load_state_dict(whole.layers[2 * stage : 2 * stage + 2].state_dict())
    received = hidden_states()
    if stage == 0:
        dist.send(own(received, None).detach(), 1)
        return
    with pytest.raises(ConfigError, match="pre_process is False; give hidden_states, or call set_input_tensor"):
        own(None, None)
    dist.recv(received, 0)
    own.set_input_tensor(received)
    assert_bit_equal(own(None, None), whole(hidden_states(), None))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_parts_of_transformer_engine_norm_their_input(group, sequence_parallel):
    """Alone and in a block: the norm's parameters are in the linear layer, and it computes as a norm before it."""
    parallel_state.initialize_model_parallel(2)
    config = config_of(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel, normalization="RMSNorm")
    fused, plain = get_gpt_layer_with_transformer_engine_spec(), get_gpt_layer_local_spec()
    x = hidden_states().chunk(2)[group.rank()] if sequence_parallel else hidden_states()
    weight = torch.linspace(0.5, 2, H, dtype=torch.float64)
    normed = x * x.square().mean(-1, keepdim=True).add(config.layernorm_epsilon).rsqrt() * weight
    for part, linear in (("self_attention", "linear_qkv"), ("mlp", "linear_fc1")):
        torch.manual_seed(3)
        ours = build_module(getattr(fused.submodules, part), config=config)
        torch.manual_seed(3)
        theirs = build_module(getattr(plain.submodules, part), config=config)
        assert {*ours.state_dict()} - {*theirs.state_dict()} == {f"{linear}.layer_norm_weight"}
        with torch.no_grad():
            getattr(ours, linear).layer_norm_weight.copy_(weight)
        assert_close_to(ours(x)[0], theirs(normed)[0], rtol_of_norm=1e-12)
    torch.manual_seed(3)
    block = TransformerBlock(config, fused)
    torch.manual_seed(3)
    assert_bit_equal(block(x, None), TransformerBlock(config, plain)(x, None))
    assert "layers.1.mlp.linear_fc1.layer_norm_weight" in block.state_dict()
    assert [*get_mlp_module_spec().submodules.__dict__.values()] == [*fused.submodules.mlp.submodules.__dict__.values()]
    assert get_mlp_module_spec(use_te=False).submodules == plain.submodules.mlp.submodules


@pytest.mark.ranks(2)
def test_a_projector_maps_features_of_another_width(group):
    parallel_state.initialize_model_parallel(2)
    config = config_of(tensor_model_parallel_size=2, ffn_hidden_size=8)

    def whole(shard, dim):
        parts = [torch.empty_like(shard) for _ in range(2)]
        dist.all_gather(parts, shard.detach())
        return torch.cat(parts, dim)

    x = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    torch.manual_seed(3)
    mlp = MultimodalProjector(config, MLPSubmodules(), "mlp", 5)
    up, down = mlp.encoder.linear_fc1, mlp.encoder.linear_fc2
    inner = F.gelu(F.linear(x, whole(up.weight, 0), whole(up.bias, 0)))
    assert_close_to(mlp(x), F.linear(inner, whole(down.weight, 1), down.bias), rtol_of_norm=1e-12)
    affine = MultimodalProjector(config, MLPSubmodules(ColumnParallelLinear, None), "affine", 5)
    linear = affine.encoder
    assert_close_to(affine(x), F.linear(x, whole(linear.weight, 0), whole(linear.bias, 0)), rtol_of_norm=1e-12)
    assert VisionModule(config).config is config
    with pytest.raises(ConfigError, match="projector_type is 'conv'; it must be 'mlp' or 'affine'"):
        MultimodalProjector(config, MLPSubmodules(), "conv", 5)


@pytest.mark.ranks(2)
def test_groups_of_experts_are_those_of_the_topology(group):
    parallel_state.initialize_model_parallel(1, expert_model_parallel_size=2)
    groups = get_default_pg_collection()
    sizes = {name: value.size() for name, value in vars(groups).items()}
    assert sizes == {"tp": 1, "cp": 1, "ep": 2, "expt_tp": 1, "expt_dp": 1, "tp_ep": 2, "tp_cp": 1, "tp_dp_cp": 2}
    assert groups.ep is parallel_state.get_expert_model_parallel_group()


def test_experts_of_a_spec_have_their_parts():
    """Programs read them to make experts of their own."""
    of_config = get_gpt_layer_local_spec(4).submodules.mlp.submodules.experts
    assert (of_config.module, of_config.submodules) == (SequentialMLP, MLPSubmodules())
    assert get_gpt_layer_local_spec(4, True).submodules.mlp.submodules.experts.module is GroupedMLP
    fused = get_gpt_layer_with_transformer_engine_spec(4, True).submodules.mlp.submodules.experts
    assert (fused.module, fused.submodules) == (TEGroupedMLP, MLPSubmodules())


def test_logits_of_a_router_are_computed_in_its_dtype():
    generator = torch.Generator().manual_seed(4)
    x, weight = (torch.randn(n, H, generator=generator).bfloat16().requires_grad_() for n in (5, 3))
    bias = torch.randn(3, generator=generator).bfloat16().requires_grad_()
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, weight, bias)]
    logits, expected = router_gating_linear(x, weight, bias, torch.float64), F.linear(*wide)
    assert_bit_equal(logits, expected)
    logits.sin().sum().backward()
    expected.sin().sum().backward()
    for tensor, of_wide in zip((x, weight, bias), wide, strict=True):
        assert_bit_equal(tensor.grad, of_wide.grad.bfloat16())


def softmax_of(kind=AttnMaskType.causal, *, bf16=False, wide=True, scale=None, window=None):
    return FusedScaleMaskSoftmax(False, bf16, kind, True, attention_mask_func, wide, scale, window)


def test_softmax_of_scaled_and_masked_scores():
    scores = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    future = torch.ones(4, 4, dtype=torch.bool).triu(1)
    for softmax, mask, expected in (
        (softmax_of(), None, scores.masked_fill(future, -1e9)),
        (softmax_of(scale=0.5), None, (scores / 2).masked_fill(future, -1e9)),
        (softmax_of(AttnMaskType.padding), None, scores),
        (softmax_of(AttnMaskType.padding), future.T, scores.masked_fill(future.T, -1e9)),
        (softmax_of(window=(1, 0)), None, scores.masked_fill(future | future.T.tril(-2), -1e9)),
    ):
        assert_close_to(softmax(scores, mask), expected.softmax(-1), rtol_of_norm=1e-6)
    # One query, of a cache, sees all keys.
    assert_close_to(softmax_of()(scores[:, :, :1], None), scores[:, :, :1].softmax(-1), rtol_of_norm=1e-6)
    offsets = torch.tensor([0.0, 1.0, -1.0])
    exps = scores.double().exp()
    expected = (exps / (exps.sum(-1, keepdim=True) + offsets.double().exp().view(3, 1, 1))).float()
    assert_close_to(softmax_of(AttnMaskType.padding)(scores, None, offsets), expected, rtol_of_norm=1e-6)
    assert_close_to(SoftmaxOne(-1, 0.0)(scores)[:, 0], expected[:, 0], rtol_of_norm=1e-6)
    rough = scores.bfloat16()
    assert_bit_equal(softmax_of(AttnMaskType.padding, bf16=True)(rough, None), rough.float().softmax(-1).bfloat16())
    for wrong in (lambda: softmax_of(wide=False, scale=2.0), lambda: softmax_of()(scores[..., :3, :], None)):
        with pytest.raises(AssertionError, match=r"in fp32|3 queries and 4 keys"):
            wrong()


@pytest.mark.ranks(2)
def test_timers_sum_and_compare_ranks(group, monkeypatch):
    """By a clock that goes one second per look on rank 0, and two on rank 1."""
    now = [0.0]

    def look():
        now[0] += 1.0 + group.rank()
        return now[0]

    monkeypatch.setattr(timers, "time", SimpleNamespace(perf_counter=look))
    own = timers.Timers(1, "minmax")
    for _ in range(3):
        own("forward", log_level=0).start(barrier=True)
        own("forward").stop()
    own("rest", log_level=2).start()
    own("rest").stop()
    tick = 1.0 + group.rank()
    assert own("forward").elapsed(reset=False) == 3 * tick
    text = own.get_all_timers_string(normalizer=3, reset=False)
    assert text.splitlines() == [
        "(min, max) time across ranks (ms):",
        f"    {'forward '.ljust(48, '.')}: (1000.00, 2000.00)",
    ]
    scalars = []
    own.write(["forward", "other"], SimpleNamespace(add_scalar=lambda *values: scalars.append(values)), 7, reset=False)
    own.write(["forward"], SimpleNamespace(log=lambda *values: scalars.append(values)), 7)
    assert scalars == [("forward-time", 6.0, 7), ({"forward-time": 6.0}, 7)]
    assert own.get_all_timers_string() is None
    assert own("forward").active_time() == 3 * tick
    every = timers.Timers(2, "all")
    every("step").start()
    assert every("step").elapsed() == tick
    assert every("step").elapsed() == tick
    every("step").set_elapsed(5.0 * group.rank())
    every("step").stop()
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.extend(record.getMessage().splitlines())
    monkeypatch.setattr(timers.logger, "handlers", [handler])
    monkeypatch.setattr(timers.logger, "level", logging.INFO)
    every.log(["step"])
    if group.rank() == 0:
        assert lines == []
    else:
        assert lines == ["times across ranks (ms):", "  step:", "     rank  0: 1000.00", "     rank  1: 7000.00"]


def test_timers_are_used_in_turn():
    own = timers.Timers(0, "max")
    for act, message in (
        (lambda: timers.Timers(0, "min"), "log_option is 'min'; it must be 'max', 'minmax' or 'all'"),
        (lambda: own("a", 0).stop(), "timer 'a' is not started"),
        (lambda: own("a", 1), "timer 'a' has log_level 0, and now 1"),
        (lambda: own("b", 3), "log_level of timer 'b' is 3; it must be at most 2"),
        (lambda: own("b").elapsed(), "log_level is above that of Timers"),
        (lambda: own.get_all_timers_string([], normalizer=0.0), "normalizer must be above 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            act()
    own("a").start()
    with pytest.raises(ConfigError, match="timer 'a' has been started already"):
        own("a").start()
