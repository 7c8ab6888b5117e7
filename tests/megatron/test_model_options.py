"""Options of Megatron's models that change nothing here, or go by another name: what a model does with them."""

import types

import pytest
import torch
from harness.parity import assert_bit_equal, assert_close_to

from shardwise import parallel_state
from shardwise.core.errors import ConfigError
from shardwise.megatron.absent import say_once
from shardwise.megatron.config import ModelParallelConfig, TransformerConfig
from shardwise.megatron.models.bert import BertModel
from shardwise.megatron.models.embedding import LanguageModelEmbedding
from shardwise.megatron.models.gpt import GPTModel
from shardwise.models.generation import PreallocatedCache
from shardwise.models.transformer.layer import TransformerLayerSpec
from shardwise.tensor_parallel import (
    ColumnParallelLinear,
    InferenceColumnParallelLinear,
    InferenceLayerNormColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from shardwise.tensor_parallel.layers import (
    linear_with_frozen_weight,
    linear_with_grad_accumulation_and_async_allreduce,
)
from shardwise.tensor_parallel.random import CheckpointWithoutOutput

V, S = 23, 8


def config_of(**settings):
    sizes = {"num_layers": 2, "hidden_size": 12, "num_attention_heads": 2}
    return TransformerConfig(**sizes, params_dtype=torch.float64, hidden_dropout=0.0, attention_dropout=0.0, **settings)


def gpt(config, **options):
    torch.manual_seed(3)
    return GPTModel(config, TransformerLayerSpec(), V, S, **options)


@pytest.mark.ranks(2)
def test_the_loss_is_the_same_in_every_implementation_of_it(group):
    parallel_state.initialize_model_parallel(2)
    say_once.cache_clear()
    ids = torch.randint(V, (3, S))
    expected = gpt(config_of())(ids, labels=ids)
    with pytest.warns(UserWarning, match="cross_entropy_fusion_impl='te' changes nothing here: Transformer Engine"):
        config = config_of(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te")
    assert_bit_equal(gpt(config)(ids, labels=ids), expected)
    with pytest.warns(UserWarning, match="fp16_lm_cross_entropy changes nothing here: the loss is in fp32 or wider"):
        model = gpt(config_of(), fp16_lm_cross_entropy=True)
    assert_bit_equal(model(ids, labels=ids), expected)
    # The program weighs the loss of each token itself.
    assert_bit_equal(model(ids, labels=ids, loss_mask=torch.zeros(3, S)), expected)


@pytest.mark.ranks(2)
def test_a_layer_must_be_said_what_it_is_made_of(group):
    parallel_state.initialize_model_parallel(2)
    with pytest.raises(ConfigError, match="transformer_layer_spec is None; give one, such as"):
        GPTModel(config_of(), None, V, S)
    with pytest.raises(ConfigError, match="transformer_layer_spec is None"):
        BertModel(config_of(), 2, None, V, S)


@pytest.mark.ranks(2)
def test_an_inference_context_goes_on_from_what_was_read(group):
    parallel_state.initialize_model_parallel(2)
    model = gpt(config_of(), position_embedding_type="rope").eval()
    ids = torch.randint(V, (3, S))
    with torch.no_grad():
        whole = model(ids)
        context = PreallocatedCache.for_model(model, batch_size=3, capacity=S)
        positions = torch.arange(S)
        parts = [
            model(ids[:, start:stop], positions[start:stop], inference_context=context)
            for start, stop in ((0, 3), (3, 4), (4, S))
        ]
    assert_close_to(torch.cat(parts, dim=1), whole, rtol_of_norm=1e-12)
    assert context.length == S
    with pytest.raises(ConfigError, match=r"inference_context is of int; give a key-value cache such as"):
        model(ids, inference_context=3)
    with pytest.raises(ConfigError, match="inference_context is of PreallocatedCache beside a cache"):
        model(ids, inference_context=context, cache=context)


@pytest.mark.ranks(2)
def test_attributes_that_programs_read(group):
    parallel_state.initialize_model_parallel(2)
    model = gpt(config_of())
    assert (model.vp_size, model.cp_group) == (None, parallel_state.get_context_parallel_group())
    embedding = LanguageModelEmbedding(config_of(), V, S, num_tokentypes=2)
    embedding.zero_parameters()
    assert len(list(embedding.parameters())) == 3
    for param in embedding.parameters():
        assert param.shared
        assert not param.any()
    run = CheckpointWithoutOutput()
    states = ("fwd_cpu_rng_state", "fwd_cuda_rng_state", "fwd_cuda_rng_state_tracker")
    assert [getattr(run, name) for name in ("run_function", *states)] == [None] * 4
    x = torch.randn(3, requires_grad=True)
    hidden = run.checkpoint(torch.sin, x)
    assert run.run_function is torch.sin
    assert all(getattr(run, name) is state for name, state in zip(states, run.rng_states, strict=True))
    y = hidden * 2
    run.discard_output_and_register_recompute(y)
    y.sum().backward()
    assert [getattr(run, name) for name in ("run_function", *states)] == [None] * 4


@pytest.mark.ranks(2)
def test_layers_of_a_program_s_own_config_and_their_group(group):
    """The config has only the fields that Megatron's layers read."""
    parallel_state.initialize_model_parallel(2)
    fields = {"use_cpu_initialization": True, "perform_initialization": True, "params_dtype": torch.float32}
    fields |= dict.fromkeys(("deterministic_mode", "sequence_parallel", "gradient_accumulation_fusion"), False)
    fields |= {"defer_embedding_wgrad_compute": False, "wgrad_deferral_limit": 0, "expert_model_parallel_size": 1}
    own, whole = types.SimpleNamespace(**fields), ModelParallelConfig(use_cpu_initialization=True)
    others = (
        torch.distributed.new_group([0, 1]),
        torch.distributed.new_group([group.rank()], use_local_synchronization=True),
    )
    for kind, options in (
        (ColumnParallelLinear, {"bias": True}),
        (RowParallelLinear, {"bias": True, "input_is_parallel": False, "skip_bias_add": False}),
        (VocabParallelEmbedding, {}),
    ):
        layers = []
        for config in (own, whole):
            torch.manual_seed(3)
            layers.append(kind(4, 8, config=config, init_method=torch.nn.init.normal_, **options))
        assert layers[0].config is own
        x = torch.arange(4) if kind is VocabParallelEmbedding else torch.randn(3, 1, 4)
        found, expected = (layer(x) for layer in layers)
        same, alone = others
        layers[0].tp_group = same
        again = layers[0](x)
        for output in (found, again):
            assert_bit_equal(*(each if kind is VocabParallelEmbedding else each[0] for each in (output, expected)))
        with pytest.raises(
            ConfigError, match=f"this rank is 0 of 1, and the layer has the part of rank {group.rank()} of 2"
        ):
            layers[0].tp_group = alone
        assert layers[0].tp_group is same
    for each in others:
        torch.distributed.destroy_process_group(each)


@pytest.mark.ranks(1)
def test_the_first_argument_of_an_inference_layer_is_x(group):
    parallel_state.initialize_model_parallel()
    flags = {"gather_output": False, "bias": False, "skip_bias_add": False, "is_expert": False}
    for kind in (InferenceColumnParallelLinear, InferenceLayerNormColumnParallelLinear):
        layer = kind(12, 6, config=config_of(), init_method=torch.nn.init.normal_, **flags)
        x = torch.randn(3, 1, 12, dtype=torch.float64)
        assert_bit_equal(layer(x=x)[0], layer(x)[0])


def test_the_warning_of_a_deprecated_argument_is_shown():
    arguments = (torch.ones(1, 4), torch.ones(2, 4), None, False, False, False)
    with pytest.warns(UserWarning, match="async_grad_allreduce is deprecated"):
        linear_with_frozen_weight(*arguments, None, None, None, True)
    with pytest.warns(UserWarning, match="async_grad_allreduce is deprecated"):
        linear_with_grad_accumulation_and_async_allreduce(*arguments, None, 0, True)


@pytest.mark.ranks(2)
def test_what_a_program_saves_and_marks(group):
    parallel_state.initialize_model_parallel(2)

    class Theirs(GPTModel):
        def state_dict(self, *args, **kwargs):
            return super().state_dict(*args, **kwargs) | {"more": torch.ones(1)}

    model = Theirs(config_of(), TransformerLayerSpec(), V, S)
    model.decoder.is_first_microbatch = False
    saved = model.state_dict_for_save_checkpoint(prefix="model.", keep_vars=True)
    assert saved["model.output_layer.weight"] is model.output_layer.weight
    assert saved.keys() == model.state_dict(prefix="model.").keys() >= {"more"}
    # It is for caches of fp8 weights, and there are none.
    model.set_is_first_microbatch()
    assert model.decoder.is_first_microbatch is False
