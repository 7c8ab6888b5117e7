"""What language models share: the loss over a split vocabulary, and the groups they run on."""

from __future__ import annotations

from torch import Tensor, nn

from shardwise.config import TransformerConfig
from shardwise.loss.cross_entropy import vocab_parallel_cross_entropy
from shardwise.loss.linear_cross_entropy import vocab_parallel_linear_cross_entropy
from shardwise.parallel_state import resolve_tensor_model_parallel_group
from shardwise.process_groups_config import ProcessGroupCollection


class LanguageModule(nn.Module):
    """Base of GPT and its kin.

    Args:
        config: sizes of the model.
        pg_collection: its process groups; the ambient topology's if None.

    Raises:
        TopologyError: no groups given and none initialised.
    """

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        super().__init__()
        self.config = config
        self.pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.tp_group = resolve_tensor_model_parallel_group(self.pg_collection.tp)
        self.vocab_size: int | None = None

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Cross entropy of each token.

        Args:
            labels: ``[b, s]`` global ids; -100 costs nothing.
            logits: ``[s, b, v/t]``; not modified.

        Returns:
            ``[b, s]``, fp32 (fp64 for fp64 logits), the same on every rank.

        Raises:
            VocabularyError: a label outside the vocabulary.
        """
        return self._loss(labels, logits, inplace_=False)

    def compute_output_layer_and_language_model_loss(
        self, hidden: Tensor, labels: Tensor, weight: Tensor, *, sequence_parallel: bool = False
    ) -> Tensor:
        """Output layer and cross entropy of each token in one, without the logits of all ranks.

        Args:
            hidden: ``[s, b, h]``, or this rank's shard ``[s/t, b, h]`` with sequence parallelism; not modified.
            labels: ``[b, s]`` global ids; -100 costs nothing.
            weight: ``[v/t, h]``, the output layer's, or the embedding's that is tied to it.
            sequence_parallel: ``hidden`` is a shard of the sequence.

        Returns:
            ``[b, s]``, fp32 (fp64 for fp64 hidden states), the same on every rank.

        Raises:
            VocabularyError: a label outside the vocabulary.
        """
        loss = vocab_parallel_linear_cross_entropy(
            hidden,
            weight,
            labels.t().contiguous(),
            group=self.tp_group,
            vocab_size=self.vocab_size,
            sequence_parallel=sequence_parallel,
            gradient_accumulation_fusion=self.config.gradient_accumulation_fusion,
        )
        return loss.t().contiguous()

    def _loss(self, labels: Tensor, logits: Tensor, *, inplace_: bool) -> Tensor:
        loss = vocab_parallel_cross_entropy(
            logits,
            labels.t().contiguous(),
            group=self.tp_group,
            vocab_size=self.vocab_size,
            inplace_=inplace_,
        )
        return loss.t().contiguous()
