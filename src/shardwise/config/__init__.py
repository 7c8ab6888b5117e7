"""What a model is and how its layers are made: dataclasses, validated when made."""

from shardwise.config.layers import LayerConfig
from shardwise.config.model import ModelConfig, Normalization

__all__ = ["LayerConfig", "ModelConfig", "Normalization"]
