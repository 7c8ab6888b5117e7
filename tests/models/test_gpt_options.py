"""GPT's options, each model of several, equal to the dense GPT that shares no code with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness.parity import assert_close_to
from models.dense_gpt import DenseGPT
from models.model_checks import assert_gradients_are, randomise_small_parameters, whole_logits, whole_weights
from torch.distributed import ProcessGroup

from shardwise.core.errors import ConfigError, ShardingError
from shardwise.megatron.config import TransformerConfig
from shardwise.megatron.models.gpt import GPTModel
from shardwise.megatron.process_groups_config import ProcessGroupCollection
from shardwise.models.transformer.layer import TransformerLayerSpec
from shardwise.models.transformer.rotary import RotaryScaling

V = 103


@dataclass(frozen=True)
class Options:
    """A model: fields of the config, arguments of the model, and what the oracle is told."""

    config: dict[str, Any]
    model: dict[str, Any]
    dense: dict[str, Any] = field(default_factory=dict)

    def make(self, group: ProcessGroup, **settings: Any) -> GPTModel:
        config = {
            "num_layers": 2,
            "num_attention_heads": 6,
            "kv_channels": 8,
            "hidden_size": 36,
            "ffn_hidden_size": 29,
            "params_dtype": torch.float64,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "init_method_std": 0.3,
            "tensor_model_parallel_size": group.size(),
        }
        return GPTModel(
            TransformerConfig(**(config | self.config | settings)),
            TransformerLayerSpec(),
            V,
            16,
            pg_collection=ProcessGroupCollection(tp=group),
            **self.model,
        )

    def oracle(self, model: GPTModel) -> DenseGPT:
        config = model.config
        return DenseGPT(
            config.num_layers,
            *config.heads,
            rms_norm=config.normalization == "RMSNorm",
            gated=config.gated_linear_unit,
            rope=model.rotary is not None,
            tied=model.share_embeddings_and_output_weights,
            **self.dense,
        )


LLAMA = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False}
OPTIONS = {
    "bloom": Options(
        {"num_attention_heads": 7, "embedding_layernorm": True},
        {"position_embedding_type": "alibi", "share_embeddings_and_output_weights": True},
        {"alibi": True},
    ),
    # Frequencies on each side of the blend and in it.
    "llama3-scaled": Options(
        LLAMA | {"num_query_groups": 2, "add_qkv_bias": True},
        {
            "position_embedding_type": "rope",
            "rope_scaling": RotaryScaling(
                "llama3", 8.0, original_max_position_embeddings=64, low_freq_factor=0.05, high_freq_factor=4.0
            ),
        },
        {"llama3": (8.0, 0.05, 4.0, 64)},
    ),
    "no-positions-no-final-norm": Options(
        {"final_layernorm": False, "num_query_groups": 1},
        {"position_embedding_type": "none", "share_embeddings_and_output_weights": True},
    ),
}


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize(
    "options",
    [pytest.param(OPTIONS[name], id=name, marks=[] if name == "bloom" else [pytest.mark.slow]) for name in OPTIONS],
)
def test_logits_loss_and_gradients_are_the_dense_ones(group, options):
    for sequence_parallel in {False, group.size() > 1}:
        torch.manual_seed(3)
        model = options.make(group, sequence_parallel=sequence_parallel)
        randomise_small_parameters(model, group)
        names = dict(model.named_parameters())
        assert ("embedding.layernorm.weight" in names) == model.config.embedding_layernorm
        assert ("decoder.final_layernorm.weight" in names) == model.config.final_layernorm
        assert "embedding.position_embeddings.weight" not in names
        weights, dense = whole_weights(model, group), options.oracle(model)
        ids, labels = torch.randint(V, (3, 13)), torch.randint(V, (3, 13))
        labels[0, 2] = -100
        expected_loss = dense.loss(weights, ids, labels)
        weighting = torch.rand(3, 13, dtype=torch.float64)
        (expected_loss * weighting).sum().backward()

        logits = whole_logits(model(ids), group)
        loss = model(ids, labels=labels)
        (loss * weighting).sum().backward()
        assert_close_to(logits, dense.logits(weights, ids).detach(), rtol_of_norm=1e-12, name="logits")
        assert_close_to(loss.detach(), expected_loss.detach(), rtol_of_norm=1e-12, name="loss")
        assert_gradients_are(weights, model, group, rtol=1e-11)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", ["bloom", "llama3-scaled"])
def test_texts_packed_into_a_row_do_not_see_each_other(group, name):
    model = OPTIONS[name].make(group)
    first, second = torch.randint(V, (2, 5)), torch.randint(V, (2, 8))
    packed = torch.cat([first, second], dim=1)
    document_ids = torch.tensor([3] * 5 + [1] * 8).expand(2, -1)
    positions = torch.cat([torch.arange(5), torch.arange(8)])
    logits = model(packed, positions, document_ids=document_ids)
    assert_close_to(logits[:, :5], model(first), rtol_of_norm=1e-12)
    assert_close_to(logits[:, 5:], model(second), rtol_of_norm=1e-12)
    assert not torch.allclose(model(packed, positions)[:, 5:], model(second))


def of_length(kind):
    """A model whose rotary frequencies change beyond 5 tokens."""
    lists = {"short_factor": (1.0, 1.5, 2.0, 2.5), "long_factor": (2.0, 3.0, 5.0, 7.0)} if kind == "longrope" else {}
    return Options(LLAMA, {"position_embedding_type": "rope", "rope_scaling": RotaryScaling(kind, 4.0, 5, **lists)})


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_texts_are_rotated_as_if_they_were_alone(group, kind):
    """In rows of their own, filled up, and packed into one: logits, losses and gradients."""
    model = of_length(kind).make(group)
    texts = [torch.randint(V, (length,)) for length in (5, 7, 4)]
    labels = [torch.randint(V, text.shape) for text in texts]

    def gradients_of(losses):
        losses.sum().backward()
        found = {name: param.grad for name, param in model.named_parameters()}
        model.zero_grad()
        return found

    alone = torch.cat([model(text[None], labels=label[None])[0] for text, label in zip(texts, labels, strict=True)])
    expected = alone.detach(), gradients_of(alone)
    logits = torch.cat([model(text[None])[0] for text in texts])

    lengths = torch.tensor([len(text) for text in texts])
    filled, filled_labels = (
        torch.nn.utils.rnn.pad_sequence(each, batch_first=True, padding_value=3) for each in (texts, labels)
    )
    is_token = torch.arange(7) < lengths[:, None]
    packed, packed_labels = torch.cat(texts)[None], torch.cat(labels)[None]
    document_ids = torch.repeat_interleave(torch.tensor([4, 1, -1]), lengths)[None]
    positions = torch.cat([torch.arange(len(text)) for text in texts])[None]
    packing = {"position_ids": positions, "document_ids": document_ids}

    assert_close_to(model(filled, lengths=lengths)[is_token], logits, rtol_of_norm=1e-12)
    assert_close_to(model(packed, **packing)[0], logits, rtol_of_norm=1e-12)
    for losses in (
        model(filled, labels=filled_labels, lengths=lengths)[is_token],
        model(packed, labels=packed_labels, **packing)[0],
    ):
        assert_close_to(losses.detach(), expected[0], rtol_of_norm=1e-12)
        for name, grad in gradients_of(losses).items():
            assert_close_to(grad, expected[1][name], rtol_of_norm=1e-11, name=name)
    # A batch of which nothing is said is all of one length, as in transformers.
    assert not torch.allclose(model(filled)[0, :5], logits[:5])
    with pytest.raises(ShardingError, match=r"document_ids have shape \[1, 15\]"):
        model(packed, positions, document_ids=document_ids[:, 1:])
    with pytest.raises(ShardingError, match=r"lengths have shape \[2\]; they must be \[3\], one for each row"):
        model(filled, lengths=lengths[:2])


@pytest.mark.ranks(1)
def test_models_that_cannot_be_are_refused(group):
    rope = OPTIONS["llama3-scaled"]
    with pytest.raises(ConfigError, match=r"context_parallel_size of the config is 2, and the .* group has 1 ranks"):
        rope.make(group, context_parallel_size=2)
    for kind in ("learned_absolute", "alibi"):
        with pytest.raises(ConfigError, match=f"rope_scaling is given, and position_embedding_type is '{kind}'"):
            Options(rope.config, rope.model | {"position_embedding_type": kind}).make(group)
    with pytest.raises(ConfigError, match="position_embedding_type is 'rotary'; it must be one of learned_absolute, "):
        Options({}, {"position_embedding_type": "rotary"}).make(group)
    with pytest.raises(ConfigError, match=r"attention_sinks is True, which .* attention_backend 'unfused' asks"):
        OPTIONS["bloom"].make(group, attention_backend="unfused", attention_sinks=True)
    with pytest.raises(ConfigError, match="attention_backend 'flash' does not work on cpu"):
        OPTIONS["bloom"].make(group, attention_backend="flash", attention_dropout=0.1)
    model = Options({}, {}).make(group)
    with pytest.raises(ShardingError, match="tokentype_ids are given, but the model has no token types"):
        model.embedding(torch.zeros(1, 3, dtype=torch.int64), tokentype_ids=torch.zeros(1, 3, dtype=torch.int64))
