"""Low-rank adapters on a model split over ranks, in the files of the ``peft`` library."""

from shardwise.lora.adapter import LoraAdapter as LoraAdapter
from shardwise.lora.adapter_files import load_adapter_ as load_adapter_
from shardwise.lora.adapter_files import save_adapter as save_adapter
from shardwise.lora.config import ALL_LINEAR as ALL_LINEAR
from shardwise.lora.config import LoraConfig as LoraConfig
from shardwise.lora.config_file import read_adapter_config as read_adapter_config
from shardwise.lora.embedding import LoraEmbedding as LoraEmbedding
from shardwise.lora.layers import LoraColumn as LoraColumn
from shardwise.lora.layers import LoraLayer as LoraLayer
from shardwise.lora.layers import LoraLinear as LoraLinear
from shardwise.lora.layers import LoraRow as LoraRow
from shardwise.lora.model import add_lora_ as add_lora_
from shardwise.lora.model import lora_disabled as lora_disabled
from shardwise.lora.model import lora_layers as lora_layers
from shardwise.lora.model import merge_lora_ as merge_lora_
from shardwise.lora.model import remove_lora_ as remove_lora_
from shardwise.lora.model import unmerge_lora_ as unmerge_lora_
