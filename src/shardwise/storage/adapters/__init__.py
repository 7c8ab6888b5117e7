"""Adapters in the file format of the ``peft`` library: load, save, add to a model, merge."""

from shardwise.storage.adapters.adapter_files import (
    adapters_vocab_size as adapters_vocab_size,
    load_adapter_ as load_adapter_,
    save_adapter as save_adapter,
)
from shardwise.storage.adapters.config_file import read_adapter_config as read_adapter_config
from shardwise.storage.adapters.model import (
    add_lora_ as add_lora_,
    lora_disabled as lora_disabled,
    lora_layers as lora_layers,
    merge_lora_ as merge_lora_,
    remove_lora_ as remove_lora_,
    unmerge_lora_ as unmerge_lora_,
)
