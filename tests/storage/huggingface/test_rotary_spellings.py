"""Each spelling of rotary positions in ``config.json`` means what it means to transformers, or is refused by name."""

from __future__ import annotations

import copy
import re
import sys
from typing import Any

import pytest
import torch
from hf_references import MODELS
from torch import Tensor

from shardwise.core.errors import ConfigError
from shardwise.models.transformer.rotary import RotaryEmbedding
from shardwise.storage.huggingface import config_from_json, config_to_json

FAMILIES = [
    *("llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3", "granite", "olmo2", "gemma2", "gemma3", "gpt_neox"),
    *("olmo3", "ministral", "ministral3", "gemma4"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "granitemoe"),
]
WINDOWED = ("gemma3", "olmo3", "gemma4")
"""Families in which layers with a window have positions of their own."""
LENGTHS = (5, 40, 100)
CONTEXT = "original_max_position_embeddings"
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, CONTEXT: 16},
    "yarn": {"factor": 4.0, CONTEXT: 16},
    "longrope": {
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0, 2.5, 3.0],
        "long_factor": [2.0, 3.0, 5.0, 6.0, 6.5, 7.0, 7.5, 8.0],
        CONTEXT: 16,
    },
}
DEFAULT = {"rope_type": "default", "rope_theta": 500.0}
LOCAL = {"rope_type": "default", "rope_theta": 50.0}


def spellings_of(kind: str) -> dict[str, dict[str, Any]]:
    """Spellings of one kind of scaling."""
    values = SCALINGS[kind]
    scaling = {"rope_type": kind, **values}
    short = {key: value for key, value in scaling.items() if key != CONTEXT}
    nested = {"full_attention": DEFAULT, "sliding_attention": LOCAL}
    found: dict[str, dict[str, Any]] = {
        "in rope_scaling": {"rope_theta": 500.0, "rope_scaling": scaling},
        "in rope_scaling, of type": {"rope_theta": 500.0, "rope_scaling": {"type": kind, **values}},
        "in rope_scaling, with another type": {"rope_theta": 500.0, "rope_scaling": {"type": "default", **scaling}},
        "in rope_scaling, with another base": {"rope_theta": 700.0, "rope_scaling": scaling | {"rope_theta": 500.0}},
        "in rope_scaling, with a local base": {
            "rope_theta": 500.0,
            "rope_local_base_freq": 50.0,
            "rope_scaling": scaling,
        },
        "in rope_scaling, and default rope_parameters": {"rope_scaling": scaling, "rope_parameters": DEFAULT},
        "in rope_scaling, a part of each head": {
            "rope_theta": 500.0,
            "rope_scaling": scaling,
            "partial_rotary_factor": 0.5,
        },
        "in rope_scaling, with the part of each head": {
            "rope_theta": 500.0,
            "rope_scaling": scaling | {"partial_rotary_factor": 0.5},
        },
        "in rope_parameters": {"rope_parameters": scaling | {"rope_theta": 500.0}},
        "in rope_parameters, of type": {"rope_parameters": {"type": kind, "rope_theta": 500.0, **values}},
        "in rope_parameters, base outside": {"rope_theta": 500.0, "rope_parameters": scaling},
        "in rope_parameters, no base": {"rope_parameters": scaling},
        "in rope_parameters, default rope_scaling": {
            "rope_parameters": scaling | {"rope_theta": 500.0},
            "rope_scaling": {"rope_type": "default"},
        },
        "nested": {"rope_parameters": nested | {"full_attention": DEFAULT | scaling}},
        "nested, of type": {"rope_parameters": nested | {"full_attention": {"type": kind, **values}}},
        "nested, with a window": {"rope_parameters": nested | {"sliding_attention": LOCAL | scaling}},
        "nested, with a window, of type": {"rope_parameters": nested | {"sliding_attention": {"type": kind, **values}}},
        "nested, and rope_scaling": {"rope_parameters": nested, "rope_scaling": scaling},
        "nested, and rope_scaling of type": {"rope_parameters": nested, "rope_scaling": {"type": kind, **values}},
        "nested, and rope_scaling with a base": {
            "rope_parameters": nested,
            "rope_scaling": scaling | {"rope_theta": 900.0},
        },
        "nested, and default rope_scaling": {
            "rope_parameters": nested | {"full_attention": DEFAULT | scaling},
            "rope_scaling": {"rope_type": "default"},
        },
        "nested without type, and rope_scaling of type": {
            "rope_parameters": {"full_attention": {"rope_theta": 500.0}, "sliding_attention": {"rope_theta": 50.0}},
            "rope_scaling": {"type": kind, **values},
        },
    }
    if CONTEXT in values:
        found |= {
            "without context": {"rope_theta": 500.0, "rope_scaling": short},
            "context outside": {"rope_theta": 500.0, CONTEXT: 8, "rope_scaling": short},
            "context in both": {"rope_theta": 500.0, CONTEXT: 8, "rope_scaling": scaling},
            "context null": {"rope_theta": 500.0, "rope_scaling": short | {CONTEXT: None}},
        }
    return {f"{kind} {name}": fields for name, fields in found.items()}


def spellings() -> dict[str, dict[str, Any]]:
    """All spellings: fields of a ``config.json`` by description."""
    yarn, longrope = ({"rope_type": kind, **SCALINGS[kind]} for kind in ("yarn", "longrope"))
    found: dict[str, dict[str, Any]] = {
        "nothing": {},
        "base": {"rope_theta": 500},
        "base in rope_parameters": {"rope_parameters": DEFAULT},
        "base in both": {"rope_theta": 700.0, "rope_parameters": DEFAULT},
        "base null outside": {"rope_theta": None, "rope_parameters": DEFAULT},
        "rope_scaling null": {"rope_theta": 500.0, "rope_scaling": None},
        "rope_scaling empty": {"rope_theta": 500.0, "rope_scaling": {}},
        "rope_parameters null": {"rope_theta": 500.0, "rope_parameters": None},
        "rope_parameters empty": {"rope_theta": 500.0, "rope_parameters": {}},
        "no type": {"rope_theta": 500.0, "rope_scaling": {"factor": 4.0}},
        "unknown field": {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 4, "more": 3}},
        "unknown type": {"rope_theta": 500.0, "rope_scaling": {"rope_type": "proportional"}},
        "mrope": {"rope_theta": 500.0, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        "part": {"rope_theta": 500.0, "partial_rotary_factor": 0.5},
        "part 1": {"rope_theta": 500.0, "partial_rotary_factor": 1},
        "part null": {"rope_theta": 500.0, "partial_rotary_factor": None},
        "part in rope_parameters": {"rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5}},
        "part in both": {"partial_rotary_factor": 0.25, "rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5}},
        "rotary_pct": {"rotary_pct": 0.5, "rotary_emb_base": 500},
        "rotary_pct and part": {"rotary_pct": 0.5, "partial_rotary_factor": 0.25},
        "rotary_pct and rope_parameters": {"rotary_pct": 0.25, "rotary_emb_base": 700, "rope_parameters": DEFAULT},
        "rotary_emb_base and rope_theta": {"rotary_emb_base": 500, "rope_theta": 700.0},
        "local base": {"rope_theta": 500.0, "rope_local_base_freq": 50.0},
        "local base, nested": {
            "rope_local_base_freq": 70.0,
            "rope_parameters": {"full_attention": DEFAULT, "sliding_attention": LOCAL},
        },
        "local base, nested without bases": {
            "rope_theta": 500.0,
            "rope_local_base_freq": 70.0,
            "rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": None},
        },
        "nested, for layers without a window": {"rope_parameters": {"full_attention": DEFAULT}},
        "nested, for layers with a window": {"rope_parameters": {"sliding_attention": LOCAL}},
        "nested and flat": {"rope_parameters": DEFAULT | {"full_attention": LOCAL, "sliding_attention": LOCAL}},
        "nested, a part of each head": {
            "rope_parameters": {"full_attention": DEFAULT | {"partial_rotary_factor": 0.5}, "sliding_attention": LOCAL}
        },
        "nested, yarn truncate": {
            "rope_parameters": {"full_attention": DEFAULT | yarn | {"truncate": False}, "sliding_attention": LOCAL}
        },
        "longrope of old name": {CONTEXT: 16, "rope_scaling": longrope | {"rope_type": "su"}},
        "longrope of older name": {CONTEXT: 16, "rope_scaling": longrope | {"rope_type": "yarn"}},
        "longrope attention_factor": {CONTEXT: 16, "rope_scaling": longrope | {"attention_factor": 1.5}},
        "longrope factor": {CONTEXT: 16, "rope_scaling": longrope | {"factor": 3.0}},
        "rope_interleave": {"rope_theta": 500.0, "rope_interleave": False},
    }
    for extra in (
        {"attention_factor": 1.3},
        {"attention_factor": None},
        {"beta_fast": 20, "beta_slow": 2},
        {"beta_fast": None},
        {"mscale": 0.7, "mscale_all_dim": 1.3},
        {"mscale": 0.7},
        {"mscale_all_dim": 1.3},
        {"mscale": 1.0, "mscale_all_dim": 0.0},
        {"truncate": False},
        {"truncate": None},
        {"factor": None},
        {"factor": 1},
    ):
        found[f"yarn {extra}"] = {"rope_theta": 500.0, "rope_scaling": yarn | extra}
    for kind in SCALINGS:
        found |= spellings_of(kind)
    return found


def sizes_of(family: str) -> dict[str, Any]:
    """A tiny model without rotary fields, which rotates 16 elements of a head, or of GPT-NeoX a part of 64."""
    left_out = (
        "rope_parameters",
        CONTEXT,
        "experts_implementation",
        "no_rope_layer_interval",
        "mlp_only_layers",
        "layer_types",
    )
    sizes = {name: value for name, value in MODELS[family][1].items() if name not in left_out}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
    sizes |= {"hidden_size": 256 if family == "gpt_neox" else 64}
    if family.startswith("deepseek"):
        sizes |= {"num_key_value_heads": 4, "qk_rope_head_dim": 16, "first_k_dense_replace": 2}
    elif family != "gpt_neox":
        sizes |= {"num_key_value_heads": 2, "head_dim": 16}
    if family in WINDOWED:
        sizes |= {"layer_types": ["sliding_attention", "full_attention"]}
    if family == "gemma4":
        sizes |= {"global_head_dim": 16, "num_global_key_value_heads": 2}
    return sizes | {"model_type": f"{family}_text" if family in ("gemma3", "gemma4") else family}


Tables = list[tuple[Tensor, Tensor]]


def of_transformers(family: str, values: dict[str, Any]) -> tuple[Tables, float | None]:
    """Cosines and sines ``[s, d]`` of each kind of layer and length, and DeepSeek's factor of the scores."""
    import transformers

    config = transformers.CONFIG_MAPPING[values["model_type"]].from_dict(copy.deepcopy(values))
    module = sys.modules[transformers.AutoModel._model_mapping[type(config)].__module__]
    classes = {name: each for name, each in vars(module).items() if name.endswith("RotaryEmbedding")}
    # Gemma 4 has one for images too.
    rotary_class = classes.get("Gemma4TextRotaryEmbedding") or next(iter(classes.values()))
    rotary = rotary_class(config)
    kinds = [("full_attention",), ("sliding_attention",)] if family in WINDOWED else [()]
    tables = []
    for kind in kinds:
        for length in LENGTHS:
            found = rotary(torch.zeros(1), torch.arange(length).unsqueeze(0), *kind)
            cos, sin = (found.real, found.imag) if isinstance(found, Tensor) else found
            tables.append((cos[0].double(), sin[0].double()))
    return tables, module.DeepseekV3Attention(config, 0).scaling if family == "deepseek_v3" else None


def of_shardwise(family: str, values: dict[str, Any]) -> tuple[Tables, float | None]:
    """The same. What is written for the model must say the same again."""
    model = config_from_json(copy.deepcopy(values)).description
    for written in (config_to_json(model, architecture=values["model_type"]), config_to_json(model, base=values)):
        assert config_from_json(written).description == model
    width = model.kv_channels if model.latent is None else model.latent.rotary_width
    rotary = [RotaryEmbedding(width, model.rotary_percent, model.rotary_base, model.rope_scaling)]
    if family in WINDOWED:
        rotary.append(RotaryEmbedding(width, 1.0, model.window_rotary_base or model.rotary_base))
    tables = []
    for each in rotary:
        for length in LENGTHS:
            cos, sin = each(torch.arange(length), torch.float64, length=length)
            tables.append((cos[:, 0, 0], sin[:, 0, 0]))
    scale = None
    if family == "deepseek_v3":
        assert model.latent is not None
        scale = model.softmax_scale or model.latent.head_width**-0.5
    return tables, scale


def is_close(theirs: Tensor, ours: Tensor) -> bool:
    """Compare tables, of which transformers has each element twice, side by side or one after the other."""
    width = ours.size(-1)
    forms = {width: [theirs], 2 * width: [theirs[:, :width], theirs[:, ::2]]}.get(theirs.size(-1), [])
    # transformers computes angles of up to 100 in fp32.
    return any(torch.allclose(each, ours, rtol=0, atol=5e-5) for each in forms)


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    "family",
    [
        "gemma3",
        *(
            pytest.param(name, marks=[pytest.mark.slow, *([pytest.mark.matrix] if place % 2 else [])])
            for place, name in enumerate(FAMILIES)
            if name != "gemma3"
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_every_spelling(family: str) -> None:
    wrong, equal, refused = [], [], {}
    for name, fields in spellings().items():
        values = sizes_of(family) | fields
        try:
            expected = of_transformers(family, values)
        except Exception:
            # transformers cannot make a model of it.
            expected = None
        try:
            found = of_shardwise(family, values)
        except ConfigError as error:
            if expected is not None:
                refused[name] = str(error)
            continue
        if expected is None:
            continue
        pairs = list(zip(expected[0], found[0], strict=True))
        same = all(is_close(theirs, ours) for pair in pairs for theirs, ours in zip(*pair, strict=True))
        is_equal = same and expected[1] == (None if found[1] is None else pytest.approx(found[1], rel=1e-6))
        (equal if is_equal else wrong).append(name)
    assert not wrong, f"{family}: {len(wrong)} wrong: {wrong}"
    unnamed = [text for text in refused.values() if not re.search("rope|rotary|rotated", text)]
    assert not unnamed, unnamed
    # transformers itself reads few spellings of Phi-3, and ignores positions by kind of layer in others. Of OLMo 3 its
    # versions 4 and 5 read a base outside of rope_parameters differently. Ministral 3 has YaRN alone, and Gemma 4
    # no rope_scaling.
    least = {"phi3": 45, "gemma3": 90, "olmo3": 38, "ministral3": 10, "gemma4": 15}
    assert len(equal) >= least.get(family, 95), (len(equal), list(refused))


def test_gemma_4_has_no_rope_scaling():
    with pytest.raises(ConfigError, match="rope_scaling"):
        of_shardwise("gemma4", sizes_of("gemma4") | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}})
