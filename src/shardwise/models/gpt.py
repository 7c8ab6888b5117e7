"""GPT: a decoder-only language model, split over the tensor-parallel group and, layer by layer, over stages."""

from torch import Tensor

from shardwise.core.errors import ShardingError
from shardwise.core.sequence_view import SequenceView
from shardwise.models.classification import Classification
from shardwise.models.token_embedding import TokensFirst, check_inputs, forbidden_keys, is_token, positions_of
from shardwise.models.transformer.attention import KeyValueCache
from shardwise.models.transformer.block import TransformerBlock
from shardwise.models.transformer.masks import AttentionMask, AttnMaskType, document_lengths
from shardwise.models.transformer_model import TransformerModel
from shardwise.nn import viewless


class GPT(TransformerModel):
    """Embedding, transformer block and output layer, or one pipeline stage of them.

    Args:
        config: sizes of the model.
        vocab_size: number of token ids, of any size.
        max_sequence_length: longest sequence; the size of a learned position embedding.
        groups: process groups, one for each kind of parallelism.
        layer_spec: what a layer is made of; ``SelfAttention`` and ``MLP`` if None.
        pre_process: the model begins here: there is an embedding.
        post_process: the model ends here: there is an output layer.
        parallel_output: return this rank's part of the logits instead of all.
        share_embeddings_and_output_weights: the output layer uses the embedding's weight.
        position_embedding_type: ``"learned_absolute"``, ``"rope"``, ``"alibi"`` or ``"none"``.
        rotary_percent: share of a head that is rotated.
        rotary_base: base of the rotary wavelengths.
        rope_scaling: lowers the rotary frequencies, for longer contexts.
        window_rotary_base: base of the rotary wavelengths of layers with a window; ``rotary_base`` if None.
        position_offset: rows of a table of learned positions before that of position 0 (OPT has 2).
        positions_skip_padding: padding is not counted by positions, where ``forward`` is given none (OPT).
        classification: a head for labels of sequences or tokens, instead of the output layer.
        vp_stage: which of the stage's chunks this is, with interleaving.

    Attributes:
        embedding: ``TokenEmbedding``; on the first stage.
        decoder: this stage's layers.
        output_layer: on the last stage; with tied weights it has no weight if that is the first stage too.
        classifier: with ``classification``, on the last stage.
        output_queue: with ``config.defer_embedding_wgrad_compute``, what ``finish_weight_gradients`` computes after the
            last backward before the optimizer's step.

    Raises:
        ConfigError: a size or an option out of range.
        TopologyError: not the groups that the stages need.
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
    ) -> Tensor:
        """Loss of each token with ``labels``, else logits; hidden states on a stage that is not the last.

        Args:
            input_ids: ``[b, s]`` token ids. A stage that is not the first reads only their shape, and its input from
                ``set_input_tensor``.
            position_ids: ``[s]`` or ``[b, s]``; if None 0 to ``s - 1``, padding counted, or with
                ``positions_skip_padding`` and a mask ``[b, s]`` how many tokens are before each.
            attention_mask: ``[b, s]``, 1 or True for tokens and 0 for padding, wherever in a row that is, as in
                ``transformers``; with a cache ``[b, keys]``. Or bools of more dimensions, True where attention is
                forbidden, broadcast to ``[b, heads/t, s, keys]``. What comes after a token is forbidden anyway.
            labels: ``[b, s]`` ids to predict; -100 costs nothing. With ``classification`` see ``Classification.loss``.
            document_ids: ``[b, s]`` integers, for several texts packed into one row: tokens see those with their own
                number only. Positions go on from text to text unless ``position_ids`` say otherwise.
            lengths: ``[b]`` integers, tokens of each row without the padding behind them; read only by rotary
                positions whose frequencies depend on the length of the text. If None each document's are taken, and
                without documents, as in ``transformers``, those of the longest row for all, padding counted.
            cache: keys and values of earlier tokens, for generation; give ``position_ids`` with it.

        Returns:
            With ``classification`` the loss of each sequence ``[b]`` or token ``[b, s]``, or logits ``[b, n]`` or
            ``[b, s, n]``. Otherwise loss ``[b, s]``, or logits ``[s, b, v/t]`` (``[s, b, v]`` without
            ``parallel_output``). Hidden states ``[s, b, h]`` (``[s/t, b, h]`` with sequence parallelism) on a stage
            that is not the last. What is returned for padding means nothing, and is finite.

        Raises:
            ShardingError: what is no tensor, or has no tokens; the sequence is too long; a mask, labels or ``lengths``
                of another shape; or a later stage has no input.
            VocabularyError: an id outside the vocabulary, or a label that is none.
            ConfigError: several sequences to classify without a ``pad_token_id``.
        """
        check_inputs(
            input_ids,
            labels,
            labels_are_of_tokens=self.classification is None,
            position_ids=position_ids,
            attention_mask=attention_mask,
            document_ids=document_ids,
        )
        own_ids, own_labels = input_ids, labels
        sequence = self._sequence_of(input_ids, position_ids, labels if self.classification is None else None)
        s = sequence.length
        forbidden, first, key_positions = attention_mask, None, None
        if attention_mask is not None and attention_mask.dim() == 2:
            b = (self._input_of_a_later_stage() if input_ids is None else input_ids.t()).size(1)
            tokens = is_token(attention_mask, b, s + getattr(cache, "length", 0))
            forbidden = forbidden_keys(tokens)
            if position_ids is None and self.positions_skip_padding:
                position_ids = positions_of(tokens)[:, -s:]
            if cache is None and document_ids is None and self._sees_all_before:
                forbidden, first = None, TokensFirst(tokens)
                position_ids = first.order if position_ids is None else first.move(position_ids.expand(b, -1))
                input_ids = None if input_ids is None else first.move(input_ids)
                labels = None if labels is None or self.classification is not None else first.move(labels)
            elif self.alibi_slopes is not None:
                key_positions = positions_of(tokens)
        hidden: Tensor = self.embedding(input_ids, position_ids) if self.pre_process else self._input_of_a_later_stage()
        hidden = self.decoder(
            hidden,
            attention_mask=AttentionMask(
                forbidden,
                document_ids=document_ids,
                alibi_slopes=self.alibi_slopes,
                key_positions=key_positions,
                query_position=getattr(cache, "query_position", None),
            ),
            cache=cache,
            sequence=sequence,
            **self._rotary(position_ids, s, hidden, self._own_lengths(lengths, document_ids, (hidden.size(1), s))),
        )
        if not self.post_process:
            return hidden
        if self.classification is not None:
            return self._classify(self.classification, hidden, own_ids, own_labels, sequence, first)
        if labels is None:
            logits = self._logits(hidden, sequence)
            return logits if first is None else first.move_sequence_back(logits)
        loss = self._loss(hidden, labels, sequence)
        return loss if first is None else first.move_back(loss)

    def _own_lengths(
        self, lengths: Tensor | None, document_ids: Tensor | None, shape: tuple[int, int]
    ) -> Tensor | None:
        """Length of each token's text, ``[b, 1]`` or ``[b, s]``; None if it is not read, or if it is the batch's."""
        if lengths is not None and lengths.shape != shape[:1]:
            raise ShardingError(
                f"lengths have shape {list(lengths.shape)}; they must be [{shape[0]}], one for each row"
            )
        if not self.depends_on_length:
            return None
        if lengths is not None:
            return lengths.unsqueeze(1)
        if document_ids is None or document_ids.shape != shape:
            # Attention refuses numbers of another shape.
            return None
        return document_lengths(document_ids)

    def _classify(
        self,
        spec: Classification,
        hidden: Tensor,
        input_ids: Tensor | None,
        labels: Tensor | None,
        sequence: SequenceView,
        first: TokensFirst | None,
    ) -> Tensor:
        if spec.is_of_tokens:
            logits = self.classifier.of_tokens(hidden, sequence)
            logits = (logits if first is None else first.move_sequence_back(logits)).transpose(0, 1)
        else:
            if input_ids is None:
                raise ShardingError("the last token of each sequence is looked for; pass input_ids to the last stage")
            places = self.classifier.last_tokens(input_ids)
            if first is not None:
                places = first.place_of(places)
            logits = self.classifier.of_sequences(self.classifier.pool(hidden, places, sequence))
        return viewless(logits) if labels is None else spec.loss(logits, labels)

    @property
    def _sees_all_before(self) -> bool:
        """Whether every layer's tokens see all tokens before them and none after."""
        masks = (getattr(layer.self_attention, "attn_mask_type", AttnMaskType.no_mask) for layer in self.block.layers)
        return self.config.window_size is None and all(mask.is_causal for mask in masks)
