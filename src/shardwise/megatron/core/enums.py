"""Megatron's enums."""

from enum import Enum, StrEnum

from shardwise.megatron.absent import absent_names
from shardwise.models.transformer.masks import AttnMaskType

__getattr__ = absent_names("enums", "transformer.enums")

__all__ = ["AttnBackend", "AttnMaskType", "AttnType", "Fp8Recipe", "LayerType", "ModelType"]


class ModelType(Enum):
    """Kind of model: one stack of layers or two. Models here have one; older programs also name the other."""

    encoder_or_decoder = 1
    encoder_and_decoder = 2
    retro_encoder = 3
    retro_decoder = 4


class Fp8Recipe(StrEnum):
    """Scaling of products in fp8, which the config refuses; for programs that compare with it."""

    delayed = "delayed"
    tensorwise = "tensorwise"
    mxfp8 = "mxfp8"
    blockwise = "blockwise"
    custom = "custom"


class LayerType(Enum):
    """Kind of layer, for the distribution of layers over pipeline stages."""

    embedding = 1
    loss = 2
    encoder = 3
    decoder = 4
    mtp = 5


class AttnType(Enum):
    """Source of the attention keys."""

    self_attn = 1
    cross_attn = 2


class AttnBackend(Enum):
    """Attention kernel, for ``TransformerConfig.attention_backend``."""

    flash = 1
    fused = 2
    unfused = 3
    local = 4
    auto = 5
