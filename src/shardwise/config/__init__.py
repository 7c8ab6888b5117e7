"""What a model is and how its layers are made: dataclasses, validated when made."""

from shardwise.config.layers import LayerConfig
from shardwise.config.model import ModelConfig, Normalization
from shardwise.config.recompute import RECOMPUTE_MODULES, RecomputeConfig

__all__ = ["RECOMPUTE_MODULES", "LayerConfig", "ModelConfig", "Normalization", "RecomputeConfig"]
