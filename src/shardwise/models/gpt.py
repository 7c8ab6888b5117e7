"""GPT: a decoder-only language model, split over the tensor-parallel group and, layer by layer, over stages."""

from typing import Any

from torch import Tensor

from shardwise.core.errors import ConfigError, ShardingError
from shardwise.core.sequence_view import SequenceView
from shardwise.models.token_embedding import (
    TokensFirst,
    check_inputs,
    forbidden_keys,
    is_token,
    positions_of,
    tokens_of,
)
from shardwise.models.transformer.block import TransformerBlock
from shardwise.models.transformer.core_attention import KeyValueCache
from shardwise.models.transformer.masks import AttentionMask, AttnMaskType, document_lengths
from shardwise.models.transformer_model import TransformerModel


class GPT(TransformerModel):
    """Embedding, transformer block and output layer, or one pipeline stage of them.

    Args:
        config: sizes of the model.
        vocab_size: number of token ids; need not be divisible by the number of ranks.
        max_sequence_length: longest sequence; the size of a learned position embedding.
        groups: process groups, one for each kind of parallelism.
        layer_spec: parts of a layer; ``SelfAttention`` and ``MLP`` if None.
        pre_process: whether this is the start of the model, with the embedding.
        post_process: whether this is the end of the model, with the output layer.
        parallel_output: whether to return this rank's part of the logits instead of all logits.
        share_embeddings_and_output_weights: whether the output layer uses the embedding's weight.
        position_embedding_type: ``"learned_absolute"``, ``"rope"``, ``"alibi"`` or ``"none"``.
        rotary_percent: share of a head that is rotated.
        rotary_base: base of the rotary wavelengths.
        rope_scaling: scaling of the rotary frequencies for longer contexts.
        window_rotary_base: base of the rotary wavelengths of layers with a window; ``rotary_base`` if None.
        position_offset: number of rows before position 0 in a table of learned positions (OPT has 2).
        positions_skip_padding: whether default positions do not count padding (OPT).
        vp_stage: index of the chunk in its stage, with interleaving.

    Attributes:
        embedding: ``TokenEmbedding``; on the first stage.
        decoder: this stage's layers.
        output_layer: on the last stage; with tied weights it has no weight if this is also the first stage.
        output_queue: with ``config.defer_embedding_wgrad_compute``, the weight gradients that
            ``finish_weight_gradients`` computes between the last backward and the optimizer's step.

    Raises:
        ConfigError: a size or an option is out of range.
        TopologyError: a process group that the stages need is missing or has the wrong ranks.
    """

    block_name = "decoder"
    decoder: TransformerBlock

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        document_ids: Tensor | None = None,
        lengths: Tensor | None = None,
        cache: KeyValueCache | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of each token, or logits without ``labels``; hidden states on all but the last stage.

        Args:
            input_ids: ``[b, s]`` token ids. A stage that is not the first reads only their shape, and takes its input
                from ``set_input_tensor``.
            position_ids: ``[s]`` or ``[b, s]``. None means 0 to ``s - 1``, padding included; or, with
                ``positions_skip_padding`` and a mask ``[b, s]``, the number of tokens before each token.
            attention_mask: ``[b, s]``, 1 or True for tokens and 0 for padding, at any position in a row, as in
                ``transformers``; with a cache ``[b, keys]``. Or bools of more dimensions, True where attention is
                forbidden, broadcast to ``[b, heads/t, s, keys]``. Attention to later tokens is always forbidden.
            labels: ``[b, s]`` ids to predict; -100 has loss 0.
            document_ids: ``[b, s]`` integers, for several texts packed into one row: a token sees only tokens with the
                same number. Positions continue from text to text unless ``position_ids`` are given. Experts do not
                count tokens with a negative number, which are padding.
            lengths: ``[b]`` integers, number of tokens in each row without the padding after them; used only by
                experts, which do not count padding, and if rotary frequencies depend on the text length. For the latter
                None means the length of each document or, without documents, that of the longest row, padding included,
                for all rows, as in ``transformers``.
            cache: keys and values of earlier tokens, for generation; give ``position_ids`` with it.
            hidden: ``[s, b, h]``, or this rank's shard, the input of the first layer instead of the embedding's output;
                ``input_ids`` may then be None. Only on the first stage.

        Returns:
            Loss ``[b, s]``, or logits ``[s, b, v/t]`` (``[s, b, v]`` without ``parallel_output``). Hidden states
            ``[s, b, h]`` (``[s/t, b, h]`` with sequence parallelism) on a stage that is not the last. Results for
            padding are finite, but have no meaning. With context parallelism every rank is given whole sequences, and
            ``s`` of a result is this rank's number of positions, in the order of ``ContextShard.intervals``.

        Raises:
            ShardingError: an input is not a tensor or has no tokens; the sequence is too long; a mask, labels,
                ``lengths`` or ``hidden`` have the wrong shape; or a later stage has no input.
            VocabularyError: an id is outside the vocabulary, or a label is invalid.
            ConfigError: a cache is given to a model with context parallelism.
        """
        check_inputs(
            input_ids,
            labels,
            position_ids=position_ids,
            attention_mask=attention_mask,
            document_ids=document_ids,
            hidden=hidden,
        )
        own_ids, is_given = input_ids, hidden is not None
        sequence = self._sequence_of(input_ids, position_ids, labels, hidden=hidden)
        context = sequence.context
        if context is not None and cache is not None:
            raise ConfigError("generation has no context parallelism; build the model without Groups.cp")
        s = sequence.length if context is None else context.length
        forbidden, first, key_positions, tokens = attention_mask, None, None, None
        if attention_mask is not None and attention_mask.dim() == 2:
            rows = hidden if input_ids is None else input_ids.t()
            b = (self._input_of_a_later_stage() if rows is None else rows).size(1)
            tokens = is_token(attention_mask, b, s + getattr(cache, "length", 0))
            forbidden = forbidden_keys(tokens)
            if position_ids is None and self.positions_skip_padding:
                position_ids = positions_of(tokens)[:, -s:]
            # A routing names the places of tokens in rows as they are given.
            moves = cache is None and document_ids is None and context is None and self.rerouting is None
            if moves and not is_given and self._sees_all_before:
                forbidden, first = None, TokensFirst(tokens)
                tokens = first.move(tokens)
                position_ids = first.order if position_ids is None else first.move(position_ids.expand(b, -1))
                input_ids = None if input_ids is None else first.move(input_ids)
                labels = None if labels is None else first.move(labels)
            elif self.alibi_slopes is not None:
                key_positions = positions_of(tokens)
        if context is not None and labels is not None:
            labels = context.own(labels, dim=1)
        if hidden is not None:
            self._check_hidden(hidden, sequence)
        elif self.pre_process:
            hidden = self.embedding(input_ids, position_ids, context=context)
        else:
            hidden = self._input_of_a_later_stage()
        assert hidden is not None
        of_texts = self._own_lengths(lengths, document_ids, hidden, s)
        if cache is None:
            places = tokens_of(tokens, lengths, document_ids, s)
            places = None if places is None else places.to(hidden.device)
            sequence = self._for_experts(sequence, places, hidden.size(1), own_ids)
        hidden = self.decoder(
            hidden,
            attention_mask=AttentionMask(
                forbidden,
                document_ids=document_ids,
                alibi_slopes=self.alibi_slopes,
                key_positions=key_positions,
                query_position=getattr(cache, "query_position", None),
                context=context,
            ),
            cache=cache,
            sequence=sequence,
            **self._rotary(position_ids, sequence, hidden, of_texts),
        )
        if not self.post_process:
            return hidden
        if labels is None:
            logits = self._logits(hidden, sequence)
            return logits if first is None else first.move_sequence_back(logits)
        loss = self._loss(hidden, labels, sequence)
        return loss if first is None else first.move_back(loss)

    def next_logits(self, *args: Tensor | None, **options: Any) -> Tensor:
        """Return the logits of the token after each sequence, ``[b, v/t]``; arguments as for ``forward``."""
        logits: Tensor = self(*args, **options)
        return logits[-1]

    def _check_hidden(self, hidden: Tensor, sequence: SequenceView) -> None:
        start, stop = sequence.interval
        if not self.pre_process or hidden.dim() != 3 or hidden.size(0) != stop - start:
            raise ShardingError(
                f"hidden states of shape {list(hidden.shape)} are given to a model with pre_process="
                f"{self.pre_process}; the first stage takes [{stop - start}, batch, {self.config.hidden_size}] here"
            )

    def _own_lengths(
        self, lengths: Tensor | None, document_ids: Tensor | None, hidden: Tensor, s: int
    ) -> Tensor | None:
        """Return the length of each token's text, ``[b, 1]`` or ``[b, s]``; None if unused or the batch's length."""
        shape = hidden.size(1), s
        if lengths is not None and lengths.shape != shape[:1]:
            raise ShardingError(
                f"lengths have shape {list(lengths.shape)}; they must be [{shape[0]}], one for each row"
            )
        if not self.depends_on_length:
            return None
        if lengths is not None:
            return lengths.unsqueeze(1)
        if document_ids is None or document_ids.shape != shape:
            # Attention raises an error for a wrong shape.
            return None
        return document_lengths(document_ids).to(hidden.device)

    @property
    def _sees_all_before(self) -> bool:
        """True if in every layer a token sees all earlier tokens and no later ones."""
        masks = (getattr(layer.self_attention, "attn_mask_type", AttnMaskType.no_mask) for layer in self.block.layers)
        return self.config.window_size is None and all(mask.is_causal for mask in masks)
