"""What a model is and how it is split: dataclasses, validated when made."""

from shardwise.config.model_parallel import ModelParallelConfig
from shardwise.config.transformer import Normalization, TransformerConfig

__all__ = ["ModelParallelConfig", "Normalization", "TransformerConfig"]
