"""Models in and out of Hugging Face's layout.

``architectures`` has one table for each family, of which stored tensors a parameter is made. Reading, each rank reads
only the slices that it holds; writing, no rank holds more than one whole parameter.
"""

from shardwise.models.description import (
    ModelDescription as ModelDescription,
    build_model as build_model,
    describe_model as describe_model,
    model_config as model_config,
)
from shardwise.storage.huggingface.exporting import save_pretrained as save_pretrained
from shardwise.storage.huggingface.loading import load_pretrained as load_pretrained
from shardwise.storage.huggingface.pretrained import (
    PretrainedConfig as PretrainedConfig,
    config_from_json as config_from_json,
    config_to_json as config_to_json,
    read_config as read_config,
)
from shardwise.storage.huggingface.quantizing import BaseQuantization as BaseQuantization
