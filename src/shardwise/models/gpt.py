"""GPT: a decoder-only language model, split over the tensor-parallel group and, layer by layer, over stages."""

from typing import Any

from torch import Tensor

from shardwise.core.errors import ShardingError
from shardwise.core.sequence_view import SequenceView
from shardwise.models.model_input import ModelInput, check_tensors
from shardwise.models.transformer.block import TransformerBlock
from shardwise.models.transformer.core_attention import KeyValueCache, RowCache
from shardwise.models.transformer.masks import AttnMaskType
from shardwise.models.transformer_model import TransformerModel


class GPT(TransformerModel):
    """Embedding, transformer block and output layer, or one pipeline stage of them.

    Args:
        config: the model. Arguments that are not None replace its fields of the same names.
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
        cache: KeyValueCache | RowCache | None = None,
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
            cache: keys and values of earlier tokens, for generation; give ``position_ids`` with it. With a ``RowCache``
                logits are those of its ``rows``, ``[n, 1, v/t]``.
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
        others = {"position_ids": position_ids, "attention_mask": attention_mask, "document_ids": document_ids}
        check_tensors(input_ids, labels, **others, hidden=hidden)
        view = self._sequence_of(input_ids, position_ids, labels, hidden=hidden)
        b, skips = self._num_samples(input_ids, hidden), self.positions_skip_padding
        kept: dict[str, Any] = {"documents": document_ids, "lengths": lengths, "cache": cache, "skips_padding": skips}
        batch = ModelInput.of(view, b, input_ids, position_ids, attention_mask, labels, **kept)
        if hidden is not None:
            self._check_hidden(hidden, view)
        else:
            # A routing names the places of tokens in rows as they are given.
            if batch.tokens is not None and self.rerouting is None and self._sees_all_before:
                batch = batch.tokens_first()
            hidden = self._hidden_of(batch)
        hidden = self.decoder(hidden, **self._for_layers(batch, hidden, counts_tokens=True))
        if not self.post_process:
            return hidden
        if isinstance(cache, RowCache):
            return self._logits_of(cache.rows, hidden, view)
        if batch.labels is None:
            logits = self._logits(hidden, view)
            return logits if batch.moved is None else batch.moved.move_sequence_back(logits)
        loss = self._loss(hidden, batch.labels, view)
        return loss if batch.moved is None else batch.moved.move_back(loss)

    def next_logits(self, *args: Tensor | None, **options: Any) -> Tensor:
        """Return the logits of the token after each sequence, ``[b, v/t]``; arguments as for ``forward``."""
        logits: Tensor = self(*args, **options)
        return logits[-1]

    def _logits_of(self, rows: Tensor, hidden: Tensor, view: SequenceView) -> Tensor:
        if len(rows) == 0:
            return hidden[:0]
        # With sequence parallelism another rank may hold a row.
        whole = self.sequence_parallel
        return self._logits(hidden, view)[rows] if whole else self._logits(hidden[rows], SequenceView(len(rows)))

    def _check_hidden(self, hidden: Tensor, sequence: SequenceView) -> None:
        start, stop = sequence.interval
        if not self.pre_process or hidden.dim() != 3 or hidden.size(0) != stop - start:
            raise ShardingError(
                f"hidden states of shape {list(hidden.shape)} are given to a model with pre_process="
                f"{self.pre_process}; the first stage takes [{stop - start}, batch, {self.config.hidden_size}] here"
            )

    @property
    def _sees_all_before(self) -> bool:
        """True if in every layer a token sees all earlier tokens and no later ones."""
        masks = (getattr(layer.self_attention, "attn_mask_type", AttnMaskType.no_mask) for layer in self.block.layers)
        return self.config.window_size is None and all(mask.is_causal for mask in masks)
