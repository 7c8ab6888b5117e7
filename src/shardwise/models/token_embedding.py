"""What a language model does first: ids to hidden states."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise.core.communication import moves
from shardwise.core.errors import ConfigError, ShardingError
from shardwise.core.layout import I, Layout, hidden_layout
from shardwise.models.config import ModelConfig
from shardwise.models.transformer.layer import ResidualDropout
from shardwise.models.transformer.layer_arguments import layer_arguments, make_norm
from shardwise.nn import GroupModule, ReplicatedEmbedding, VocabEmbedding, apply_norm, parameter_device, viewless

PositionEmbedding = Literal["learned_absolute", "rope", "none", "alibi"]


class TokenEmbedding(GroupModule):
    """Words, learned positions and token types, their sum normed (``config.embedding_layernorm``) and dropped out.

    Words are multiplied by ``config.embedding_multiplier``.

    Args:
        config: width, dtype, dropout, norm and sequence parallelism.
        vocab_size: number of token ids, of any size.
        max_sequence_length: rows of the table of learned positions.
        position_embedding_type: there is such a table for ``"learned_absolute"``; other kinds are attention's.
        num_tokentypes: number of token types; 0 for none.
        scatter_to_sequence_parallel: with ``config.sequence_parallel``, return this rank's shard of the sequence.
        tp_group: tensor-parallel group.
        position_offset: further rows of that table, before the row of position 0.

    Attributes:
        word_embeddings: split over the vocabulary.
        position_embeddings, tokentype_embeddings: whole on every rank, or None.
        layernorm: or None.

    """

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        max_sequence_length: int,
        position_embedding_type: PositionEmbedding = "learned_absolute",
        num_tokentypes: int = 0,
        scatter_to_sequence_parallel: bool = True,
        *,
        tp_group: ProcessGroup,
        position_offset: int = 0,
    ) -> None:
        super().__init__()
        for name, value in (("num_tokentypes", num_tokentypes), ("position_offset", position_offset)):
            if value < 0:
                raise ConfigError(f"{name} is {value}; it must not be negative")
        init = config.init_method
        assert init is not None
        self.tp_group = tp_group
        self.num_tokentypes = num_tokentypes
        self.position_offset = position_offset
        # Rounded as a tensor of that dtype would be, which is what others multiply by.
        self.multiplier = torch.tensor(config.embedding_multiplier, dtype=config.params_dtype, device="cpu").item()
        self.max_sequence_length = max_sequence_length
        learned = position_embedding_type == "learned_absolute"
        self.scatters = config.sequence_parallel and scatter_to_sequence_parallel and self.tp_group.size() > 1
        arguments = layer_arguments(config, group=self.tp_group, linear=False)
        self.word_embeddings = VocabEmbedding(
            vocab_size,
            config.hidden_size,
            # Positions and token types are added to the whole sequence, so it is split only afterwards.
            sequence_parallel=self.scatters and not learned and num_tokentypes == 0,
            init=init,
            deterministic=config.deterministic_mode,
            **arguments,
        )

        def table(rows: int, what: str) -> ReplicatedEmbedding:
            return ReplicatedEmbedding(rows, config.hidden_size, what=what, init=init, **arguments)

        self.position_embeddings = table(self.position_offset + max_sequence_length, "position") if learned else None
        self.tokentype_embeddings = table(num_tokentypes, "token type") if num_tokentypes > 0 else None
        self.layernorm: nn.Module | None = None
        if config.embedding_layernorm:
            with parameter_device(self.tp_group, on_cpu=config.use_cpu_initialization):
                self.layernorm = make_norm(config)
        self.dropout = ResidualDropout(config.hidden_dropout, self.scatters, self.tp_group)

    @property
    def input_layout(self) -> Layout:
        """I: ids have no gradient."""
        return I

    @property
    def output_layout(self) -> Layout:
        """The layout of hidden states, I or V(dim=0)."""
        return hidden_layout(sequence_parallel=self.scatters)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, tokentype_ids: Tensor | None = None
    ) -> Tensor:
        """Embed.

        Args:
            input_ids: ``[b, s]`` token ids.
            position_ids: ``[s]`` or ``[b, s]``; 0 to ``s - 1`` if None.
            tokentype_ids: ``[b, s]``; all 0 if None and there are token types.

        Returns:
            ``[s, b, h]``, or this rank's shard ``[s/t, b, h]``.

        Raises:
            VocabularyError: a token id, position or token type that is in no table.
            ShardingError: the sequence is too long, or token types are given to a model without.
        """
        s = input_ids.size(1)
        if s > self.max_sequence_length:
            raise ShardingError(
                f"the sequence has {s} tokens, the model's max_sequence_length is {self.max_sequence_length}"
            )
        if tokentype_ids is not None and self.tokentype_embeddings is None:
            raise ShardingError(
                "tokentype_ids are given, but the model has no token types; make it with num_tokentypes"
            )
        hidden: Tensor = self.word_embeddings(input_ids)
        if self.multiplier != 1.0:
            hidden = hidden * self.multiplier
        if not self.word_embeddings.sequence_parallel:
            if self.tokentype_embeddings is not None:
                kinds = self.tokentype_embeddings
                hidden = hidden + (kinds.first(1) if tokentype_ids is None else kinds(tokentype_ids))
            if self.position_embeddings is not None:
                places, offset = self.position_embeddings, self.position_offset
                positions = places.first(s, offset) if position_ids is None else places(position_ids + offset)
                hidden = hidden + positions
            hidden = hidden.transpose(0, 1).contiguous()
            if self.scatters:
                hidden = moves.scatter(hidden, dim=0, group=self.tp_group)
        if self.layernorm is not None:
            hidden = apply_norm(self.layernorm, hidden, group=self.tp_group, sequence_parallel=self.scatters)
        output: Tensor = self.dropout(hidden, sequence_length=s)
        return viewless(output)
