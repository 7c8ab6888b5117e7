"""Megatron's embedding whose vocabulary is split over the ranks."""

from __future__ import annotations

from torch.distributed import ProcessGroup

from shardwise.core.initialization import InitMethod
from shardwise.megatron.core.process_groups_config import ProcessGroupCollection
from shardwise.megatron.core.tensor_parallel.module import MegatronLayer
from shardwise.megatron.core.transformer.transformer_config import ModelParallelConfig
from shardwise.nn.embedding import VocabEmbedding


class VocabParallelEmbedding(MegatronLayer, VocabEmbedding):
    """``VocabEmbedding`` as Megatron has it: from a config.

    Args:
        num_embeddings: size of the vocabulary, of any size.
        embedding_dim: width of an embedding, ``h``.
        init_method: fills the whole weight in place.
        reduce_scatter_embeddings: return this rank's shard of the sequence, ``[s/t, b, h]``.
        config: dtype and initialisation; with ``deterministic_mode`` the gradient is summed in a fixed order.
        tp_group: tensor-parallel group; that of ``pg_collection`` if None, and the ambient one where it has none.
        pg_collection: process groups, of which the layer takes ``tp``.
        name: changes nothing.

    Attributes:
        weight: ``[v/t, h]``.
        vocab_start_index, vocab_end_index: ids on this rank, the end excluded.
        num_embeddings_per_partition: number of ids on this rank.

    Raises:
        TopologyError: no group given and none initialised.

    Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: InitMethod,
        reduce_scatter_embeddings: bool = False,
        config: ModelParallelConfig,
        tp_group: ProcessGroup | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
    ) -> None:
        VocabEmbedding.__init__(
            self,
            num_embeddings,
            embedding_dim,
            sequence_parallel=reduce_scatter_embeddings,
            init=init_method,
            deterministic=config.deterministic_mode,
            **self._arguments(config, tp_group, pg_collection, linear=False),
        )
        self.reduce_scatter_embeddings = reduce_scatter_embeddings
        self.deterministic_mode = config.deterministic_mode
        self.num_embeddings_per_partition = self.vocab_end_index - self.vocab_start_index
