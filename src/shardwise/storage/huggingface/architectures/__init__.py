"""The architectures that can be read and written, one table each."""

from shardwise.storage.huggingface.architectures.architecture import Architecture
from shardwise.storage.huggingface.architectures.bert import BERT
from shardwise.storage.huggingface.architectures.bloom import BLOOM
from shardwise.storage.huggingface.architectures.gemma import GEMMA2, GEMMA3
from shardwise.storage.huggingface.architectures.gpt2 import GPT2
from shardwise.storage.huggingface.architectures.gpt_neox import GPT_NEOX
from shardwise.storage.huggingface.architectures.llama import GRANITE, LLAMA, MISTRAL, OLMO2
from shardwise.storage.huggingface.architectures.opt import OPT
from shardwise.storage.huggingface.architectures.phi3 import PHI3
from shardwise.storage.huggingface.architectures.qwen import QWEN2, QWEN3
from shardwise.storage.huggingface.architectures.smollm3 import SMOLLM3

_ALL = (
    GPT2,
    BLOOM,
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    BERT,
    PHI3,
    SMOLLM3,
    GRANITE,
    OLMO2,
    GEMMA2,
    GEMMA3,
    GPT_NEOX,
    OPT,
)
ARCHITECTURES = {each.model_type: each for each in _ALL}
"""By ``model_type``, in the order in which they are tried for a model that does not say which it is."""

__all__ = ["ARCHITECTURES", "Architecture"]
