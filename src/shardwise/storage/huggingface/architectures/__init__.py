"""The supported architectures, with a table for each."""

from shardwise.storage.huggingface.architectures.architecture import Architecture
from shardwise.storage.huggingface.architectures.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from shardwise.storage.huggingface.architectures.gemma import GEMMA2, GEMMA3, GEMMA4
from shardwise.storage.huggingface.architectures.gpt_and_bert import BERT, BLOOM, GPT2, GPT_NEOX, OPT
from shardwise.storage.huggingface.architectures.gpt_oss import GPT_OSS
from shardwise.storage.huggingface.architectures.llama import (
    GRANITE,
    LLAMA,
    MISTRAL,
    OLMO2,
    OLMO3,
    PHI3,
    QWEN2,
    QWEN3,
    SMOLLM3,
)
from shardwise.storage.huggingface.architectures.ministral import MINISTRAL, MINISTRAL3
from shardwise.storage.huggingface.architectures.mixtures import (
    GLM4_MOE,
    GRANITEMOE,
    MIXTRAL,
    OLMOE,
    QWEN2_MOE,
    QWEN3_MOE,
)

_ALL = (
    *(GPT2, BLOOM, LLAMA, MISTRAL, QWEN2, QWEN3, BERT, PHI3, SMOLLM3, GRANITE, OLMO2, GEMMA2, GEMMA3, GPT_NEOX, OPT),
    *(OLMO3, MINISTRAL, MINISTRAL3, GEMMA4),
    *(MIXTRAL, QWEN3_MOE, OLMOE, QWEN2_MOE, GLM4_MOE, GRANITEMOE, DEEPSEEK_V2, DEEPSEEK_V3, GPT_OSS),
)
ARCHITECTURES = {each.model_type: each for each in _ALL}
"""Architectures by ``model_type``, in the order in which they are tried if none is given."""

__all__ = ["ARCHITECTURES", "Architecture"]
