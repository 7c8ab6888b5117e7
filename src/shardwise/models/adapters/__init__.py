"""Low-rank adapters on layers that are split over ranks."""

from shardwise.models.adapters.adapter import LoraAdapter as LoraAdapter
from shardwise.models.adapters.config import ALL_LINEAR as ALL_LINEAR
from shardwise.models.adapters.config import LoraConfig as LoraConfig
from shardwise.models.adapters.lora_embedding import LoraEmbedding as LoraEmbedding
from shardwise.models.adapters.lora_layers import LoraColumn as LoraColumn
from shardwise.models.adapters.lora_layers import LoraLayer as LoraLayer
from shardwise.models.adapters.lora_layers import LoraLinear as LoraLinear
from shardwise.models.adapters.lora_layers import LoraRow as LoraRow
