"""Texts of a model that transformers computes grow together, each with the tokens that it has alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from harness.model_options import TRANSFORMERS
from models.generation.test_engine import alone, requests_of

from shardwise.core.topology import Groups
from shardwise.models.by_plan import joint, library
from shardwise.models.by_plan.model import PlannedCache, PlannedModel
from shardwise.models.generation import BatchEngine
from shardwise.nn import named_param_layouts

SIZES = TRANSFORMERS | {"vocab_size": 61, "max_position_embeddings": 24}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 3, "linear_num_value_heads": 6}
LATENT = {
    "num_key_value_heads": 6,
    "head_dim": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
}
# Frequencies of all texts of a pass would be those of the longest.
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8, "factor": 3.0}
LONG |= {"short_factor": [1.0, 1.0], "long_factor": [1.0, 30.0]}
# Texts see the keys since the last multiple, which a cache does not tell.
CHUNKS = {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 5, "num_local_experts": 2}
# Other sizes, and whether texts grow together.
KINDS: dict[str, tuple[dict[str, Any], bool]] = {
    "Apertus": ({}, True),
    "Exaone4": (WINDOWS, True),
    "GraniteMoe": ({"num_local_experts": 3, "num_experts_per_tok": 2}, True),
    "Olmo2": ({"rope_parameters": LONG}, False),
    "Llama4": (CHUNKS | {"intermediate_size_mlp": 22}, False),
    # Keys are computed of what its cache keeps.
    "MiniCPM3": (LATENT, False),
    "Qwen3Next": (LINEAR | {"linear_key_head_dim": 4, "linear_value_head_dim": 4, "num_experts": 0}, False),
}


def made(kind: str, group: dist.ProcessGroup) -> PlannedModel:
    config = getattr(transformers, f"{kind}{'Text' * (kind == 'Llama4')}Config")(**SIZES | KINDS[kind][0])
    fields = config.to_dict() | {"architectures": [f"{kind}ForCausalLM"]}
    description = library.describe({name: value for name, value in fields.items() if value is not None})
    model = PlannedModel(replace(description, params_dtype=torch.float64), groups=Groups(tp=group)).eval()
    generator = torch.Generator().manual_seed(4)
    for _, param, layout in named_param_layouts(model, group.size()):
        whole = torch.randn(layout.global_shape, generator=generator, dtype=torch.float64)
        whole = whole / whole.size(-1) ** 0.5 if whole.dim() > 1 else 1 + 0.2 * whole
        with torch.no_grad():
            param.copy_(layout.take(whole, group.rank()))
    for buffer in model.buffers():
        # Of those that files have.
        if buffer.isnan().any():
            buffer.fill_(0.5)
    return model


@pytest.mark.sample(4)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_gives_each_prompt_what_it_gets_alone(
    group: dist.ProcessGroup, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, together = made(kind, group), []
    requests = requests_of(61)
    expected = [alone(model, request) for request in requests]
    assert len(set(map(tuple, expected))) == len(expected)
    read = joint.next_logits
    monkeypatch.setattr(joint, "next_logits", lambda *given: together.append(len(given[1])) or read(*given))
    found = dict(BatchEngine(model, max_sequences=4).run(requests))
    assert [found[place].text_ids for place in range(len(requests))] == expected
    # The first pass of two is a trial, whose result may be that there is none other.
    assert (max(together[1:], default=0) == 4) == KINDS[kind][1]
    assert model.whole.config._attn_implementation == "sdpa"


@pytest.mark.ranks(1)
def test_what_a_trial_does_not_show_and_what_it_does(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("Apertus", group)
    assert joint.may_join(model)
    # Of all layers, or by the type of the layer.
    for kind in ("dynamic", "longrope", {"sliding_attention": "default", "full_attention": "dynamic"}):
        with monkeypatch.context() as patch:
            patch.setattr(model.whole.model.rotary_emb, "rope_type", kind)
            assert not joint.may_join(model)
    with monkeypatch.context() as patch:
        patch.setattr(model.whole, "_supports_sdpa", False)
        assert not joint.may_join(model)
    assert joint.joins(model)
    with monkeypatch.context() as patch:
        by_sequence = joint._attention_by_sequence

        @contextlib.contextmanager
        def of_its_own(*given: Any) -> Iterator[None]:
            with by_sequence(*given):
                functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
                functions[joint._NAME] = functions["sdpa"]
                yield

        patch.setattr(joint, "_attention_by_sequence", of_its_own)
        with pytest.raises(NotImplementedError, match="ApertusForCausalLM has attention of its own"):
            joint.next_logits(model, [1, 2], [PlannedCache(model), PlannedCache(model)])
        assert not joint.joins(model)
    read = joint.next_logits
    monkeypatch.setattr(joint, "next_logits", lambda *given: 1.001 * read(*given))
    assert not joint.joins(model)
    for error in (torch.OutOfMemoryError, dist.DistNetworkError):

        def fail(*_: Any, error: type[Exception] = error) -> None:
            raise error("planted")

        # Not an answer: one rank alone may have it.
        monkeypatch.setattr(joint, "next_logits", fail)
        with pytest.raises(error, match="planted"):
            joint.joins(model)
