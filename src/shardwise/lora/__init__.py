"""Low-rank adapters on a model split over ranks, in the files of the ``peft`` library."""

from shardwise.lora.adapter_files import load_adapter_, read_adapter_config, save_adapter
from shardwise.lora.config import ALL_LINEAR, LoraConfig
from shardwise.lora.layers import LoraAdapter, LoraColumn, LoraLinear, LoraRow
from shardwise.lora.model import (
    add_lora_,
    lora_disabled,
    lora_layers,
    merge_lora_,
    remove_lora_,
    unmerge_lora_,
)

__all__ = [
    "ALL_LINEAR",
    "LoraAdapter",
    "LoraColumn",
    "LoraConfig",
    "LoraLinear",
    "LoraRow",
    "add_lora_",
    "load_adapter_",
    "lora_disabled",
    "lora_layers",
    "merge_lora_",
    "read_adapter_config",
    "remove_lora_",
    "save_adapter",
    "unmerge_lora_",
]
