"""Vocabulary-parallel embedding: the rows of the weight are split over the ranks."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication import moves
from shardwise.core.communication.agreement import check_ids_alike
from shardwise.core.initialization import InitMethod
from shardwise.core.layout import I, Layout, hidden_layout
from shardwise.core.sharding import ParamLayout
from shardwise.core.validation import safe_to_look_up
from shardwise.nn.arithmetic import arithmetic_of
from shardwise.nn.module import ShardedModule


class VocabEmbedding(ShardedModule):
    """Embedding whose rows, the vocabulary, are split over the ranks by the balanced rule.

    Given the same state of the default generator, the layer's initial weight is this rank's rows of
    ``torch.nn.Embedding(num_embeddings, embedding_dim)``.

    Args:
        num_embeddings: size of the vocabulary, ``v``; need not be divisible by the number of ranks.
        embedding_dim: width of an embedding, ``h``.
        group: the ranks that share the layer.
        sequence_parallel: whether to return this rank's shard of the sequence, with the sequence as dimension 0.
        init: function that fills the whole weight in place; as in ``torch.nn.Embedding`` if None.
        deterministic: whether to sum the weight's gradient in a fixed order.
        options: ``device``, ``dtype``, ``initialize`` and ``init_on_cpu`` of ``ShardedModule``.

    Attributes:
        weight: ``[v/t, h]``.
        vocab_start_index, vocab_end_index: half-open interval of the ids on this rank.

    Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3.
    """

    _allow_shape_mismatch = True
    weight: Tensor

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        group: ProcessGroup,
        sequence_parallel: bool = False,
        init: InitMethod | None = None,
        deterministic: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(group, **options)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.sequence_parallel = sequence_parallel
        self.deterministic = deterministic
        self._arithmetic = arithmetic_of(group)
        layout = ParamLayout.split((num_embeddings, embedding_dim), 0, group.size())
        self.vocab_start_index, self.vocab_end_index = layout.intervals[group.rank()][0]
        self._make_parameter("weight", layout, init or torch.nn.init.normal_)

    @property
    def input_layout(self) -> Layout:
        """I: ids have no gradient."""
        return I

    @property
    def output_layout(self) -> Layout:
        """I; V(dim=0) with sequence parallelism."""
        return hidden_layout(sequence_parallel=self.sequence_parallel)

    def forward(self, input_: Tensor) -> Tensor:
        """Look up the embeddings of ids.

        Args:
            input_: ``[b, s]`` ids of the whole vocabulary, the same on every rank; not modified.

        Returns:
            ``[b, s, h]``, the same on every rank; with sequence parallelism ``[s/t, b, h]``, this rank's shard of the
            sequence by the balanced rule.

        Raises:
            VocabularyError: an id is outside the vocabulary.
        """
        check_ids_alike(input_, self.num_embeddings, what="token id", group=self.group)
        if self.group.size() == 1:
            ids = safe_to_look_up(input_, self.num_embeddings)
            output = self._arithmetic.embed(self._look_up, ids, self.weight, reduce=lambda output: output)
            return output.transpose(0, 1).contiguous() if self.sequence_parallel else output
        if self.sequence_parallel:
            output = self._arithmetic.look_up(self._look_up_own, input_.transpose(0, 1), self.weight, dim=0)
            return moves.reduce_scatter(output, dim=0, group=self.group)
        reduce = functools.partial(moves.reduce, group=self.group)
        return self._arithmetic.embed(self._look_up_own, input_, self.weight, reduce=reduce)

    def _look_up_own(self, ids: Tensor, weight: Tensor) -> Tensor:
        def look_up_or_none(ids: Tensor) -> Tensor:
            if weight.size(0):
                return self._look_up(ids, weight)
            return weight.new_zeros(*ids.shape, self.embedding_dim) + weight.sum()

        return look_up_own(ids, self.vocab_start_index, self.vocab_end_index, look_up_or_none)

    def _look_up(self, ids: Tensor, weight: Tensor) -> Tensor:
        return look_up(ids, weight, deterministic=self.deterministic or self._arithmetic.sums_in_order(ids))

    def extra_repr(self) -> str:
        return (
            f"num_embeddings={self.num_embeddings}, embedding_dim={self.embedding_dim}, "
            f"ids=[{self.vocab_start_index}, {self.vocab_end_index}), tp={self.group.rank()}/{self.group.size()}"
        )


def look_up(ids: Tensor, weight: Tensor, *, deterministic: bool) -> Tensor:
    """Return the rows of ``weight`` for ``ids``. If ``deterministic``, its gradient is summed in a fixed order."""
    if deterministic:
        # The backward of indexing sorts by id before it sums. That of F.embedding sums in the order of the threads.
        return weight[ids]
    return F.embedding(ids, weight)


def look_up_own(ids: Tensor, start: int, stop: int, look_up: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply ``look_up`` to this rank's ids, from ``start`` to ``stop``. The embedding of any other id is -0.0.

    Ids of any shape ``[...]`` give ``[..., h]``.
    """
    local = ids - start
    elsewhere = (local < 0) | (local >= stop - start)
    output = look_up(local.masked_fill_(elsewhere, 0))
    # Autograd did not save the lookup's output, so it may be masked in place.
    # Not 0.0: 0.0 + -0.0 is 0.0, so a sum over ranks would lose the sign of a -0.0.
    return output.masked_fill_(elsewhere.unsqueeze(-1), -0.0)
