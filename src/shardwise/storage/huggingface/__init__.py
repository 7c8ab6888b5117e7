"""Load models from Hugging Face folders and save them.

``architectures`` has a table for each model type. When loading, a rank reads only its own slices; when saving, it holds
at most one whole parameter.
"""

from shardwise.models.description import (
    build_model as build_model,
    describe_model as describe_model,
    model_config as model_config,
)
from shardwise.storage.huggingface.exporting import save_pretrained as save_pretrained
from shardwise.storage.huggingface.loading import (
    BaseQuantization as BaseQuantization,
    load_pretrained as load_pretrained,
)
from shardwise.storage.huggingface.pretrained import (
    PretrainedConfig as PretrainedConfig,
    config_from_json as config_from_json,
    config_to_json as config_to_json,
    read_config as read_config,
)
