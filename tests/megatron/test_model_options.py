"""Options of Megatron's models that change nothing here, or go by another name: what a model does with them."""

import pytest
import torch
from harness.parity import assert_bit_equal, assert_close_to

from shardwise import parallel_state
from shardwise.core.errors import ConfigError
from shardwise.megatron.absent import say_once
from shardwise.megatron.config import TransformerConfig
from shardwise.megatron.models.bert import BertModel
from shardwise.megatron.models.gpt import GPTModel
from shardwise.models.generation import PreallocatedCache
from shardwise.models.transformer.layer import TransformerLayerSpec

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
