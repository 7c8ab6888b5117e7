"""Folders as older programs wrote them: names without prefix, copies of tied weights, buffers, old fields."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.parity import assert_bit_equal, assert_close_to
from hf_references import LLAMA3, MODELS, YARN, Reference
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardwise.core.errors import CheckpointError, ConfigError
from shardwise.models.transformer.rotary import RotaryEmbedding, RotaryScaling
from shardwise.storage.huggingface import (
    build_model,
    config_from_json,
    config_to_json,
    describe_model,
    load_pretrained,
    model_config,
)
from shardwise.storage.huggingface.architectures import ARCHITECTURES


def rewritten(
    source: Path, target: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], **fields: Any
) -> Path:
    """A copy of a folder with other tensors and fields."""
    shutil.copytree(source, target)
    save_file(change(load_file(source / "model.safetensors")), target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | fields))
    return target


def assert_same_weights(folder: Path, source: Path, one_rank: Any) -> None:
    found, expected = (load_pretrained(each, groups=one_rank).state_dict() for each in (folder, source))
    assert found.keys() == expected.keys()
    for key, param in found.items():
        assert_bit_equal(param, expected[key], name=key)


def without_prefix(prefix: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("name", "prefix"), [("gpt2", "transformer."), ("bloom", "transformer."), ("qwen3", "model."), ("bert", "bert.")]
)
def test_names_without_prefix_and_buffers(
    make: Callable[[str], Reference], tmp_path: Path, one_rank: Any, name: str, prefix: str
) -> None:
    source = make(name).folder
    buffers = {
        "gpt2": {"h.0.attn.bias": torch.ones(1, 1, 13, 13), "h.1.attn.masked_bias": torch.tensor(-1e4)},
        "qwen3": {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(5)},
        "bert": {"embeddings.position_ids": torch.arange(17).unsqueeze(0)},
    }.get(name, {})
    folder = rewritten(source, tmp_path / "old", lambda tensors: without_prefix(prefix)(tensors) | buffers)
    assert_same_weights(folder, source, one_rank)


def test_an_equal_copy_of_a_tied_weight_changes_nothing(
    make: Callable[[str], Reference], tmp_path: Path, one_rank: Any
) -> None:
    source = make("gpt2").folder

    def with_copy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors | {"lm_head.weight": tensors["transformer.wte.weight"].clone()}

    def copy_alone(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in with_copy(tensors).items() if name != "transformer.wte.weight"}

    for number, change in enumerate((with_copy, copy_alone)):
        folder = rewritten(source, tmp_path / str(number), change)
        assert_same_weights(folder, source, one_rank)


def test_layers_for_multi_token_prediction_are_left_out(
    make: Callable[[str], Reference], tmp_path: Path, one_rank: Any, caplog: pytest.LogCaptureFixture
) -> None:
    source = make("deepseek_v3").folder

    def with_layer(number: int, *own: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
        def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            old, new = "model.layers.2.", f"model.layers.{number}."
            layer = {name.replace(old, new): tensor.clone() for name, tensor in tensors.items() if old in name}
            return tensors | layer | {new + name: torch.ones(3) for name in own}

        return change

    # With the field, and without it, as in DeepSeek's own class of configs.
    for name, count in (("stated", 2), ("not stated", None)):
        change = with_layer(3, "eh_proj.weight", "shared_head.head.weight")
        folder = rewritten(source, tmp_path / name, change, num_nextn_predict_layers=count)
        assert_same_weights(folder, source, one_rank)
        assert f"{folder} has 1 layer for multi-token prediction (MTP) after the 3 of the model" in caplog.text
    for name, change, count in (
        ("of the model itself", with_layer(3), 1),
        ("none is stated", with_layer(3, "eh_proj.weight"), 0),
        ("behind them", with_layer(4, "eh_proj.weight"), 1),
    ):
        folder = rewritten(source, tmp_path / name, change, num_nextn_predict_layers=count)
        with pytest.raises(CheckpointError, match=r"holds tensor 'model\.layers\.[34]\."):
            load_pretrained(folder, groups=one_rank)


@pytest.mark.parametrize(
    ("old", "new", "hint"),
    [
        (
            "",
            "_orig_mod.",
            r"'_orig_mod\.', which torch\.compile adds: save the model inside of the wrapper \(model\._",
        ),
        ("", "module._orig_mod.", r"'module\.', which DistributedDataParallel adds"),
        ("model.", "module.", r"'module\.', which Dist"),
        (".self_attn.", "._orig_mod.self_attn.", r"'_orig_mod\.', which torch\.compile adds"),
    ],
)
def test_the_wrapper_that_a_model_was_saved_with_is_named(
    make: Callable[[str], Reference], tmp_path: Path, one_rank: Any, old: str, new: str, hint: str
) -> None:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name.replace(old, new, 1): tensor for name, tensor in tensors.items()}

    folder = rewritten(make("qwen2_windows").folder, tmp_path / "wrapped", change)
    with pytest.raises(
        CheckpointError, match=rf"lacks tensor .*, which its config\.json asks for; its names have {hint}"
    ):
        load_pretrained(folder, groups=one_rank)


def test_positions_of_old_files_are_no_weights(make: Callable[[str], Reference], tmp_path: Path, one_rank: Any) -> None:
    """safetensors has integers before numbers, and ``bert-base-uncased`` says no dtype."""

    def with_positions(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"bert.embeddings.position_ids": torch.arange(17).unsqueeze(0)} | tensors

    source = make("bert").folder
    folder = rewritten(source, tmp_path / "old", with_positions, dtype=None, torch_dtype=None)
    assert_same_weights(folder, source, one_rank)


def test_bert_as_it_was_converted_from_tensorflow(
    make: Callable[[str], Reference], tmp_path: Path, one_rank: Any
) -> None:
    """``bert-base-uncased`` says BertForMaskedLM, and has the next sentence's head and names of old."""
    source = make("bert").folder

    def old(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        result = {}
        for name, tensor in tensors.items():
            ending = next((ending for ending in names if name.endswith(ending)), None)
            result[name if ending is None else name.removesuffix(ending) + names[ending]] = tensor
        return result | {"cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"].clone()}

    folder = rewritten(source, tmp_path / "old", old, architectures=["BertForMaskedLM"])
    assert_same_weights(folder, source, one_rank)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reference", ["gpt2"], indirect=True)
def test_virtual_stages(group: Any, reference: Reference, tmp_path: Path) -> None:
    from hf_references import groups_of

    from shardwise.models.description import ModelChunks
    from shardwise.storage.huggingface import save_pretrained

    groups = groups_of(1, 2)
    model = load_pretrained(reference.folder, groups=groups, virtual_pipeline_model_parallel_size=2)
    assert isinstance(model, ModelChunks)
    assert len(model) == 2
    save_pretrained(model, tmp_path / "out")
    stored: dict[str, Tensor] = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        stored |= load_file(path)
    expected = reference.weights()
    assert stored.keys() == expected.keys()
    for key, tensor in stored.items():
        assert_bit_equal(tensor, expected[key], name=key)


DEEPSEEK_V2 = {"model_type": "deepseek_v2", "num_experts_per_tok": 6}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0},
    LLAMA3,
    YARN,
    YARN | {"attention_factor": 1.3, "beta_fast": 20, "beta_slow": 2},
    YARN | {"mscale": 1.2, "mscale_all_dim": 0.7, "truncate": False},
]


@pytest.mark.parametrize("rope", SCALINGS)
@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling"])
def test_rotary_frequencies_are_those_of_transformers(rope: dict[str, Any], form: str) -> None:
    import transformers
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    values: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "num_hidden_layers": 1,
        "vocab_size": 8,
    }
    if form == "rope_parameters":
        values |= {"rope_parameters": rope}
    else:
        scaling = {name: value for name, value in rope.items() if name not in ("rope_theta", "rope_type")}
        old = None if rope["rope_type"] == "default" else scaling | {"type": rope["rope_type"]}
        values |= {"rope_theta": rope["rope_theta"], "rope_scaling": old}
    description = config_from_json(values).description
    ours = RotaryEmbedding(16, 1.0, description.rotary_base, description.rope_scaling)
    cos, sin = ours(torch.arange(50), torch.float64)
    written = config_to_json(description, architecture="llama")
    for fields in (values, written):
        theirs = LlamaRotaryEmbedding(transformers.LlamaConfig(**fields))
        expected = theirs(torch.zeros(1), torch.arange(50).unsqueeze(0))
        for value, other in zip((cos, sin), expected, strict=True):
            # theirs has each angle twice, and in fp32.
            assert_close_to(value[:, 0, 0].float(), other[0, :, :8], rtol_of_norm=2e-6)
    assert config_from_json(written).description == description


@pytest.mark.parametrize("name", MODELS)
def test_a_written_config_says_the_same(make: Callable[[str], Reference], name: str) -> None:
    config = config_from_json(json.loads((make(name).folder / "config.json").read_text()))
    written = config_to_json(config.description, architecture=config.architecture.model_type, dtype=torch.bfloat16)
    again = config_from_json(written)
    assert again.description == config.description
    assert again.dtype is torch.bfloat16


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_defaults_are_those_of_transformers(name: str) -> None:
    """A file with nothing but its kind is the model that transformers makes of it."""
    import transformers

    # Without these fields, a DeepSeek V2 of transformers cannot run, a GLM 4.5 rotates an odd number of features, and a
    # Gemma 4 has embeddings of each layer.
    given = {"deepseek_v2": {"num_experts_per_tok": 6}, "glm4_moe": {"head_dim": 128}}.get(name, {})
    given = {"hidden_size_per_layer_input": 0} if name == "gemma4_text" else given
    full = json.loads(transformers.AutoConfig.for_model(name, **given).to_json_string(use_diff=False))
    full = {key: value for key, value in full.items() if key not in ("architectures", "dtype")}
    assert config_from_json({"model_type": name, **given}).description == config_from_json(full).description


YARN_OF_OLMO3 = {
    "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192,
    "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
YARN_OF_MINISTRAL3 = {
    "rope_type": "yarn", "type": "yarn", "rope_theta": 1000000.0, "factor": 16.0,
    "original_max_position_embeddings": 16384, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def published(model_type: str, heads: int, groups: int, *sizes: int, **others: Any) -> dict[str, Any]:
    """Fields of a published ``config.json``: sizes of vocabulary, hidden states, MLP, layers and context."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")
    given = {"model_type": model_type, "num_attention_heads": heads, "num_key_value_heads": groups}
    return given | dict(zip(names, sizes, strict=True)) | {"hidden_act": "silu", "dtype": "bfloat16"} | others


# Its queries do not grow.
DEVSTRAL2 = YARN_OF_MINISTRAL3 | {"factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 4.0}
DEVSTRAL2 |= {"mscale_all_dim": 0.0, "llama_4_scaling_beta": 0.0}
OLMO3 = {"sliding_window": 4096, "rope_theta": 500000, "rope_scaling": YARN_OF_OLMO3, "rms_norm_eps": 1e-6}
GEMMA4 = {"head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 4, "attention_k_eq_v": True}
GEMMA4 |= {"hidden_size_per_layer_input": 0, "sliding_window": 1024, "final_logit_softcapping": 30.0}
MINISTRAL3 = {"head_dim": 128, "sliding_window": None, "rope_parameters": YARN_OF_MINISTRAL3, "rms_norm_eps": 1e-5}


@pytest.mark.parametrize(
    "fields",
    [
        published("olmo3", 32, 32, 100278, 4096, 11008, 32, 65536, **OLMO3),
        published("olmo3", 40, 8, 100278, 5120, 27648, 64, 65536, **OLMO3),
        published("ministral3", 32, 8, 131072, 3072, 9216, 26, 262144, tie_word_embeddings=True, **MINISTRAL3),
        published("ministral3", 32, 8, 131072, 4096, 14336, 34, 262144, **MINISTRAL3),
        published("ministral3", 32, 8, 131072, 5120, 16384, 40, 262144, **MINISTRAL3),
        published("gemma4_text", 32, 16, 262144, 5376, 21504, 60, 262144, **GEMMA4),
        published("ministral3", 96, 8, 131072, 12288, 28672, 88, 262144, **MINISTRAL3 | {"rope_parameters": DEVSTRAL2}),
    ],
    ids=["OLMo 3 7B", "OLMo 3 32B", "Ministral 3 3B", "Ministral 3 8B", "Ministral 3 14B", "Gemma 4 31B", "Devstral 2"],
)
def test_published_configs(fields: dict[str, Any]) -> None:
    """As on the hub, they are what transformers writes of them."""
    import transformers

    description = config_from_json(fields).description
    theirs = transformers.CONFIG_MAPPING[fields["model_type"]].from_dict(copy.deepcopy(fields))
    assert config_from_json(json.loads(theirs.to_json_string(use_diff=False))).description == description
    assert config_from_json(config_to_json(description, base=fields)).description == description


def test_an_odd_number_of_rotated_features_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 of the 6 features of a head are rotated; it must be an even number"):
        config_from_json({"model_type": "glm4_moe", "num_attention_heads": 8, "head_dim": 6})


GEMMA3_FULL, GEMMA3_LOCAL = {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e6}, {"rope_theta": 2e4}


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": {"full_attention": GEMMA3_FULL, "sliding_attention": GEMMA3_LOCAL}},
        {"rope_theta": 3e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 2e4},
    ],
    ids=["new", "old"],
)
def test_two_rotary_bases_in_both_forms(fields: dict[str, Any]) -> None:
    description = config_from_json({"model_type": "gemma3_text", **fields}).description
    assert (description.rotary_base, description.window_rotary_base) == (3e6, 2e4)
    assert description.rope_scaling == RotaryScaling("linear", 8.0)
    written = config_to_json(description, architecture="gemma3_text")
    assert config_from_json(written).description == description


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "mistral", "sliding_window": 7}, (6, 0)),
        ({"model_type": "qwen3", "sliding_window": 7}, None),
        ({"model_type": "qwen3", "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0}, (6, 0)),
        ({"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 99}, None),
    ],
)
def test_windows(fields: dict[str, Any], window: tuple[int, int] | None) -> None:
    description = config_from_json(fields).description
    assert description.window_size == window
    written = config_to_json(description, architecture=fields["model_type"])
    assert config_from_json(written).description == description


GEMMA4_TEXT = {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["dense"] * 4},
            'layer_types is \\["dense"',
        ),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "for each of 26 layers"),
        ({"model_type": "gemma3_text", "rope_parameters": {"full_attention": 3}}, "object for each kind of layer"),
        ({"model_type": "gemma3_text", "rope_scaling": 3}, "rope_scaling is 3; it must be an object, or null"),
        (
            {"model_type": "gemma3_text", "rope_scaling": {"type": "linear", "factor": 8.0}},
            'rope_scaling has type "linear" and no rope_type, which transformers 5 reads as "default"; name it',
        ),
        (
            {"model_type": "qwen3", "rope_parameters": {"full_attention": {"rope_theta": 3e6}}},
            r'rope_parameters: full_attention is \{"rope_theta": 3000000.0\}; it must be left out',
        ),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "linear", "factor": 8.0}},
            'rope_type of rope_scaling or rope_parameters is "linear"; it must be default or longrope',
        ),
        (
            {"model_type": "gemma3_text", "attn_logit_softcapping": 2.0},
            "attn_logit_softcapping is 2.0; it must be null",
        ),
        (
            {"model_type": "olmo3", "rope_theta": 1e6},
            r"config.json: rope_parameters.sliding_attention lacks rope_theta",
        ),
        (
            {"model_type": "olmo3", "rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}},
            'rope_parameters.sliding_attention: rope_type is "yarn"; it must be "default"',
        ),
        ({"model_type": "olmo3", "rope_parameters": {"rope_type": "yarn"}}, "it must be an object for each kind"),
        (
            {"model_type": "ministral3", "rope_parameters": {"rope_theta": 1e6, "llama_4_scaling_beta": 0.1}},
            'rope_parameters: rope_type is "default"; it must be yarn',
        ),
        ({"model_type": "ministral3", "rope_scaling": YARN}, "rope_scaling lacks llama_4_scaling_beta"),
        ({"model_type": "ministral3", "rope_scaling": YARN | {"llama_4_scaling_beta": -1}}, "beta .* is -1.0; it must"),
        (
            {**GEMMA4_TEXT, "use_bidirectional_attention": "all"},
            'use_bidirectional_attention is "all"; it must be null',
        ),
        ({**GEMMA4_TEXT, "layer_types": ["sliding_attention"] * 30}, "it must be full_attention in the last layer"),
        ({**GEMMA4_TEXT, "sliding_window": None}, "sliding_window is null; it must be an integer"),
        (
            {**GEMMA4_TEXT, "attention_k_eq_v": True, "num_global_key_value_heads": 3},
            "heads is 3; it must be a divisor",
        ),
        ({**GEMMA4_TEXT, "per_layer_config": {"0": {"head_dim": 512}}}, "per_layer_config is .* in no others"),
        ({**GEMMA4_TEXT, "per_layer_config": {"29": {"head_dim": 512}}}, "the same in all layers of full_attention"),
        ({**GEMMA4_TEXT, "per_layer_config": {"40": {}}}, 'per_layer_config is {"40": {}}; it must be'),
        ({**GEMMA4_TEXT, "global_head_dim": 511}, "511 of the 511 features of a head are rotated"),
        (
            {"model_type": "gpt_neox", "rope_scaling": {"rope_type": "proportional"}},
            'rope_type is "proportional"; it must be another kind: a fraction of each head is rotated',
        ),
        ({"model_type": "smollm3", "no_rope_layers": [1, 2]}, "no_rope_layers is"),
        ({"model_type": "phi3", "embd_pdrop": 0.1}, "embd_pdrop is 0.1"),
        ({"model_type": "opt", "word_embed_proj_dim": 12}, "word_embed_proj_dim is 12"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is true"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention is true"),
        ({"model_type": "gpt2", "embd_pdrop": 0.3}, "embd_pdrop is 0.3"),
        ({"model_type": "gpt2", "n_head": 5}, "n_head is 5"),
        ({"model_type": "bert", "is_decoder": True}, "is_decoder is true"),
        (
            {"model_type": "bert", "position_embedding_type": "relative_key"},
            'position_embedding_type is "relative_key"',
        ),
        ({"model_type": "bert", "tie_word_embeddings": False}, "tie_word_embeddings is false"),
        ({"model_type": "deepseek_v2"}, "config.json lacks num_experts_per_tok"),
        ({**DEEPSEEK_V2, "topk_method": "noaux_tc"}, 'topk_method is "noaux_tc"; it must be greedy or group_limited'),
        ({**DEEPSEEK_V2, "topk_method": "group_limited_greedy"}, "config.json lacks n_group"),
        ({**DEEPSEEK_V2, "norm_topk_prob": True}, "norm_topk_prob is true"),
        ({**DEEPSEEK_V2, "mlp_bias": True}, "mlp_bias is true"),
        ({**DEEPSEEK_V2, "num_key_value_heads": 4}, "num_key_value_heads is 4; it must be num_attention_heads, 32"),
        ({**DEEPSEEK_V2, "qk_rope_head_dim": 5}, "config.json: latent: rotary_width is 5; pairs are rotated"),
        ({"model_type": "deepseek_v3", "num_experts_per_tok": 1}, "num_experts_per_tok is 1; it must be at least 2"),
        ({"model_type": "mixtral", "num_experts_per_tok": 1}, "num_experts_per_tok is 1; it must be at least 2"),
        ({"model_type": "deepseek_v3", "scoring_func": "softmax"}, 'scoring_func is "softmax"; it must be "sigmoid"'),
        ({"model_type": "deepseek_v3", "quantization_config": {"quant_method": "fp8"}}, "quantization_config is"),
        (
            {"model_type": "deepseek_v3", "rope_scaling": {"type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}},
            "mscale_all_dim is 1.0; it must be null with rotary scaling of type 'linear'",
        ),
        ({}, "config.json lacks model_type"),
    ],
)
def test_values_that_are_not_offered(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_json(fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gemma4_text"}, "hidden_size_per_layer_input is 256; it must be 0: embeddings of each layer"),
        ({**GEMMA4_TEXT, "num_kv_shared_layers": 2}, "num_kv_shared_layers is 2; it must be 0, the only value"),
        ({**GEMMA4_TEXT, "enable_moe_block": True}, "enable_moe_block is true; it must be false, the only value"),
    ],
)
def test_layers_that_are_not_ours_are_those_of_transformers(fields: dict[str, Any], message: str) -> None:
    experts = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8}
    given = {**fields, **experts, "num_hidden_layers": 6, "vocab_size": 9}
    with pytest.raises(ConfigError, match=message):
        config_from_json(given, implementation="shardwise")
    assert config_from_json(given).description.transformers_config is not None
    ours = config_from_json({**GEMMA4_TEXT, **experts, "num_hidden_layers": 6, "vocab_size": 9})
    assert ours.description.transformers_config is None


def test_what_no_architecture_can_say_is_named(one_rank: Any) -> None:
    description = config_from_json(
        {"model_type": "llama", "hidden_size": 24, "num_attention_heads": 4}
        | {"num_hidden_layers": 1, "vocab_size": 9, "intermediate_size": 8}
    ).description
    config = model_config(description, rotary_interleaved=True)
    odd = describe_model(build_model(config, groups=one_rank))
    with pytest.raises(ConfigError, match="llama: it has no way to say rotary_interleaved True"):
        config_to_json(odd)


def test_a_layer_of_somebody_elses_is_named(one_rank: Any) -> None:
    description = config_from_json(
        {"model_type": "llama", "hidden_size": 24, "num_attention_heads": 4}
        | {"num_hidden_layers": 1, "vocab_size": 9, "intermediate_size": 8}
    ).description
    model = build_model(model_config(description), groups=one_rank)
    model.block.layers[0].mlp = torch.nn.Identity()
    with pytest.raises(
        ConfigError, match="the first layer's mlp is of Identity without linear_fc1, so the model cannot"
    ):
        describe_model(model)


def test_gemma_3_has_no_cap_of_scores(make: Callable[[str], Reference], one_rank: Any) -> None:
    """Transformers reads the field, and applies only that of the logits."""
    model = load_pretrained(make("gemma3").folder, groups=one_rank, attention_logit_softcap=2.0)
    assert model.config.final_logit_softcap == 3.0
    with pytest.raises(ConfigError, match=r"config\.json: attn_logit_softcapping is 2\.0; it must be null"):
        config_to_json(describe_model(model), architecture="gemma3_text")
