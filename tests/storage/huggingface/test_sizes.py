"""Sizes of experts in a strange config.json are compared with the folder before any name or tensor is made."""

from __future__ import annotations

import json

import pytest
import torch

from shardwise.core.errors import CheckpointError, ConfigError
from shardwise.core.tensor_files import TensorFile
from shardwise.models.experts import Experts
from shardwise.storage.huggingface.loading import _check_sizes
from shardwise.storage.huggingface.pretrained import PretrainedFolder

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
COMMON = {**SIZES, "num_key_value_heads": 4, "num_experts_per_tok": 2, "max_position_embeddings": 64}
OF_TYPE = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
    "granitemoe": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 4},
    "deepseek_v3": {
        "n_routed_experts": 4, "moe_intermediate_size": 24, "first_k_dense_replace": 0, "n_group": 2, "topk_group": 1,
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    },
}  # fmt: skip


def opened(folder, model_type, changes, shapes=((64, 16), (4, 16), *[(24, 16)] * 12)):
    tensors = {f"tensor{number}": (torch.float16, shape) for number, shape in enumerate(shapes)}
    file = TensorFile(folder / "model.safetensors", tensors)
    for name, (dtype, shape) in tensors.items():
        file.write(name, torch.zeros(shape, dtype=dtype))
    config = COMMON | OF_TYPE[model_type] | changes
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **config}))
    return PretrainedFolder(folder)


@pytest.mark.parametrize("model_type", OF_TYPE)
def test_the_experts_of_a_folder_fit(tmp_path, model_type):
    _check_sizes(opened(tmp_path, model_type, {}))


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("mixtral", {"num_local_experts": 10**12}, "experts: num is 10*; it must be from 1 to 65536"),
        ("deepseek_v3", {"n_routed_experts": 1 << 16}, "no router of 65536 experts"),
        ("granitemoe", {"num_local_experts": 10**4}, "no router of 10000 experts"),
        ("gpt_oss", {"num_local_experts": 10**4}, "no router of 10000 experts"),
        # The embedding has as many rows.
        ("mixtral", {"num_local_experts": 64}, "has 14 tensors, and its config.json asks for 64 experts in 1 layers"),
        ("qwen2_moe", {"num_experts_per_tok": 10**12}, "num_experts_per_tok is 10*; it must be at most 4, "),
        ("qwen2_moe", {"moe_intermediate_size": 1 << 30}, "no tensor as wide as the experts that .* asks for"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 10**15}, "shared_ffn_hidden_size is 10*; it must be from 1"),
        ("deepseek_v3", {"n_shared_experts": 1 << 16}, "no tensor as wide as the shared expert that .* asks for"),
        ("deepseek_v3", {"q_lora_rank": 10**12}, "query_rank is 10*; it must be an integer from 1 to"),
        ("deepseek_v3", {"n_group": 10**12, "n_routed_experts": 10**12}, "num is 10*; it must be from 1 to 65536"),
        ("gpt_oss", {"hidden_size": 1 << 20, "head_dim": 64}, "no tensor as wide as the hidden states"),
    ],
)
def test_sizes_beyond_the_folder_are_refused(tmp_path, model_type, changes, message):
    with pytest.raises((ConfigError, CheckpointError), match=message):
        _check_sizes(opened(tmp_path, model_type, changes))


def test_all_layers_together_have_a_limit():
    experts = Experts(num=60_000, per_token=1, ffn_hidden_size=8)
    experts.check_layers(17)
    with pytest.raises(ConfigError, match="18 layers of num 60000 are more than 1048576 experts"):
        experts.check_layers(18)
