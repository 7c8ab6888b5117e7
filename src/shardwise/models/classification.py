"""Classification heads: labels for whole sequences, or for their tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication import moves
from shardwise.core.errors import ConfigError, ShardingError
from shardwise.core.sequence_view import SequenceView
from shardwise.core.validation import check_ids, safe_to_look_up
from shardwise.models.config import ModelConfig
from shardwise.models.transformer.layer import ResidualDropout
from shardwise.models.transformer.mlp import layer_arguments
from shardwise.nn import ReplicatedLinear, viewless

HeadTask = Literal["sequence-classification", "token-classification"]
ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]

IGNORED_LABEL = -100
"""Label whose loss is 0."""


@dataclass(frozen=True)
class Classification:
    """A head that labels sequences, or each of their tokens. Names and meaning are those of ``transformers``.

    Attributes:
        task: whether to label sequences or tokens.
        num_labels: number of logits.
        problem_type: meaning of the labels of sequences. If None, one label means a regression; with several labels the
            dtype decides: one label is correct (integers), or any number of them (floats).
        bias: whether the head has a bias.
        pad_token_id: id of padding, for causal models that label sequences: the head reads the last token with another
            id. None means that it reads the last token.
        dropout: probability of dropping an element of the head's input.

    Raises:
        ConfigError: a value is out of range.
    """

    task: HeadTask
    num_labels: int
    problem_type: ProblemType | None = None
    bias: bool = False
    pad_token_id: int | None = None
    dropout: float = field(default=0.0, compare=False)

    def __post_init__(self) -> None:
        if not 1 <= self.num_labels <= 1 << 20:
            raise ConfigError(f"num_labels is {self.num_labels}; it must be from 1 to {1 << 20}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"the classifier's dropout is {self.dropout}; it must be at least 0 and under 1")

    @property
    def is_of_tokens(self) -> bool:
        """True if each token has a label."""
        return self.task == "token-classification"

    def with_problem(self, problem: ProblemType) -> Classification:
        """Return the same head with ``problem`` as ``problem_type``."""
        return replace(self, problem_type=problem)

    def problem_of(self, labels: Tensor) -> ProblemType:
        """Return the meaning of ``labels``."""
        if self.is_of_tokens:
            return "single_label_classification"
        if self.problem_type is not None:
            return self.problem_type
        if self.num_labels == 1:
            return "regression"
        return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of each sequence or token. Its mean over those with a label is the loss of ``transformers``.

        Args:
            logits: ``[b, n]``, or ``[b, s, n]`` for tokens; not modified.
            labels: ``[b]`` or ``[b, s]`` integers, where -100 has loss 0; floats ``[b]`` or ``[b, n]`` for a
                regression, and ``[b, n]`` if a sequence may have several labels.

        Returns:
            ``[b]`` or ``[b, s]``, fp32 (fp64 for fp64 logits).

        Raises:
            ShardingError: the labels have the wrong shape.
            VocabularyError: a label is out of range, or not an integer.
        """
        problem, n = self.problem_of(labels), self.num_labels
        is_single = problem == "single_label_classification"
        wanted = logits.shape[:-1] if is_single else logits.shape
        if problem == "regression" and n == 1 and labels.shape == logits.shape[:-1]:
            labels = labels.unsqueeze(-1)
        if labels.shape != wanted:
            raise ShardingError(
                f"the labels have shape {list(labels.shape)}; for {self.task} with {n} labels ({problem}) they must "
                f"have {list(wanted)}"
            )
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if not is_single:
            function = F.mse_loss if problem == "regression" else F.binary_cross_entropy_with_logits
            return function(logits, labels.to(logits.dtype), reduction="none").mean(dim=-1)
        check_ids(labels, n, what="label", ignore_index=IGNORED_LABEL, of=f"the {n} labels")
        labels = torch.where(labels == IGNORED_LABEL, labels, safe_to_look_up(labels, n))
        losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="none")
        return viewless(losses.view(labels.shape))


class Classifier(ReplicatedLinear):
    """Linear layer ``[num_labels, h]`` from hidden states to the labels' logits, whole on every rank."""

    def __init__(self, config: ModelConfig, spec: Classification, tp_group: ProcessGroup) -> None:
        assert config.init_method is not None
        super().__init__(
            config.hidden_size,
            spec.num_labels,
            init=config.init_method,
            bias=spec.bias,
            sequence_shards=config.sequence_parallel and spec.is_of_tokens,
            **layer_arguments(config, group=tp_group, linear=False),
        )
        self.spec = spec
        self.dropout = ResidualDropout(spec.dropout)

    def of_tokens(self, hidden: Tensor, sequence: SequenceView) -> Tensor:
        """Map ``[s, b, h]``, or this rank's shard ``[s/t, b, h]``, to ``[s, b, n]``.

        With context parallelism the result has all positions of this rank's share of the samples.
        """
        logits: Tensor = self(self.dropout(hidden, sequence))
        if sequence.group is not None:
            logits = moves.gather(logits, dim=0, group=sequence.group, sizes=sequence.sizes)
        if (context := sequence.context) is not None:
            logits = context.in_order(moves.gather(logits, dim=0, group=context.group, sizes=context.sizes), dim=0)
            logits = moves.scatter(logits, dim=1, group=context.group)
        return logits

    def of_sequences(self, pooled: Tensor, sequence: SequenceView) -> Tensor:
        """Map ``[b, h]`` to ``[b, n]``; with context parallelism, partial sums to this rank's share of the samples."""
        pooled = self.dropout(pooled, SequenceView.of(pooled, None))
        if sequence.context is not None:
            pooled = moves.reduce_scatter(pooled, dim=0, group=sequence.context.group)
        logits: Tensor = self(pooled)
        return logits

    def last_tokens(self, input_ids: Tensor) -> Tensor:
        """Return the index ``[b]`` of the last token without padding in ``[b, s]`` ids; 0 if all are padding.

        Raises:
            ConfigError: there are several sequences, but no ``pad_token_id``.
        """
        b, s = input_ids.shape
        pad = self.spec.pad_token_id
        if pad is None:
            if b != 1:
                raise ConfigError(
                    f"a batch of {b} sequences needs padding, and the model has no pad_token_id; set it in config.json"
                )
            return input_ids.new_full((1,), s - 1)
        places = torch.arange(s, device=input_ids.device)
        return (places * (input_ids != pad)).argmax(dim=1)

    def pool(self, hidden: Tensor, places: Tensor, sequence: SequenceView) -> Tensor:
        """Select the states ``[b, h]`` at ``places``, ``[b]``, from ``[s, b, h]`` or this rank's ``[s/t, b, h]``.

        With context parallelism the result has zeros for the states of other ranks.
        """
        start, stop = sequence.interval
        if sequence.context is not None:
            places = sequence.context.places_of(places)
        if start == stop:
            # Zeros that stay connected to this rank's backward.
            picked = hidden.sum(dim=0)
        else:
            here = (places >= start) & (places < stop)
            index = (places - start).clamp(0, stop - start - 1)
            picked = hidden[index, torch.arange(len(places), device=places.device)]
            picked = picked.masked_fill(~here.unsqueeze(-1), 0.0)
        return picked if sequence.group is None else moves.reduce(picked, group=sequence.group)
