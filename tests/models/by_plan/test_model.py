"""Models by plan as language models: their texts with a cache are those without, or they are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch.distributed import ProcessGroup

from shardwise import Groups
from shardwise.core.errors import ConfigError
from shardwise.models.by_plan import library
from shardwise.models.by_plan.model import PlannedModel
from shardwise.models.generation import GREEDY, generate
from shardwise.models.recomputation import Recomputation

SIZES = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
ENCODER = SIZES | {"max_position_embeddings": 40, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def own_model(group: ProcessGroup, kind: str, name: str, fields: dict[str, Any]) -> PlannedModel:
    config = getattr(transformers, f"{kind}Config")(**fields, architectures=[name])
    torch.manual_seed(7)
    model = PlannedModel(library.describe(config.to_dict()), groups=Groups(tp=group)).eval()
    model.whole.load_state_dict(getattr(transformers, name)(config).state_dict())
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.3 * torch.randn(param.shape))
    return model


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("kind", "name", "fields"),
    [
        # The state of its layers has another argument.
        ("Mamba", "MambaForCausalLM", SIZES | {"state_size": 4, "time_step_rank": 2}),
        # A class of caches of its own.
        ("MiniMax", "MiniMaxForCausalLM", SIZES | {"num_key_value_heads": 2, "num_local_experts": 2, "head_dim": 8}),
        # Positions from 2.
        ("Roberta", "RobertaForCausalLM", ENCODER | {"is_decoder": True}),
    ],
)
def test_texts_are_those_without_a_cache(group: ProcessGroup, kind: str, name: str, fields: dict[str, Any]) -> None:
    model = own_model(group, kind, name, fields)
    model.check_causal()
    model.check_cache()
    ids = [5, 9, 33, 7, 12]
    for _ in range(6):
        with torch.no_grad():
            ids.append(int(model.whole(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    assert generate(model, ids[:5], max_new_tokens=6, sampling=GREEDY) == ids[5:]
    assert model.max_sequence_length == model.config.max_sequence_length - 2 * (kind == "Roberta")


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("kind", "name", "fields", "message"),
    [
        ("Arcee", "ArceeForCausalLM", SIZES, None),
        ("Mamba", "MambaForCausalLM", SIZES | {"state_size": 4, "time_step_rank": 2}, "layers of linear_attention, wh"),
        # Its configuration names no kinds of layers.
        ("Rwkv", "RwkvForCausalLM", SIZES | {"attention_hidden_size": 16}, "does not keep the texts of a row apart"),
        # Its masks do not read positions.
        ("OPT", "OPTForCausalLM", SIZES | {"ffn_dim": 24, "word_embed_proj_dim": 16}, "does not keep the texts of a r"),
    ],
)
def test_texts_of_a_row_are_kept_apart_or_refused(
    group: ProcessGroup, kind: str, name: str, fields: dict[str, Any], message: str | None
) -> None:
    model = own_model(group, kind, name, fields)
    model.train().check_causal()
    assert model.training
    model.eval()
    ids, documents = torch.tensor([[5, 9, 33, 7, 12, 3]]), torch.tensor([[0, 0, 0, 1, 1, 1]])
    positions = torch.arange(3).repeat(1, 2)
    if message is not None:
        with pytest.raises(ConfigError, match=message):
            model(ids, positions, document_ids=documents)
        return
    torch.testing.assert_close(model(ids, positions, document_ids=documents)[3:], model(ids[:, 3:]))


@pytest.mark.ranks(1)
def test_models_whose_tokens_see_those_after_them_are_refused(group: ProcessGroup) -> None:
    model = own_model(group, "Roberta", "RobertaForCausalLM", ENCODER)
    with pytest.raises(ConfigError, match=r'see those after them, .* \(in config.json, "is_decoder" is false\)'):
        model.check_causal()


@pytest.mark.ranks(1)
@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, 1e-3), (torch.bfloat16, 0.1)])
def test_rounding_is_no_sight_of_later_tokens(
    group: ProcessGroup, monkeypatch: Any, dtype: torch.dtype, least: float
) -> None:
    model = own_model(group, "Arcee", "ArceeForCausalLM", SIZES)
    logits = torch.ones(2, 6, 37, dtype=dtype)
    monkeypatch.setattr(model, "_logits", lambda *_: logits)
    logits[1] -= 0.5 * least
    model.check_causal()
    logits[1] -= least
    with pytest.raises(ConfigError, match="lets tokens see those after them"):
        model.check_causal()


@pytest.mark.ranks(1)
def test_models_whose_cache_is_not_passed_on_are_refused(group: ProcessGroup, monkeypatch: Any) -> None:
    model = own_model(group, "Mamba", "MambaForCausalLM", SIZES | {"state_size": 4, "time_step_rank": 2})
    monkeypatch.setattr(model, "_cache_argument", "past_key_values")
    with pytest.raises(ConfigError, match="gives other logits with its cache of earlier tokens than without"):
        model.check_cache()
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    with pytest.raises(ConfigError, match=r"without \(nan apart of nan\)"):
        model.check_cache()
    monkeypatch.setattr(model.whole, "forward", None)
    with pytest.raises(ConfigError, match="its forward on token ids fails"):
        model.check_causal()


@pytest.mark.ranks(2)
def test_what_a_plan_does_not_have_is_refused(group: ProcessGroup) -> None:
    config = library.describe(transformers.ArceeConfig(**SIZES, architectures=["ArceeForCausalLM"]).to_dict())
    for options, message in (
        ({"sequence_parallel": True}, "sequence_parallel is True; set it to False"),
        ({"exact_parts": 2}, "exact_parts is 2; set it to None"),
        ({"recompute": Recomputation("selective")}, r"recompute is .*; set it to full \(uniform, 1 layer\)"),
        ({"attention_dropout": 0.1}, "dropout is 0.1 over several ranks; set hidden_dropout"),
    ):
        with pytest.raises(ConfigError, match=f"ArceeForCausalLM .* is split by its own plan, which .*: {message}"):
            PlannedModel(replace(config, **options), groups=Groups(tp=group))
