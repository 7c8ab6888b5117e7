"""Megatron's enums."""

from enum import Enum

from shardwise.models.transformer.masks import AttnMaskType

__all__ = ["AttnBackend", "AttnMaskType", "AttnType", "LayerType", "ModelType"]


class ModelType(Enum):
    """Kind of model: one stack of layers; or two, which programs for earlier versions ask about, and none is here."""

    encoder_or_decoder = 1
    encoder_and_decoder = 2


class LayerType(Enum):
    """Kind of layer, where layers are dealt out to pipeline stages."""

    embedding = 1
    loss = 2
    encoder = 3
    decoder = 4
    mtp = 5


class AttnType(Enum):
    """Source of the keys that attention reads."""

    self_attn = 1
    cross_attn = 2


class AttnBackend(Enum):
    """Kernel of attention, for ``TransformerConfig.attention_backend``."""

    flash = 1
    fused = 2
    unfused = 3
    local = 4
    auto = 5
