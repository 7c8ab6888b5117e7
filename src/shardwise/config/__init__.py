"""What a model is and how its layers are made: dataclasses, validated when made."""

from shardwise.config.layers import LayerConfig as LayerConfig
from shardwise.config.model import ModelConfig as ModelConfig
from shardwise.config.model import Normalization as Normalization
from shardwise.config.recompute import RECOMPUTE_MODULES as RECOMPUTE_MODULES
from shardwise.config.recompute import RecomputeConfig as RecomputeConfig
