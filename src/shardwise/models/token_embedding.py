"""The first layer of a language model, from ids to hidden states, and the tokens that it learns from."""

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise.core.communication import moves
from shardwise.core.errors import ConfigError, ShardingError
from shardwise.core.layout import I, Layout, hidden_layout
from shardwise.core.sequence_view import ContextShard, SequenceView
from shardwise.core.validation import on_host
from shardwise.models.config import ModelConfig
from shardwise.models.model_fields import PositionEmbedding
from shardwise.models.transformer.layer import ResidualDropout
from shardwise.models.transformer.mlp import layer_arguments, make_norm
from shardwise.nn import GroupModule, ReplicatedEmbedding, VocabEmbedding, arithmetic_of, parameter_device, viewless
from shardwise.nn.loss.vocabulary import IGNORE_INDEX


class TokenEmbedding(GroupModule):
    """Sum of the embeddings of words, learned positions and token types, with an optional norm, and dropout.

    The word embedding is multiplied by ``config.embedding_multiplier``.

    Args:
        position_embedding_type: ``"learned_absolute"`` adds a table of positions; attention handles the other types.
        num_tokentypes: number of token types; 0 for none.
        scatter_to_sequence_parallel: with ``config.sequence_parallel``, whether to return this rank's shard of the
            sequence.
        position_offset: number of rows in the table before the row of position 0.

    Attributes:
        word_embeddings: split over the vocabulary.
        position_embeddings, tokentype_embeddings: whole on every rank, or None.
        layernorm: norm with ``config.embedding_layernorm``, or None.
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
        self.multiplier = _rounded(config.embedding_multiplier, config.params_dtype)
        self.max_sequence_length = max_sequence_length
        learned = position_embedding_type == "learned_absolute"
        self.scatters = config.sequence_parallel and scatter_to_sequence_parallel and self.tp_group.size() > 1
        arguments = layer_arguments(config, group=self.tp_group, linear=False)
        self.word_embeddings = VocabEmbedding(
            vocab_size,
            config.hidden_size,
            # Positions and token types are added to the whole sequence, which is therefore split later.
            sequence_parallel=self.scatters and not learned and num_tokentypes == 0,
            init=init,
            deterministic=config.deterministic_mode,
            **arguments,
        )

        def table(rows: int, what: str) -> ReplicatedEmbedding:
            return ReplicatedEmbedding(rows, config.hidden_size, what=what, init=init, **arguments)

        self.position_embeddings = table(self.position_offset + max_sequence_length, "position") if learned else None
        self.tokentype_embeddings = table(num_tokentypes, "token type") if num_tokentypes > 0 else None
        self._norm = arithmetic_of(tp_group).norm(tp_group, sequence_parallel=self.scatters)
        self.layernorm: nn.Module | None = None
        if config.embedding_layernorm:
            with parameter_device(self.tp_group, on_cpu=config.use_cpu_initialization):
                self.layernorm = make_norm(config)
        self.dropout = ResidualDropout(config.hidden_dropout)

    @property
    def input_layout(self) -> Layout:
        """I: ids have no gradient."""
        return I

    @property
    def output_layout(self) -> Layout:
        """I, or V(dim=0) if the sequence is scattered."""
        return hidden_layout(sequence_parallel=self.scatters)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        tokentype_ids: Tensor | None = None,
        *,
        context: ContextShard | None = None,
        is_ragged: bool = False,
    ) -> Tensor:
        """Map token ids to hidden states.

        Args:
            input_ids: ``[b, s]`` token ids.
            position_ids: ``[s]`` or ``[b, s]``; 0 to ``s - 1`` if None.
            tokentype_ids: ``[b, s]``; all 0 if None and there are token types.
            context: with context parallelism, the positions of this rank, whose hidden states are returned.
            is_ragged: whether a row has tokens of several sequences, and may have more than the longest sequence.

        Returns:
            ``[s, b, h]``, or this rank's shard ``[s/t, b, h]``.

        Raises:
            VocabularyError: a token id, position or token type is out of range.
            ShardingError: the sequence is too long, or token types are given to a model without token types.
        """
        s = input_ids.size(1)
        if s > self.max_sequence_length and not is_ragged:
            raise ShardingError(
                f"the sequence has {s} tokens, the model's max_sequence_length is {self.max_sequence_length}"
            )
        if tokentype_ids is not None and self.tokentype_embeddings is None:
            raise ShardingError(
                "tokentype_ids are given, but the model has no token types; make it with num_tokentypes"
            )
        if context is not None:
            input_ids = context.own(input_ids, dim=1)
            positions = context.positions(input_ids.device)
            position_ids = positions if position_ids is None else context.own(position_ids, dim=-1)
            tokentype_ids = None if tokentype_ids is None else context.own(tokentype_ids, dim=1)
            s = context.size
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
            hidden = self._norm(self.layernorm, hidden)
        output: Tensor = self.dropout(hidden, SequenceView(s, self.tp_group if self.scatters else None, context))
        return viewless(output)


@on_host
def _rounded(number: float, dtype: torch.dtype) -> float:
    """Round to a dtype, as other implementations do, which multiply by a tensor."""
    return torch.tensor(number, dtype=dtype, device="cpu").item()


# Largest share of rows for which selecting rows, and scattering their gradients, costs less than the saved products.
_MOST = 0.9


def places_learned(labels: Tensor, vocab_size: int) -> Tensor | None:
    """Return the positions ``[n]`` in ``labels.t().flatten()`` of labels ``[b, s]`` that are not ignored, at least one.

    Returns None if the loss should be computed for all tokens: few labels are ignored; a label is out of range, which
    the loss reports with its position; or the check would synchronize with a GPU.
    """
    if labels.device.type != "cpu" or torch.compiler.is_compiling() or not labels.numel():
        return None
    flat = labels.t().flatten()
    counts = flat != IGNORE_INDEX
    if not torch.equal(counts, (flat >= 0) & (flat < vocab_size)):
        return None
    places = counts.nonzero().squeeze(1)
    if len(places) > _MOST * len(flat):
        return None
    # If all are ignored, return one of them, so that every rank's backward communicates as usual.
    return places if len(places) else places.new_zeros(1)


def tokens_at(places: Tensor, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Select tokens of ``[s, b, h]`` and ``[b, s]`` as one sample, ``[n, 1, h]`` and ``[1, n]``."""
    return hidden.flatten(0, 1).index_select(0, places).unsqueeze(1), labels.t().flatten()[places].unsqueeze(0)


def losses_at(places: Tensor, losses: Tensor, shape: torch.Size) -> Tensor:
    """Scatter losses ``[1, n]`` to their ``places`` in ``shape``, ``[b, s]``, with 0 elsewhere."""
    b, s = shape
    return viewless(losses.new_zeros(s * b).index_copy(0, places, losses.squeeze(0)).view(s, b).t().contiguous())
