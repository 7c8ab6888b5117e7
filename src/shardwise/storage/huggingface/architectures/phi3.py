"""Phi-3 and Phi-4: Llama with joint tensors (query, key and value; gate and up), and a share of each head rotated."""

from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.storage.huggingface.architectures.architecture import Setting
from shardwise.storage.huggingface.architectures.classifier import classifiers
from shardwise.storage.huggingface.architectures.llama import TABLE, Decoder, decoder_settings
from shardwise.storage.huggingface.description import ModelDescription
from shardwise.storage.huggingface.fields import Fields
from shardwise.storage.huggingface.mapping import joint_qkv, whole
from shardwise.storage.huggingface.rope import read_rope, rope_json

_LAYER, _STORED = "decoder.layers.{layer}.", "model.layers.{layer}."


class _Phi3(Decoder):
    def read_others(self, fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
        dropout = fields.get(float, "embd_pdrop", default=0.0)
        if dropout != values["hidden_dropout"]:
            raise fields.error("embd_pdrop", dropout, f"resid_pdrop, {values['hidden_dropout']}")
        return super().read_others(fields, values)

    def write_others(self, model: ModelDescription) -> dict[str, Any]:
        # The default of padding is an id that smaller vocabularies lack.
        return {"embd_pdrop": model.hidden_dropout, "pad_token_id": None, **super().write_others(model)}

    def read_window(self, fields: Fields, num_layers: int) -> tuple[int | None, tuple[bool, ...] | None]:
        return fields.optional(int, "sliding_window"), None

    def write_window(self, window: int | None, layers: Sequence[bool]) -> dict[str, Any]:
        return {"sliding_window": window}

    def read_positions(self, fields: Fields, longest: int) -> dict[str, Any]:
        return read_rope(fields, longest, share=1.0)

    def write_positions(self, model: ModelDescription) -> dict[str, Any]:
        written = rope_json(model)
        context = None if model.rope_scaling is None else model.rope_scaling.original_max_position_embeddings
        # Readers take it from here, and not from beside the factors.
        return written if context is None else {"original_max_position_embeddings": context, **written}


PHI3 = _Phi3(
    model_type="phi3",
    classes=("Phi3ForCausalLM", "Phi3Model"),
    classifiers=classifiers("Phi3"),
    settings={
        **decoder_settings(intermediate_size=8192, vocab_size=32064, max_position_embeddings=4096),
        "hidden_size": Setting("hidden_size", 3072),
        "layernorm_epsilon": Setting("rms_norm_eps", 1e-5),
        "hidden_dropout": Setting("resid_pdrop", 0.0),
    },
    table=TABLE
    | {
        _LAYER + "self_attention.linear_qkv.*": joint_qkv(_STORED + "self_attn.qkv_proj.*"),
        _LAYER + "mlp.linear_fc1.*": whole(_STORED + "mlp.gate_up_proj.*"),
    },
)
