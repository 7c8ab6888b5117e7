"""Names that programs import and that stand for what the engine has: their results, not only their presence."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from harness.parity import assert_bit_equal, assert_close_to

import shardwise.megatron
from shardwise import parallel_state, tensor_parallel
from shardwise.core.errors import CheckpointError, ConfigError, ContradictionError
from shardwise.megatron import dist_checkpointing, rotary_pos_embedding, utils
from shardwise.megatron.config import TransformerConfig
from shardwise.megatron.core import extensions, functions, inference, services
from shardwise.megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from shardwise.megatron.core.pipeline_parallel import stages
from shardwise.megatron.core.transformer.transformer_block import TransformerBlock, get_num_layers_to_build
from shardwise.megatron.layer_parts import DotProductAttention, L2Norm, MLPSubmodules, SelfAttentionSubmodules
from shardwise.megatron.layer_specs import (
    bert_layer_local_spec,
    get_bert_layer_with_transformer_engine_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_layer_local_spec,
    get_gpt_layer_local_submodules,
    get_gpt_mtp_block_spec,
)
from shardwise.megatron.models.bert import BertModel
from shardwise.megatron.models.gpt import GPTModel
from shardwise.megatron.rotary_pos_embedding import RotaryEmbedding, apply_rotary_pos_emb
from shardwise.megatron.schedules import forward_backward_no_pipelining, get_forward_backward_func
from shardwise.megatron.spec_utils import IdentityOp, ModuleSpec
from shardwise.megatron.transformer_layer import TransformerBlockSubmodules
from shardwise.models.transformer.masks import AttnMaskType


def config(**options):
    sizes = {"num_layers": 2, "hidden_size": 24, "num_attention_heads": 6, "num_query_groups": 3}
    return TransformerConfig(**sizes | {"use_cpu_initialization": True, "hidden_dropout": 0.0} | options)


def made(spec, **options):
    torch.manual_seed(3)
    return GPTModel(config(attention_dropout=0.0, params_dtype=torch.float64, **options), spec, 32, 16)


@pytest.mark.ranks(2)
def test_a_spec_of_transformer_engine_s_names_is_the_local_one(group):
    parallel_state.initialize_model_parallel(2)
    local = get_gpt_layer_local_spec()
    parts = get_gpt_layer_local_submodules()
    fused = extensions.TELayerNormColumnParallelLinear
    attention = SelfAttentionSubmodules(
        fused, extensions.TEDotProductAttention, extensions.TERowParallelLinear, None, None
    )
    parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
    parts.self_attention = ModuleSpec(parts.self_attention.module, parts.self_attention.params, attention)
    parts.mlp = ModuleSpec(parts.mlp.module, submodules=MLPSubmodules(fused, extensions.TERowParallelLinear))
    spec = ModuleSpec(local.module, submodules=parts)
    block = TransformerBlockSubmodules([spec, spec], extensions.TENorm)
    ids, positions = torch.arange(10).view(1, 10), torch.arange(10).view(1, 10)
    specs = (local, spec, block, ModuleSpec(TransformerBlock, {}, block))
    results = [made(each)(ids, positions, None) for each in specs]
    for result in results[1:]:
        assert_bit_equal(result, results[0])
    parts.input_layernorm = extensions.TENorm
    with pytest.raises(ConfigError, match="linear_qkv has a norm already"):
        made(spec)
    with pytest.raises(ConfigError, match="layer_specs of a TransformerBlockSubmodules differ"):
        made(TransformerBlockSubmodules([local, spec]))


@pytest.mark.ranks(2)
def test_attention_alone_is_the_dense_one_on_this_rank_s_heads(group):
    parallel_state.initialize_model_parallel(2)
    torch.manual_seed(5)
    query, key, value = (torch.randn(7, 2, heads, 4, dtype=torch.float64) for heads in (6, 3, 3))
    dense = [part.clone().requires_grad_() for part in (query, key, value)]
    arranged = [part.permute(1, 2, 0, 3) for part in dense]
    output = F.scaled_dot_product_attention(*arranged, is_causal=True, enable_gqa=True, scale=0.3)
    output.square().sum().backward()
    own_values = {"attention_dropout": 0.0, "softmax_scale": 0.3}
    attention = DotProductAttention(config(attention_dropout=0.9), 1, AttnMaskType.causal, "self", **own_values)
    # Ranks hold whole groups: two of three, and one.
    groups = slice(0, 2) if group.rank() == 0 else slice(2, 3)
    heads = slice(2 * groups.start, 2 * groups.stop)
    cuts = heads, groups, groups
    own = [part[:, :, cut].clone().requires_grad_() for part, cut in zip((query, key, value), cuts, strict=True)]
    context = attention(*own, None)
    context.square().sum().backward()
    assert_close_to(context, output.permute(2, 0, 1, 3)[:, :, heads].flatten(2), rtol_of_norm=1e-12)
    for mine, whole, cut in zip(own, dense, cuts, strict=True):
        assert_close_to(mine.grad, whole.grad[:, :, cut], rtol_of_norm=1e-11)
    with pytest.raises(ConfigError, match="give it there"):
        attention(*own, None, attn_mask_type=AttnMaskType.padding)
    with pytest.raises(ConfigError, match="'cross'"):
        DotProductAttention(config(), 1, AttnMaskType.causal, "cross")


def test_activations_are_their_formulas():
    x, bias = torch.randn(5, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    a, b = (x + bias).chunk(2, -1)
    tanh = 0.5 * a * (1 + torch.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)))
    for found, expected in (
        (functions.squared_relu(x), x.clamp(min=0) ** 2),
        (functions.quick_gelu(x), x / (1 + torch.exp(-1.702 * x))),
        (functions.bias_swiglu_impl(x, bias), a / (1 + torch.exp(-a)) * b),
        (functions.bias_swiglu(x, bias), functions.swiglu(x + bias)),
        (functions.bias_geglu_impl(x, bias), tanh * b),
        (functions.bias_geglu(bias, x), tanh * b),
        (functions.bias_gelu_impl(x, bias).chunk(2, -1)[0], tanh),
        (functions.bias_gelu(bias, x), functions.fast_gelu(x + bias)),
        (functions.quick_geglu(x, 1.0), functions.quick_gelu(x[:, :4]) * (x[:, 4:] + 1)),
        (L2Norm(8)(x), x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()),
    ):
        assert_close_to(found, expected, rtol_of_norm=1e-6)
    weights = torch.rand(5, 1)
    weighted = functions.weighted_bias_swiglu_impl(x.view(1, 5, 8), None, weights)
    assert_close_to(weighted, (functions.swiglu(x) * weights).view(1, 5, 4), rtol_of_norm=1e-12)
    with pytest.raises(ConfigError, match="got a bias"):
        functions.weighted_bias_swiglu_impl(x, bias, weights)
    with pytest.raises(ConfigError, match="fp8_input_store is True"):
        functions.bias_swiglu_impl(x, bias, True)
    assert functions.jit_fuser(functions.swiglu) is functions.swiglu


@pytest.mark.ranks(2)
def test_a_recomputed_function_and_a_split(group):
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    for distributes in (False, True):
        extensions.te_checkpoint(torch.sin, distributes, None, group, x).sum().backward()
        assert_close_to(x.grad, x.detach().cos(), rtol_of_norm=1e-15)
        x.grad = None
    assert [part.shape[-1] for part in extensions.SplitAlongDim(x, 1, [1, 2, 3])] == [1, 2, 3]


def scheduler(style, **options):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "max_lr": 2.0, "wd_mult": 0.0})
    rates = {"init_lr": 0.1, "max_lr": 1.0, "min_lr": 0.2, "lr_warmup_steps": 4, "lr_decay_steps": 12}
    weights = {"start_wd": 0.0, "end_wd": 0.4, "wd_incr_steps": 10, "wd_incr_style": "linear"}
    return OptimizerParamScheduler(optimizer, lr_decay_style=style, **rates | weights | options), optimizer


@pytest.mark.parametrize(
    ("style", "options", "expected"),
    [
        ("constant", {}, [0.1, 0.55, 1.0, 1.0, 1.0, 1.0]),
        ("linear", {}, [0.1, 0.55, 1.0, 0.6, 0.2, 0.2]),
        ("cosine", {}, [0.1, 0.55, 1.0, 0.6, 0.2, 0.2]),
        ("inverse-square-root", {}, [0.1, 0.55, 1.0, (4 / 8) ** 0.5, (4 / 12) ** 0.5, 0.2]),
        ("WSD", {"wsd_decay_steps": 4, "lr_wsd_decay_style": "linear"}, [0.1, 0.55, 1.0, 1.0, 0.2, 0.2]),
    ],
)
def test_rates_of_a_schedule(style, options, expected):
    schedule, optimizer = scheduler(style, **options)
    found = []
    for step in (0, 2, 2, 4, 4, 1):
        schedule.step(step)
        found.append(optimizer.param_groups[0]["lr"])
    assert found == pytest.approx(expected)
    assert schedule.get_wd() == 0.4
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.4, 0.0]


def test_a_schedule_goes_on_and_refuses_what_contradicts():
    schedule, _ = scheduler("linear")
    schedule.step(7)
    other, optimizer = scheduler("linear", max_lr=0.5)
    # Megatron would count the steps twice.
    for _ in range(2):
        other.load_state_dict(schedule.state_dict())
    assert (other.num_steps, other.max_lr) == (7, 1.0)
    assert optimizer.param_groups[1]["lr"] == pytest.approx(0.2 + 1.8 * 5 / 8)
    strict, _ = scheduler("linear", max_lr=0.5, use_checkpoint_opt_param_scheduler=False)
    with pytest.raises(AssertionError, match=r"max_lr is 0\.5, and 1\.0 in the checkpoint"):
        strict.load_state_dict(schedule.state_dict())
    for wrong in ({"max_lr": 0.1}, {"lr_warmup_steps": 12}, {"wd_incr_style": "constant"}, {"start_wd": -1.0}):
        with pytest.raises(AssertionError, match="OptimizerParamScheduler needs"):
            scheduler("linear", **wrong)
    with pytest.raises(AssertionError, match="WSD with wsd_decay_steps"):
        scheduler("WSD")
    with pytest.raises(AssertionError, match="lr_decay_style 'square'"):
        scheduler("square")


@pytest.mark.ranks(3)
def test_stages_of_a_group(group):
    rank = group.rank()
    assert (stages.is_pp_first_stage(group), stages.is_pp_last_stage(group)) == (rank == 0, rank == 2)
    assert (stages.get_pp_first_rank(group), stages.get_pp_last_rank(group)) == (0, 2)
    assert stages.get_pp_prev_rank(group) == (None, 0, 1)[rank]
    assert stages.get_pp_next_rank(group) == (1, 2, None)[rank]
    assert (stages.is_vp_first_stage(1, 3), stages.is_vp_last_stage(2, 3), stages.is_vp_last_stage(None, 1)) == (
        False, True, True,
    )  # fmt: skip
    with pytest.raises(AssertionError, match="vp_stage is 1 and vp_size None"):
        stages.is_vp_first_stage(1, None)
    parallel_state.initialize_model_parallel(1)
    model = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, rank // 2)
    assert not utils.check_param_hashes_across_dp_replicas([model], cross_check=True)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.zeros_(model.bias)
    assert utils.check_param_hashes_across_dp_replicas([model], cross_check=True)


def test_layers_and_specs_of_a_stage():
    staged = config(num_layers=6, pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
    assert [get_num_layers_to_build(staged, pp_rank=stage) for stage in range(2)] == [3, 3]
    assert get_num_layers_to_build(config()) == 2
    assert len(get_gpt_decoder_layer_specs(config(), use_transformer_engine=False)) == 2
    assert get_gpt_mtp_block_spec(config(), get_gpt_layer_local_spec(), use_transformer_engine=True) is None


def test_small_functions(tmp_path):
    wrapped = utils.WrappedTensor(torch.ones(1))
    assert wrapped.unwrap() == 1
    with pytest.raises(ContradictionError, match="already been unwrapped"):
        wrapped.unwrap()
    with pytest.warns(UserWarning, match="is called inference_context"):
        assert utils.deprecate_inference_params(None, 3) == 3
    assert utils.deprecate_inference_params(4, 3) == 4
    old = utils.deprecated("1", alternative="g", reason="r")(lambda: 5)
    with pytest.warns(DeprecationWarning, match=r"is deprecated since version 1\. Use g instead\. Reason: r"):
        assert old() == 5
    assert utils.null_decorator(len) is len
    assert utils.null_decorator(a=1)(len) is len
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    assert utils.is_submodule(model[0], model)
    assert not utils.is_submodule(model, model)
    assert utils.is_submodule(model, model, strict=False)
    assert [utils.round_up_to_nearest_multiple(value, 8) for value in (0, 1, 8, 9)] == [0, 8, 8, 16]
    assert not utils.is_fa_min_version("2.0")
    assert utils.get_te_version() is None
    assert not services.MultiStorageClientFeature.is_enabled()
    with pytest.raises(ConfigError, match="multistorageclient"):
        services.MultiStorageClientFeature.import_package()
    settings = SimpleNamespace(config_logger_dir="")
    assert not services.has_config_logger_enabled(settings)
    settings.config_logger_dir = str(tmp_path)
    services.log_config_to_disk(settings, {"self": settings, "dtype": torch.float32}, rank_str="0")
    assert (tmp_path / "SimpleNamespace.rank_0.iter0.json").read_text() == '{"dtype": "torch.float32"}'
    context = inference.InferenceParams(2, 8)
    context.increment_sequence_len_offset(3)
    context.enable_decode_mode()
    assert (context.sequence_len_offset, context.is_decode_only(), context.is_dynamic_batching()) == (3, True, False)
    context.reset()
    assert (context.sequence_len_offset, context.decode_mode) == (0, False)


@pytest.mark.ranks(1)
def test_tensors_of_a_checkpoint_without_a_state(group, tmp_path):
    tensor = torch.arange(6.0).view(2, 3)
    shard = dist_checkpointing.ShardedTensor.from_rank_offsets("w", tensor)
    dist_checkpointing.save({"w": shard, "n": 3}, tmp_path, process_group=group)
    found = dist_checkpointing.load_plain_tensors(tmp_path)
    assert found.keys() == {"w"}
    assert_bit_equal(found["w"], tensor)
    assert dist_checkpointing.is_main_replica(0)
    assert not dist_checkpointing.is_main_replica((0, 1))
    with pytest.raises(ConfigError, match="adjust_tensor_shapes_fn"):
        forward_backward_no_pipelining(adjust_tensor_shapes_fn=print)
    assert get_forward_backward_func(1) is forward_backward_no_pipelining


def test_packages_have_the_names_that_their_modules_refuse():
    shardwise.megatron.install()
    try:
        core = sys.modules["megatron.core"]
        assert core.__version__ == "0.16.1"
        assert core.InferenceParams is inference.InferenceParams
        assert sys.modules["megatron.core.pipeline_parallel.schedules"].forward_step.__name__ == "forward_step"
        with pytest.raises(AttributeError, match="'NoSuchName'"):
            _ = core.NoSuchName
    finally:
        shardwise.megatron.uninstall()


@pytest.mark.ranks(2)
def test_names_in_a_checkpoint_get_other_prefixes(group):
    parallel_state.initialize_model_parallel(2)
    model = GPTModel(config(params_dtype=torch.float64), get_gpt_layer_local_spec(), 32, 16)
    state = {"model": model.sharded_state_dict("a.")}
    dist_checkpointing.replace_prefix_for_sharding(state, "a.", "b.")
    dist_checkpointing.apply_prefix_mapping(state, {"b.decoder.": "d.", "c.": "e."})
    dist_checkpointing.add_prefix_for_sharding(state, "all.")
    keys = {name: shard.key for name, shard in state["model"].items()}
    assert keys["a.embedding.word_embeddings.weight"] == "all.b.embedding.word_embeddings.weight"
    assert keys["a.decoder.final_layernorm.bias"] == "all.d.final_layernorm.bias"
    with pytest.raises(CheckpointError, match="does not begin with 'all\\.b'"):
        dist_checkpointing.replace_prefix_for_sharding(state, "all.b", "")
    assert state["model"]["a.embedding.word_embeddings.weight"].key == "all.b.embedding.word_embeddings.weight"


@pytest.mark.ranks(1)
def test_questions_of_older_programs(group):
    parallel_state.initialize_model_parallel()
    assert parallel_state.is_pipeline_stage_before_split()
    assert parallel_state.is_pipeline_stage_after_split(0)
    assert not parallel_state.is_inside_encoder()
    assert parallel_state.get_pipeline_model_parallel_split_rank() is None
    assert not services.is_experimental_enabled()
    services.set_experimental_flag(True)
    assert services.is_experimental_enabled()
    services.set_experimental_flag(False)
    first, number = torch.ones(2, requires_grad=True), 3
    (detached, same) = tensor_parallel.random.detach_variable((first * 2, number))
    assert detached.is_leaf
    assert detached.requires_grad
    assert same == 3
    angles = RotaryEmbedding(4, 1.0)(5)
    t = torch.randn(5, 2, 3, 4)
    rotated = rotary_pos_embedding._apply_rotary_pos_emb_bshd(t, angles, mscale=2.0)
    assert_close_to(rotated, 2 * apply_rotary_pos_emb(t, angles, config()), rtol_of_norm=1e-6)
    with pytest.raises(ConfigError, match="multi_latent_attention is True"):
        rotary_pos_embedding._apply_rotary_pos_emb_bshd(t, angles, False, True)


@pytest.mark.ranks(1)
def test_layers_of_bert_see_later_tokens(group):
    parallel_state.initialize_model_parallel()
    ids = torch.arange(8).view(1, 8)
    model = BertModel(config(attention_dropout=0.0), 0, bert_layer_local_spec, 32, 16)
    logits, other = (model(each, torch.ones(1, 8))[0] for each in (ids, ids.flip(1).roll(1, 1)))
    assert ids[0, 0] == ids.flip(1).roll(1, 1)[0, 0]
    assert not torch.equal(logits[:, 0], other[:, 0])
    fused = BertModel(config(attention_dropout=0.0), 0, get_bert_layer_with_transformer_engine_spec(), 32, 16)
    assert "encoder.layers.0.mlp.linear_fc1.layer_norm_weight" in fused.state_dict()
