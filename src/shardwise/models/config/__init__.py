"""What a model is and how its layers are made: dataclasses, validated when made."""

from shardwise.models.config.layer_config import LayerConfig as LayerConfig
from shardwise.models.config.model_config import ModelConfig as ModelConfig
from shardwise.models.config.recompute_config import (
    RECOMPUTE_MODULES as RECOMPUTE_MODULES,
    RecomputeConfig as RecomputeConfig,
)
