"""Language models built from the transformer. PyTorch is imported on the first access to a name."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.models.bert import Bert as Bert
    from shardwise.models.config import LayerConfig as LayerConfig, ModelConfig as ModelConfig
    from shardwise.models.experts import Experts as Experts
    from shardwise.models.gpt import GPT as GPT
    from shardwise.models.recomputation import Recomputation as Recomputation
    from shardwise.models.transformer.heads import LatentAttention as LatentAttention

_MODULES = {
    "Bert": "bert",
    "Experts": "experts",
    "GPT": "gpt",
    "LatentAttention": "transformer.heads",
    "LayerConfig": "config",
    "ModelConfig": "config",
    "Recomputation": "recomputation",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'shardwise.models' has no attribute {name!r}")
    return getattr(import_module(f"shardwise.models.{_MODULES[name]}"), name)
