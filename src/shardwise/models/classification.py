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
"""The label that costs nothing."""


@dataclass(frozen=True)
class Classification:
    """A head that labels sequences, or each of their tokens. Names and meaning are those of ``transformers``.

    Attributes:
        task: labels are of sequences or of tokens.
        num_labels: number of logits.
        problem_type: meaning of the labels of sequences; if None, one label is a regression's, and with several the
            dtype of labels tells: one is right (integers), or any number of them (floats).
        bias: the head has one.
        pad_token_id: of a causal model of sequences: the head looks at the last token that is not this one; at the last
            of all if None.
        dropout: probability of dropping an element of what the head looks at.

    Raises:
        ConfigError: a value out of range.
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
        """Whether each token has labels."""
        return self.task == "token-classification"

    def with_problem(self, problem: ProblemType) -> Classification:
        """The same head with this meaning of labels."""
        return replace(self, problem_type=problem)

    def problem_of(self, labels: Tensor) -> ProblemType:
        """The meaning of labels."""
        if self.is_of_tokens:
            return "single_label_classification"
        if self.problem_type is not None:
            return self.problem_type
        if self.num_labels == 1:
            return "regression"
        return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of each sequence, or of each token; their mean over what has a label is that of ``transformers``.

        Args:
            logits: ``[b, n]``, or ``[b, s, n]`` of tokens; not modified.
            labels: ``[b]`` or ``[b, s]`` integers, where -100 costs nothing; for a regression ``[b]`` or ``[b, n]``
                and with several labels each ``[b, n]`` floats.

        Returns:
            ``[b]`` or ``[b, s]``, fp32 (fp64 for fp64 logits).

        Raises:
            ShardingError: labels of another shape.
            VocabularyError: a label out of range, or no integer.
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
    """The linear layer ``[num_labels, h]`` from hidden states to logits of labels, whole on every rank."""

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
        """``[s, b, h]``, or this rank's shard ``[s/t, b, h]``, to ``[s, b, n]``."""
        logits: Tensor = self(self.dropout(hidden, sequence))
        if sequence.group is not None:
            logits = moves.gather(logits, dim=0, group=sequence.group, sizes=sequence.sizes)
        return logits

    def of_sequences(self, pooled: Tensor) -> Tensor:
        """``[b, h]`` to ``[b, n]``."""
        logits: Tensor = self(self.dropout(pooled, SequenceView.of(pooled, None)))
        return logits

    def last_tokens(self, input_ids: Tensor) -> Tensor:
        """``[b, s]`` token ids to ``[b]``: the place of the last that is not padding; 0 if all are.

        Raises:
            ConfigError: there are several sequences, and it is not said which id is padding.
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
        """``[s, b, h]``, or this rank's shard ``[s/t, b, h]``, to the states ``[b, h]`` at ``places`` ``[b]``."""
        start, stop = sequence.interval
        if start == stop:
            # Nothing, but of what this rank's backward passes through.
            picked = hidden.sum(dim=0)
        else:
            here = (places >= start) & (places < stop)
            index = (places - start).clamp(0, stop - start - 1)
            picked = hidden[index, torch.arange(len(places), device=places.device)]
            picked = picked.masked_fill(~here.unsqueeze(-1), 0.0)
        return picked if sequence.group is None else moves.reduce(picked, group=sequence.group)
