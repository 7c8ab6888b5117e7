"""BERT at any tensor-parallel size equals a dense BERT that shares no code with it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from harness.model_options import NO_DROPOUT
from harness.parity import assert_bit_equal, assert_close_to, assert_unmodified
from models.dense_bert import DenseBert, masked_loss
from models.model_checks import assert_gradients_are, randomise_small_parameters, whole_logits, whole_weights
from torch.distributed import ProcessGroup

from shardwise.core.errors import ConfigError, ShardingError, VocabularyError
from shardwise.megatron.config import TransformerConfig
from shardwise.megatron.models.bert import BertModel
from shardwise.megatron.process_groups_config import ProcessGroupCollection
from shardwise.models.transformer.attention import SelfAttention
from shardwise.models.transformer.layer import TransformerLayerSpec
from shardwise.models.transformer.masks import AttnMaskType

V, B, S = 103, 3, 13
# BERT's own, as in Hugging Face, and Megatron's.
POST_NORM = {"norm_position": "post", "embedding_layernorm": True, "final_layernorm": False}
KINDS = {"post-norm": POST_NORM, "pre-norm": {}}


def bert(group: ProcessGroup, model: dict[str, Any] | None = None, **settings: Any) -> BertModel:
    config = TransformerConfig(
        num_layers=2,
        num_attention_heads=7,
        hidden_size=28,
        ffn_hidden_size=29,
        params_dtype=torch.float64,
        **NO_DROPOUT,
        init_method_std=0.3,
        tensor_model_parallel_size=group.size(),
        **settings,
    )
    return BertModel(
        config,
        2,
        TransformerLayerSpec(),
        V,
        16,
        pg_collection=ProcessGroupCollection(tp=group),
        **{"share_embeddings_and_output_weights": True} | (model or {}),
    )


def batch() -> tuple[torch.Tensor, ...]:
    """Ids, mask, token types and labels: the second text is padded, the masked tokens are few."""
    ids = torch.randint(V, (B, S))
    real = torch.ones(B, S, dtype=torch.int64)
    real[1, 8:] = 0
    kinds = (torch.arange(S) >= 6).long().expand(B, -1).contiguous()
    labels = torch.where(torch.rand(B, S) < 0.4, ids, -100)
    return ids, real, kinds, labels


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("loss_kind", [pytest.param("plain", marks=pytest.mark.slow), "linear_fused"])
def test_logits_loss_and_gradients_are_the_dense_ones(group, kind, loss_kind):
    tied = loss_kind == "plain"
    fused = {} if tied else {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}
    for sequence_parallel in {False, group.size() > 1}:
        torch.manual_seed(3)
        model = bert(
            group, {"share_embeddings_and_output_weights": tied}, sequence_parallel=sequence_parallel, **kind, **fused
        )
        assert model.fuses_output_layer_and_loss == (not tied)
        randomise_small_parameters(model, group)
        weights = whole_weights(model, group)
        post = kind == POST_NORM
        assert ("encoder.layers.0.post_mlp_layernorm.weight" in weights) == post
        assert ("encoder.final_layernorm.weight" in weights) == (not post)
        assert ("output_layer.weight" in weights) == (not tied)
        ids, real, kinds, labels = batch()
        logits, choice = DenseBert(2, 7, 4)(weights, ids, real, kinds)
        expected_loss = masked_loss(logits, labels)
        weighting, mixing = torch.rand(B, S, dtype=torch.float64), torch.randn(B, 2, dtype=torch.float64)
        ((expected_loss * weighting).sum() + (choice * mixing).sum()).backward()

        with assert_unmodified(ids=ids, real=real, kinds=kinds, labels=labels):
            ours, our_choice = model(ids, real, kinds)
            loss, _ = model(ids, real, kinds, lm_labels=labels)
            ((loss * weighting).sum() + (our_choice * mixing).sum()).backward()
        assert (loss[labels == -100] == 0).all()
        assert_close_to(whole_logits(ours, group), logits.detach(), rtol_of_norm=1e-12, name="logits")
        assert_close_to(our_choice.detach(), choice.detach(), rtol_of_norm=1e-12, name="binary logits")
        assert_close_to(loss.detach(), expected_loss.detach(), rtol_of_norm=1e-12, name="loss")
        assert_gradients_are(weights, model, group, rtol=1e-11)


@pytest.mark.ranks(1, 2)
def test_what_is_left_out(group):
    """No mask is a mask of ones, no token types are zeros, and no binary head is None."""
    model = bert(group, **POST_NORM)
    ids, real, kinds, _ = batch()
    logits, choice = model(ids, None)
    with_all = model(ids, torch.ones_like(real), torch.zeros_like(kinds))
    assert_close_to(logits, with_all[0], rtol_of_norm=1e-13)
    assert_close_to(choice, with_all[1], rtol_of_norm=1e-13)
    torch.manual_seed(3)
    headless = bert(group, {"add_binary_head": False, "parallel_output": False}, **POST_NORM)
    logits, choice = headless(ids, real)
    assert choice is None
    assert logits.shape == (B, S, V)
    assert not [name for name, _ in headless.named_parameters() if "pooler" in name or "binary" in name]
    # What a token sees is padding's place, and nothing after it.
    changed = ids.clone()
    changed[1, 8:] = 0
    assert_close_to(headless(changed, real)[0][:, :8], logits[:, :8], rtol_of_norm=1e-13)
    changed[0, S - 1] = (ids[0, S - 1] + 1) % V
    assert not torch.allclose(headless(changed, real)[0][0, 0], logits[0, 0])


@pytest.mark.ranks(2, 3, slow=(3,))
def test_a_sequence_of_fewer_tokens_than_ranks(group):
    """The first token is on the first rank; the others have none of their own."""
    torch.manual_seed(3)
    model = bert(group, sequence_parallel=True, **POST_NORM)
    torch.manual_seed(3)
    whole = bert(group, **POST_NORM)
    for s in (1, 2):
        ids = torch.randint(V, (B, s))
        for split, expected in zip(model(ids, None), whole(ids, None), strict=True):
            assert_close_to(split, expected, rtol_of_norm=1e-12)


@pytest.mark.ranks(1)
def test_an_attention_that_says_what_it_forbids_is_left_as_it_is(group):
    model = bert(group)
    assert model.encoder.layers[0].self_attention.attn_mask_type is AttnMaskType.padding
    spec = TransformerLayerSpec(attention=partial(SelfAttention, attn_mask_type=AttnMaskType.causal))
    causal = BertModel(model.config, 0, spec, V, 16, pg_collection=ProcessGroupCollection(tp=group))
    ids = torch.randint(V, (1, S))
    changed = ids.clone()
    changed[0, -1] = (ids[0, -1] + 1) % V
    assert_bit_equal(causal(changed, None)[0][:, :-1], causal(ids, None)[0][:, :-1])


@pytest.mark.ranks(2)
def test_impossible_inputs_are_refused_on_every_rank(group):
    model = bert(group)
    ids = torch.zeros(2, 5, dtype=torch.int64)
    with pytest.raises(ShardingError, match=r"the attention mask has shape \[2, 1, 5, 5\]; it must be \[2, 5\], 1 for"):
        model(ids, torch.ones(2, 1, 5, 5))
    with pytest.raises(VocabularyError, match="token type 2 at position"):
        model(ids, None, ids + 2)
    with pytest.raises(VocabularyError, match="position 16 at position"):
        model(ids, None, position_ids=torch.arange(12, 17))
    with pytest.raises(ConfigError, match="num_tokentypes is -1"):
        BertModel(model.config, -1, TransformerLayerSpec(), V, 16, pg_collection=model.pg_collection)
    with pytest.raises(ConfigError, match="attention_backend 'fused' does not work on cpu"):
        bert(group, attention_backend="fused")
