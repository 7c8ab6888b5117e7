"""What a model is and how its layers are made: dataclasses, validated when made."""

from shardwise.models.config.layers import LayerConfig as LayerConfig
from shardwise.models.config.model import ModelConfig as ModelConfig
from shardwise.models.config.recompute import RECOMPUTE_MODULES as RECOMPUTE_MODULES
from shardwise.models.config.recompute import RecomputeConfig as RecomputeConfig
