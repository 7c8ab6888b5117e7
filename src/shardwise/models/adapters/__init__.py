"""Low-rank adapters for layers that are split over ranks."""

from shardwise.models.adapters.adapter import LoraAdapter as LoraAdapter
from shardwise.models.adapters.config import ALL_LINEAR as ALL_LINEAR, LoraConfig as LoraConfig
from shardwise.models.adapters.lora_embedding import LoraEmbedding as LoraEmbedding
from shardwise.models.adapters.lora_experts import LoraExperts as LoraExperts, LoraRouter as LoraRouter
from shardwise.models.adapters.lora_layers import (
    LoraColumn as LoraColumn,
    LoraLayer as LoraLayer,
    LoraLinear as LoraLinear,
    LoraRow as LoraRow,
)
