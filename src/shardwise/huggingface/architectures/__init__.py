"""The architectures that can be read and written, one table each."""

from shardwise.huggingface.architectures.architecture import Architecture
from shardwise.huggingface.architectures.bert import BERT
from shardwise.huggingface.architectures.bloom import BLOOM
from shardwise.huggingface.architectures.gpt2 import GPT2
from shardwise.huggingface.architectures.llama import LLAMA, MISTRAL
from shardwise.huggingface.architectures.qwen import QWEN2, QWEN3

ARCHITECTURES = {each.model_type: each for each in (GPT2, BLOOM, LLAMA, MISTRAL, QWEN2, QWEN3, BERT)}
"""By ``model_type``, in the order in which they are tried for a model that does not say which it is."""

__all__ = ["ARCHITECTURES", "Architecture"]
