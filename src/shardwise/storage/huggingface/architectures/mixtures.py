"""Decoders with experts: Mixtral, Qwen 2 and 3 MoE, OLMoE, GLM 4.5, Granite MoE.

They are Mistral, Qwen 2 and 3, Granite, and Llama with a norm over all queries and one over all keys, with experts
instead of the MLP of some or all layers. Qwen 2 MoE has a shared expert with a gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardwise.core.errors import ConfigError
from shardwise.models.config import ModelConfig
from shardwise.models.experts import Experts
from shardwise.storage.huggingface.architectures.architecture import Architecture, Setting
from shardwise.storage.huggingface.architectures.llama import (
    GRANITE,
    LLAMA,
    QK_NORMS,
    QWEN2,
    QWEN3,
    TABLE,
    Decoder,
    Mistral,
    decoder_settings,
)
from shardwise.storage.huggingface.fields import Fields, read_rope, rope_json
from shardwise.storage.huggingface.mapping import Table, joint_experts, stacked, stacked_experts, whole

_MLP = "decoder.layers.{layer}.mlp."
_STORED = "model.layers.{layer}.mlp."


def _table_of_experts(router: str, gate: str, up: str, down: str) -> Table:
    return {
        _MLP + "router.weight": whole(router),
        _MLP + "experts.up": stacked_experts(gate, up),
        _MLP + "experts.down": stacked_experts(down, transposed=True),
    }


_EXPERT = _STORED + "experts.{expert}."
EXPERTS = _table_of_experts(
    _STORED + "gate.weight",
    _EXPERT + "gate_proj.weight",
    _EXPERT + "up_proj.weight",
    _EXPERT + "down_proj.weight",
)
_SHARED = {
    _MLP + "shared.linear_fc1.weight": stacked(
        _STORED + "shared_expert.gate_proj.weight", _STORED + "shared_expert.up_proj.weight"
    ),
    _MLP + "shared.linear_fc2.weight": whole(_STORED + "shared_expert.down_proj.weight"),
    _MLP + "shared_gate.weight": whole(_STORED + "shared_expert_gate.weight"),
}
_SHARED_EXPERTS = _STORED + "shared_experts."
EXPERTS_AND_SHARED = {
    **EXPERTS,
    _MLP + "shared.linear_fc1.weight": stacked(
        _SHARED_EXPERTS + "gate_proj.weight", _SHARED_EXPERTS + "up_proj.weight"
    ),
    _MLP + "shared.linear_fc2.weight": whole(_SHARED_EXPERTS + "down_proj.weight"),
}
SELECTION_BIAS = {_MLP + "router.selection_bias": whole(_STORED + "gate.e_score_correction_bias")}
_BLOCK = "model.layers.{layer}.block_sparse_moe."
MODULE_TARGETS = {
    "gate": "gate.weight",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "down_proj": "down_proj",
}
"""Parameters that ``peft`` adapts for targets by the names of transformers 4."""


@dataclass(frozen=True, kw_only=True)
class WithExperts(Architecture):
    """A decoder with experts, read and written by another architecture except for its experts.

    Attributes:
        decoder: architecture of all but the experts.
        names: field of ``config.json`` for the number of experts, its synonyms, and the default.
        width: field of an expert's width, and its default.
        per_token: default of ``num_experts_per_tok``; None if the field must be given.
        normalizes: default of ``norm_topk_prob``; None if there is no such field, and weights are normalized.
        chooses_layers: whether ``decoder_sparse_step`` and ``mlp_only_layers`` say which layers have experts.
        shared: default of ``shared_expert_intermediate_size``; None if there is no shared expert.
        aux_loss: default of ``router_aux_loss_coef``; None if ``output_router_logits`` adds no loss in transformers.
    """

    decoder: Architecture
    names: tuple[str, ...]
    num: int = 8
    width: tuple[str, int]
    per_token: int | None = 2
    normalizes: bool | None = None
    chooses_layers: bool = False
    shared: int | None = None
    aux_loss: float | None = 0.001
    parameters: Mapping[str, str] = field(
        default_factory=lambda: {
            _MLP + "router.weight": _STORED + "gate.weight",
            _MLP + "experts.up": _STORED + "experts.gate_up_proj",
            _MLP + "experts.down": _STORED + "experts.down_proj",
        }
    )

    @property
    def fused(self) -> Table:
        """Rows with the names in modules of transformers 5."""
        router, up, down = (self.parameters[_MLP + name] for name in ("router.weight", "experts.up", "experts.down"))
        return {
            _MLP + "router.weight": whole(router),
            _MLP + "experts.up": joint_experts(up),
            _MLP + "experts.down": joint_experts(down, transposed=True),
        }

    def read_others(self, fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
        experts = self.read_experts(fields, values["num_layers"])
        if self.aux_loss is not None and fields.get(bool, "output_router_logits", default=False):
            coefficient = fields.get(float, "router_aux_loss_coef", default=self.aux_loss)
            experts = replace(experts, aux_loss=coefficient, balances="global", pools_layers=coefficient != 0)
        if experts.per_token == 1 and experts.normalizes_weights:
            # ``Router`` does not normalize a single weight, because it would be 1 at every score.
            raise fields.error("num_experts_per_tok", 1, "at least 2, as weights are divided by their sum")
        return {**self.decoder.read_others(fields, values), "experts": experts}

    def read_experts(self, fields: Fields, num_layers: int) -> Experts:
        """Read the experts."""
        shared = None
        if self.shared is not None:
            shared = fields.get(int, "shared_expert_intermediate_size", default=self.shared)
        num = fields.get(int, *self.names, default=self.num)
        per_token = fields.get(int, "num_experts_per_tok", default=self.per_token)
        if per_token > num:
            raise fields.error("num_experts_per_tok", per_token, f"at most {num}, the number of experts")
        return Experts(
            num=num,
            per_token=per_token,
            ffn_hidden_size=fields.get(int, self.width[0], default=self.width[1]),
            layers=self._read_layers(fields, num_layers) if self.chooses_layers else None,
            normalizes_weights=self.normalizes is None or fields.get(bool, "norm_topk_prob", default=self.normalizes),
            shared_ffn_hidden_size=shared,
            shared_gate=shared is not None,
        )

    def write_others(self, model: ModelConfig) -> dict[str, Any]:
        experts = model.experts
        if experts is None:
            raise ConfigError(f"{self.model_type} models have experts, and this one has none")
        if experts.per_token == 1 and experts.normalizes_weights:
            raise ConfigError(
                "the weight of a token's only expert is its score here, and 1 in transformers; set "
                "Experts.normalizes_weights to False, or use more experts per token"
            )
        loss = {"output_router_logits": True, "router_aux_loss_coef": experts.aux_loss} if experts.pools_layers else {}
        return {**self.decoder.write_others(model), **self.write_experts(experts, model), **loss}

    def write_experts(self, experts: Experts, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of the experts."""
        layers = experts.layers or (True,) * model.num_layers
        written: dict[str, Any] = {
            self.names[0]: experts.num,
            "num_experts_per_tok": experts.per_token,
            self.width[0]: experts.ffn_hidden_size,
        }
        if self.normalizes is not None:
            written["norm_topk_prob"] = experts.normalizes_weights
        if self.chooses_layers:
            written |= {"decoder_sparse_step": 1, "mlp_only_layers": [at for at, has in enumerate(layers) if not has]}
        if self.shared is not None:
            written["shared_expert_intermediate_size"] = experts.shared_ffn_hidden_size
        return written

    def _read_layers(self, fields: Fields, num_layers: int) -> tuple[bool, ...] | None:
        every = fields.get(int, "decoder_sparse_step", default=1, within=(1, 1 << 16))
        dense: Any = fields.values.get("mlp_only_layers") or []
        if not isinstance(dense, list) or any(type(each) is not int for each in dense):
            raise fields.error("mlp_only_layers", dense, "a list of layers")
        dense = set(dense)
        layers = tuple(at not in dense and (at + 1) % every == 0 for at in range(num_layers))
        return None if all(layers) else layers


class _Mixtral(Mistral):
    default_window = None

    def read_positions(self, fields: Fields, longest: int) -> dict[str, Any]:
        return read_rope(fields, longest, theta=1e6)


class _Olmoe(Decoder):
    def read_others(self, fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
        return {"clip_qkv": fields.optional(float, "clip_qkv"), **super().read_others(fields, values)}

    def write_others(self, model: ModelConfig) -> dict[str, Any]:
        return {"clip_qkv": model.clip_qkv, **super().write_others(model)}


class _Glm(Decoder):
    def read_others(self, fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
        # The heads' width is rounded down.
        width = values["hidden_size"] // max(1, values["num_attention_heads"])
        if fields.values.get("head_dim") is None:
            fields = Fields({**fields.values, "head_dim": width}, fields.where)
        return super().read_others(fields, values)

    def read_positions(self, fields: Fields, longest: int) -> dict[str, Any]:
        # Null means the whole head.
        return read_rope(fields, longest, share=1.0 if "partial_rotary_factor" in fields.values else 0.5)

    def write_positions(self, model: ModelConfig) -> dict[str, Any]:
        return {**rope_json(model), "partial_rotary_factor": model.rotary_percent}


@dataclass(frozen=True, kw_only=True)
class AfterDenseLayers(WithExperts):
    """Experts after dense layers, chosen in groups by sigmoids with a bias (GLM 4.5, DeepSeek V3), and the defaults."""

    aux_loss: float | None = None
    num_dense: int = 1
    num_shared: int = 1
    scale: float = 1.0
    groups: tuple[int, int] = (1, 1)

    def read_experts(self, fields: Fields, num_layers: int) -> Experts:
        dense = fields.get(int, "first_k_dense_replace", default=self.num_dense)
        width = fields.get(int, self.width[0], default=self.width[1])
        shared = fields.get(int, "n_shared_experts", default=self.num_shared, within=(1, 1 << 16))
        return replace(
            super().read_experts(fields, num_layers),
            layers=tuple(at >= dense for at in range(num_layers)) if dense > 0 else None,
            weight_scale=fields.get(float, "routed_scaling_factor", default=self.scale),
            shared_ffn_hidden_size=width * shared,
            **self.read_choice(fields),
        )

    def read_choice(self, fields: Fields) -> dict[str, Any]:
        """Return the fields of ``Experts`` about the choice of experts."""
        return {
            "scores": "sigmoid",
            "selection_bias": True,
            "normalizes_weights": fields.get(bool, "norm_topk_prob", default=True),
            "num_groups": fields.get(int, "n_group", default=self.groups[0]),
            "groups_per_token": fields.get(int, "topk_group", default=self.groups[1]),
        }

    def write_experts(self, experts: Experts, model: ModelConfig) -> dict[str, Any]:
        layers = experts.layers or (True,) * model.num_layers
        return {
            **super().write_experts(experts, model),
            "first_k_dense_replace": layers.index(True) if True in layers else len(layers),
            "norm_topk_prob": experts.normalizes_weights,
            "routed_scaling_factor": experts.weight_scale,
            "n_group": experts.num_groups,
            "topk_group": experts.groups_per_token,
            "n_shared_experts": (experts.shared_ffn_hidden_size or 0) // experts.ffn_hidden_size,
        }


class _GraniteMoe(WithExperts):
    """Granite MoE: the softmax is over the logits of the chosen experts."""

    def read_experts(self, fields: Fields, num_layers: int) -> Experts:
        experts = super().read_experts(fields, num_layers)
        return replace(experts, softmax_after_choice=True, normalizes_weights=False)


def tied_of(decoder: Architecture) -> dict[str, Any]:
    """Return the arguments that an architecture with experts shares with its decoder."""
    names = ("fixed", "prefix", "tied", "ignored")
    return {name: getattr(decoder, name) for name in names}


_MIXTRAL = _Mixtral(model_type="mixtral", classes=(), settings={}, num_key_value_heads=8)
MIXTRAL = WithExperts(
    **tied_of(_MIXTRAL),
    model_type="mixtral",
    classes=("MixtralForCausalLM", "MixtralModel"),
    settings=decoder_settings(ffn_hidden_size=14336, max_sequence_length=4096 * 32, layernorm_epsilon=1e-5),
    required={"router_jitter_noise": 0.0},
    table={
        **TABLE,
        **_table_of_experts(
            _BLOCK + "gate.weight",
            _BLOCK + "experts.{expert}.w1.weight",
            _BLOCK + "experts.{expert}.w3.weight",
            _BLOCK + "experts.{expert}.w2.weight",
        ),
    },
    decoder=_MIXTRAL,
    names=("num_local_experts", "num_experts"),
    width=("intermediate_size", 14336),
    module_targets={"gate": "gate.weight", "w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"},
)
QWEN2_MOE = WithExperts(
    **tied_of(QWEN2),
    model_type="qwen2_moe",
    classes=("Qwen2MoeForCausalLM", "Qwen2MoeModel"),
    settings=decoder_settings(
        vocab_size=151936,
        hidden_size=2048,
        num_layers=24,
        num_attention_heads=16,
        ffn_hidden_size=5632,
        max_sequence_length=32768,
    )
    | {"add_qkv_bias": Setting("qkv_bias", True)},
    table={**TABLE, **EXPERTS, **_SHARED},
    decoder=replace(QWEN2, num_key_value_heads=16),
    names=("num_experts",),
    num=60,
    width=("moe_intermediate_size", 1408),
    per_token=4,
    normalizes=False,
    chooses_layers=True,
    shared=5632,
)
QWEN3_MOE = WithExperts(
    **tied_of(QWEN3),
    model_type="qwen3_moe",
    classes=("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    settings=decoder_settings(
        vocab_size=151936, hidden_size=2048, num_layers=24, ffn_hidden_size=6144, max_sequence_length=32768
    )
    | {"attention_bias": Setting("attention_bias", False)},
    table={**TABLE, **EXPERTS, **QK_NORMS},
    decoder=replace(QWEN3, num_key_value_heads=4, head_dim=None),
    names=("num_experts", "num_local_experts"),
    num=128,
    width=("moe_intermediate_size", 768),
    module_targets=MODULE_TARGETS,
    per_token=8,
    normalizes=False,
    chooses_layers=True,
)
_OLMOE = _Olmoe(
    model_type="olmoe",
    classes=(),
    settings={},
    fixed={**LLAMA.fixed, "qk_layernorm": True, "qk_layernorm_over_heads": True},
)
OLMOE = WithExperts(
    **tied_of(_OLMOE),
    model_type="olmoe",
    classes=("OlmoeForCausalLM", "OlmoeModel"),
    settings=decoder_settings(
        vocab_size=50304,
        hidden_size=2048,
        num_layers=16,
        num_attention_heads=16,
        ffn_hidden_size=2048,
        max_sequence_length=4096,
        layernorm_epsilon=1e-5,
    )
    | {"attention_bias": Setting("attention_bias", False)},
    table={**TABLE, **EXPERTS, **QK_NORMS},
    decoder=_OLMOE,
    names=("num_experts", "num_local_experts"),
    num=64,
    width=("intermediate_size", 2048),
    module_targets=MODULE_TARGETS,
    per_token=8,
    normalizes=False,
    aux_loss=0.01,
)
_GLM_SETTINGS = {
    **decoder_settings(
        vocab_size=151552,
        num_layers=46,
        num_attention_heads=96,
        ffn_hidden_size=10944,
        max_sequence_length=131072,
        layernorm_epsilon=1e-5,
    ),
    "add_qkv_bias": Setting("attention_bias", False),
    "qk_layernorm": Setting("use_qk_norm", False),
}
_GLM = _Glm(model_type="glm4_moe", classes=(), settings=_GLM_SETTINGS, num_key_value_heads=8)
GLM4_MOE = AfterDenseLayers(
    **tied_of(_GLM),
    has_mtp=True,
    model_type="glm4_moe",
    classes=("Glm4MoeForCausalLM", "Glm4MoeModel"),
    settings=_GLM_SETTINGS,
    table={
        **TABLE,
        **EXPERTS_AND_SHARED,
        **QK_NORMS,
        **SELECTION_BIAS,
    },
    decoder=_GLM,
    names=("n_routed_experts", "num_local_experts"),
    num=128,
    width=("moe_intermediate_size", 1408),
    module_targets=MODULE_TARGETS,
    per_token=8,
)
GRANITEMOE = _GraniteMoe(
    **tied_of(GRANITE),
    model_type="granitemoe",
    classes=("GraniteMoeForCausalLM", "GraniteMoeModel"),
    settings={name: setting for name, setting in GRANITE.settings.items() if name != "add_bias_linear"},
    table={
        **TABLE,
        _MLP + "router.weight": whole(_BLOCK + "router.layer.weight"),
        _MLP + "experts.up": joint_experts(_BLOCK + "input_linear.weight"),
        _MLP + "experts.down": joint_experts(_BLOCK + "output_linear.weight", transposed=True),
    },
    decoder=GRANITE,
    names=("num_local_experts",),
    width=("intermediate_size", 11008),
    parameters={
        _MLP + "router.weight": _BLOCK + "router.weight",
        _MLP + "experts.up": _BLOCK + "experts.gate_up_proj",
        _MLP + "experts.down": _BLOCK + "experts.down_proj",
    },
)
