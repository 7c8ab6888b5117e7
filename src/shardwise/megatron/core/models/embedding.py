"""Megatron's embedding of a language model."""

from torch.distributed import ProcessGroup

from shardwise.megatron.arguments import given
from shardwise.megatron.core.parallel_state import resolve_tensor_model_parallel_group
from shardwise.megatron.core.tensor_parallel.attributes import mark_replicas
from shardwise.megatron.core.transformer.transformer_config import TransformerConfig
from shardwise.models import token_embedding
from shardwise.models.token_embedding import PositionEmbedding

__all__ = ["LanguageModelEmbedding"]


class LanguageModelEmbedding(token_embedding.TokenEmbedding):
    """``TokenEmbedding`` on the ambient tensor-parallel group if none is given; the arguments are the same."""

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        max_sequence_length: int,
        position_embedding_type: PositionEmbedding = "learned_absolute",
        num_tokentypes: int = 0,
        scatter_to_sequence_parallel: bool = True,
        tp_group: ProcessGroup | None = None,
    ) -> None:
        tp_group = resolve_tensor_model_parallel_group(tp_group)
        super().__init__(**given(locals()))
        mark_replicas(self)
