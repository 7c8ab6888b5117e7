"""The output layer computes logits of the tokens alone whose loss counts, and nothing else changes by that."""

from __future__ import annotations

import pytest
import torch
from harness.model_options import NO_DROPOUT
from harness.parity import assert_close_to
from models.model_checks import randomise_small_parameters

from shardwise.core.errors import VocabularyError
from shardwise.core.topology import Groups
from shardwise.models import transformer_model
from shardwise.models.config import ModelConfig
from shardwise.models.gpt import GPT

VOCAB = 101


def make_model(group, *, fused, tied):
    torch.manual_seed(3)
    config = ModelConfig(
        num_layers=1,
        hidden_size=24,
        num_attention_heads=6,
        **NO_DROPOUT,
        params_dtype=torch.float64,
        fuse_output_layer_and_loss=fused,
    )
    model = GPT(config, VOCAB, 16, share_embeddings_and_output_weights=tied, groups=Groups(tp=group))
    randomise_small_parameters(model, group)
    return model


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_masked_tokens_cost_no_logits(group, fused, tied, monkeypatch):
    model = make_model(group, fused=fused, tied=tied)
    tokens = torch.randint(VOCAB, (2, 13))
    some, none = tokens.clone(), torch.full_like(tokens, -100)
    some[0, :9] = some[1, 5:] = -100
    rows = []
    name, index = ("loss_of_hidden", 1) if fused else ("loss_of_logits", 0)
    usual = getattr(model, name)
    monkeypatch.setattr(model, name, lambda *args, **more: rows.append(args[index].numel()) or usual(*args, **more))

    def losses_and_gradients(labels):
        model.zero_grad()
        loss = model(tokens, labels=labels)
        (loss * torch.arange(1, 27).view(2, 13)).sum().backward()
        return [loss.detach(), *(param.grad for param in model.parameters())]

    cases = {"some": (some, 9), "none": (none, 1), "most": (tokens, 26)}
    actual = {case: losses_and_gradients(labels) for case, (labels, _) in cases.items()}
    assert rows == [count for _, count in cases.values()]
    monkeypatch.setattr(transformer_model, "places_learned", lambda labels, vocab_size: None)
    for case, (labels, _) in cases.items():
        for ours, whole in zip(actual[case], losses_and_gradients(labels), strict=True):
            assert_close_to(ours, whole, rtol_of_norm=1e-12, name=case)
    some[1, 2] = VOCAB
    monkeypatch.undo()
    with pytest.raises(VocabularyError, match=rf"{VOCAB}"):
        model(tokens, labels=some)
