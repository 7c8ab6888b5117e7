"""Models in and out of Hugging Face's layout: GPT-2, BLOOM, Llama 3, Mistral, Qwen 2, Qwen 3 and BERT.

One table per architecture says which stored tensors a parameter is made of. Reading, each rank reads only the slices
that it holds; writing, no rank holds more than one whole parameter.
"""

from shardwise.huggingface.building import build_model, describe_model, model_config
from shardwise.huggingface.description import ModelDescription
from shardwise.huggingface.loading import load_pretrained
from shardwise.huggingface.pretrained import PretrainedConfig, config_from_json, config_to_json, read_config
from shardwise.huggingface.saving import save_pretrained

__all__ = [
    "ModelDescription",
    "PretrainedConfig",
    "build_model",
    "config_from_json",
    "config_to_json",
    "describe_model",
    "load_pretrained",
    "model_config",
    "read_config",
    "save_pretrained",
]
