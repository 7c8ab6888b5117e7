"""The operations of a model of transformers are those of the formula for the families that have a table, too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import transformers
from storage.huggingface.hf_references import MODELS

from shardwise.core.errors import ConfigError
from shardwise.models.by_plan import library
from shardwise.models.by_plan.operations import forward_operations
from shardwise.models.config import ModelConfig
from shardwise.run.session import _utilisation
from shardwise.run.utilisation import model_flops_per_token
from shardwise.storage.huggingface.pretrained import config_from_json


@pytest.mark.parametrize("name", ["gpt2", "bloom", "granite", "gemma3", "deepseek_v3", "gpt_oss", "qwen2_moe"])
def test_operations_are_those_of_the_table(name: str) -> None:
    kind, sizes = MODELS[name]
    fields = getattr(transformers, kind).config_class(**sizes).to_dict() | {"architectures": [kind]}
    fields = {name: value for name, value in fields.items() if value is not None}
    ours, theirs = (config_from_json(fields, implementation=way).description for way in ("auto", "transformers"))
    assert ours.transformers_config is None
    for length in (3, 64, 513):
        assert model_flops_per_token(theirs, length) == model_flops_per_token(ours, length)
    frozen = [model_flops_per_token(model, 64, trains_weights=False) for model in (ours, theirs)]
    assert frozen[0] == frozen[1]


def test_windows_and_attention_outside_of_attention_functions() -> None:
    sizes = {"hidden_size": 24, "intermediate_size": 22, "num_hidden_layers": 2, "vocab_size": 37}
    sizes |= {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 4, "pad_token_id": 0}
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
    windows = forward_operations(described("Exaone4", sizes | layers))
    # Queries, keys, values and output; gate, up and down; the head.
    assert windows.of_weights == 2 * (2 * 24 * (18 * 4) + 2 * 3 * 24 * 22 + 24 * 37)
    assert windows.of_attention(4) == 2 * 2 * 6 * 8 * 4
    assert windows.of_attention(64) == 2 * 6 * 8 * (5 + 64)
    # The indexer multiplies queries and keys of all pairs, and sums over its heads.
    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4}
    indexer = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4, "first_k_dense_replace": 2}
    sparse = forward_operations(described("DeepseekV32", sizes | latent | indexer))
    assert sparse.of_attention(64) == 2 * (2 * 6 * 10 + 2 * 2 * (8 + 1)) * 64


def test_choices_that_need_values_are_refused() -> None:
    sizes = {"hidden_size": 24, "num_layers": 1, "num_attention_heads": 6, "vocab_size": 37, "n_routed_experts": 4}
    model = described("LongcatFlash", sizes | {"zero_expert_num": 2})
    with pytest.raises(ConfigError, match=r"products of LongcatFlashForCausalLM of transformers .* cannot be counted"):
        forward_operations(model)
    # A run goes on without.
    task: Any = SimpleNamespace(
        settings=SimpleNamespace(sequence_length=8), source=SimpleNamespace(trains_weights=True)
    )
    found = _utilisation(task, cast("Any", None), model)
    assert found.line().startswith("peak   not compared: the products of LongcatFlashForCausalLM")
    assert found.metrics(np.array([8]), 1.0) == {}


def described(kind: str, sizes: dict[str, Any]) -> ModelConfig:
    fields = getattr(transformers, f"{kind}Config")(**sizes).to_dict() | {"architectures": [f"{kind}ForCausalLM"]}
    return library.describe({name: value for name, value in fields.items() if value is not None})
