"""The embedding whose vocabulary is split over the ranks."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.collectives import moves
from shardwise.collectives.primitives import check_alike
from shardwise.config import ModelParallelConfig
from shardwise.initialization import InitMethod
from shardwise.sharding import ParamLayout
from shardwise.tensor_parallel.module import TensorParallelModule
from shardwise.validation import check_ids


class VocabParallelEmbedding(TensorParallelModule):
    """Embedding whose rows, the vocabulary, are split over the ranks by the balanced rule.

    Args:
        num_embeddings: size of the vocabulary, of any size.
        embedding_dim: width of an embedding, ``h``.
        init_method: fills the whole weight in place.
        reduce_scatter_embeddings: return this rank's shard of the sequence, ``[s/t, b, h]``.
        config: dtype and initialisation; with ``deterministic_mode`` the gradient is summed in a fixed order.
        tp_group: tensor-parallel group; the ambient one if None.

    Attributes:
        weight: ``[v/t, h]``.
        vocab_start_index, vocab_end_index: ids on this rank, the end excluded.
        num_embeddings_per_partition: number of ids on this rank.

    Raises:
        TopologyError: no group given and none initialised.

    Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3.
    """

    _allow_shape_mismatch = True

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: InitMethod,
        reduce_scatter_embeddings: bool = False,
        config: ModelParallelConfig,
        tp_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(config, tp_group)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.reduce_scatter_embeddings = reduce_scatter_embeddings
        self.deterministic_mode = config.deterministic_mode
        layout = ParamLayout.split((num_embeddings, embedding_dim), 0, self.tp_size)
        self.vocab_start_index, self.vocab_end_index = layout.intervals[self.tp_rank][0]
        self.num_embeddings_per_partition = self.vocab_end_index - self.vocab_start_index
        self.weight: Tensor
        self._make_parameter("weight", layout, init_method)

    def forward(self, input_: Tensor) -> Tensor:
        """Look ids up.

        Args:
            input_: ``[b, s]`` global ids, the same on every rank; not modified.

        Returns:
            ``[b, s, h]``, the same on every rank, or ``[s/t, b, h]`` with ``reduce_scatter_embeddings``, by the
            balanced rule where the ranks do not divide the sequence.

        Raises:
            VocabularyError: an id outside the vocabulary.
        """
        check_alike(partial(check_ids, input_, self.num_embeddings, what="token id"), group=self.tp_group)
        if self.tp_size == 1:
            output = self._look_up(input_)
            return output.transpose(0, 1).contiguous() if self.reduce_scatter_embeddings else output
        if self.reduce_scatter_embeddings:
            input_ = input_.transpose(0, 1)
        local = input_ - self.vocab_start_index
        elsewhere = (local < 0) | (local >= self.num_embeddings_per_partition)
        if self.num_embeddings_per_partition > 0:
            output = self._look_up(local.masked_fill_(elsewhere, 0))
        else:
            output = self.weight.new_zeros(*input_.shape, self.embedding_dim) + self.weight.sum()
        # Nothing saved the lookup's output, so it may be masked in place.
        output = output.masked_fill_(elsewhere.unsqueeze(-1), 0.0)
        if self.reduce_scatter_embeddings:
            return moves.reduce_scatter(output, dim=0, group=self.tp_group)
        return moves.reduce(output, group=self.tp_group)

    def _look_up(self, ids: Tensor) -> Tensor:
        if self.deterministic_mode:
            # The gradient of indexing sorts by id before it sums; that of an embedding adds as threads come.
            return self.weight[ids]
        return F.embedding(ids, self.weight)

    def extra_repr(self) -> str:
        return (
            f"num_embeddings={self.num_embeddings}, embedding_dim={self.embedding_dim}, "
            f"ids=[{self.vocab_start_index}, {self.vocab_end_index}), tp={self.tp_rank}/{self.tp_size}"
        )
