"""Megatron's GPT and BERT: the engine's models, made from Megatron's arguments and groups."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from shardwise.core.communication import accounting
from shardwise.core.communication.collectives import all_gather, all_reduce
from shardwise.core.communication.context import device_of_host_facts
from shardwise.core.errors import ConfigError, ShardingError
from shardwise.core.sequence_view import ContextShard
from shardwise.megatron.absent import say_once
from shardwise.megatron.core.enums import ModelType as ModelType
from shardwise.megatron.core.models.megatron_transformer import MegatronTransformer, batch_first, refuse_set
from shardwise.megatron.core.packed_seq_params import PackedSeqParams
from shardwise.megatron.core.process_groups_config import ProcessGroupCollection
from shardwise.megatron.core.transformer.module import ModuleSpec
from shardwise.megatron.core.transformer.transformer_config import TransformerConfig
from shardwise.megatron.surface import given, offer
from shardwise.models.bert import Bert, BertLMHead as BertLMHead, Pooler as Pooler
from shardwise.models.generation.cache import with_block
from shardwise.models.gpt import GPT
from shardwise.models.model_fields import PositionEmbedding
from shardwise.models.transformer.attention import SelfAttention
from shardwise.models.transformer.core_attention import KeyValueCache
from shardwise.models.transformer.inference_block import InferenceBlock
from shardwise.models.transformer.layer import TransformerLayerSpec
from shardwise.models.transformer.rotary import RotaryScaling


class GPTModel(MegatronTransformer, GPT):
    """``GPT`` with Megatron's arguments, and logits with Megatron's axes.

    Args:
        config: sizes of the model.
        transformer_layer_spec: spec of a layer's parts, such as ``get_gpt_layer_local_spec()``.
        vocab_size, max_sequence_length, pre_process, post_process, parallel_output, vp_stage: as in ``GPT``.
        share_embeddings_and_output_weights, position_embedding_type, rotary_percent, rotary_base: as in ``GPT``.
        fp16_lm_cross_entropy: no effect but a warning, because the loss is always in fp32 or wider.
        rope_scaling: whether to scale the rotary frequencies as in Llama 3.1, or a ``RotaryScaling``.
        rope_scaling_factor: divisor of the lowest frequencies.
        scatter_embedding_sequence_parallel: with sequence parallelism, whether ``embedding`` returns this rank's shard.
            If not, each forward needs ``decoder_input``.
        seq_len_interpolation_factor: divisor of the rotary positions; None means 1.
        mtp_block_spec: None.
        pg_collection: process groups; None means those of the ambient topology.

    Attributes:
        embedding, decoder, output_layer: as in ``GPT``; the output layer returns its logits and None.

    Raises:
        ConfigError: a size or an option out of range.
        TopologyError: no groups are given and none are initialised, or a group that the stages need is missing.
    """

    def __init__(
        self,
        config: TransformerConfig,
        transformer_layer_spec: ModuleSpec | TransformerLayerSpec,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: PositionEmbedding = "learned_absolute",
        rotary_percent: float = 1.0,
        rotary_base: float = 10000.0,
        rope_scaling: bool | RotaryScaling | None = False,
        rope_scaling_factor: float = 8.0,
        scatter_embedding_sequence_parallel: bool = True,
        seq_len_interpolation_factor: float | None = None,
        mtp_block_spec: None = None,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
    ) -> None:
        arguments = given(locals(), but=("scatter_embedding_sequence_parallel", "mtp_block_spec"))
        refuse_set("a model predicts the next token alone", mtp_block_spec=mtp_block_spec)
        self._scatters_embedding = scatter_embedding_sequence_parallel
        self._construct(GPT, **arguments)
        if isinstance(transformer_layer_spec, ModuleSpec):
            self._check_own_attention()
        # In a tuple, so that it is not a child module.
        self._inference_blocks: tuple[InferenceBlock, ...] = ()
        if config.use_inference_optimized_layers:
            self._inference_view()

    def _check_own_attention(self) -> None:
        """Raise ConfigError if a custom attention would get rotary angles without their factor."""
        scaling = self.rope_scaling
        if scaling is None or scaling.cos_sin_factor == 1.0:
            return
        if not all(type(layer.self_attention) is SelfAttention for layer in self.decoder.layers):
            raise ConfigError(
                f"rope_scaling of kind {scaling.kind!r} multiplies cosine and sine by {scaling.cos_sin_factor}, which "
                "an attention of the program's own is not told; use SelfAttention"
            )

    def _whole(self, own: Tensor | None) -> Tensor | None:
        """Return whole sequences ``[b, s]``, or masks ``[b, 1, s, s]``, in order, from this rank's positions."""
        cp = self.groups.cp
        if own is None or cp is None:
            return own
        dim = 1 if own.dim() == 2 else 2
        if own.dim() not in (2, 4) or own.size(dim) % 2 or own.size(dim) == 0:
            raise ShardingError(
                f"a tensor of shape {list(own.shape)} does not have two runs of positions of [batch, positions] or "
                "[batch, 1, positions, keys]; cut batches with get_batch_on_this_cp_rank"
            )
        return ContextShard(own.size(dim) * cp.size(), cp).in_order(all_gather(own, dim=dim, group=cp), dim=dim)

    def _inference_view(self) -> GPTModel:
        """Return the model on inference layers, which are rebuilt whenever parameters may have been replaced."""
        if not self._inference_blocks:
            block = InferenceBlock.of(self.decoder, fused=self.config.inference_fuse_tp_communication)
            self._inference_blocks = (block,)
        return with_block(self, self._inference_blocks[0])

    def train(self, mode: bool = True) -> Self:
        """See ``torch.nn.Module.train``."""
        self._inference_blocks = ()
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._inference_blocks = ()
        return super()._apply(fn, recurse)

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        """See ``MegatronTransformer.load_state_dict``."""
        self._inference_blocks = ()
        return super().load_state_dict(*args, **options)

    def forward(  # type: ignore[override]  # As Megatron orders the arguments.
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        inference_context: KeyValueCache | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        extra_block_kwargs: dict[str, Any] | None = None,
        runtime_gather_output: bool | None = None,
        *,
        inference_params: KeyValueCache | None = None,
        loss_mask: Tensor | None = None,
        padding_mask: None = None,
        document_ids: Tensor | None = None,
        lengths: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Like ``GPT.forward``, with Megatron's names and axes.

        With ``config.use_inference_optimized_layers``, evaluation mode uses inference layers without gradients; with
        ``inference_fuse_tp_communication``, each of their half blocks makes one exchange.

        With ``config.context_parallel_size``, tensors with positions have those of this rank, which
            ``get_batch_on_this_cp_rank`` takes, and the model gathers them. A mask ``[b, 1, s, s]`` is cut by its rows.

        Args:
            input_ids, position_ids, attention_mask, labels, document_ids, lengths, cache: as in ``GPT.forward``. With
                ``config.variable_seq_lengths`` a later stage may get no ids, or those of other rows (not packed, or
                padded): it takes the shape of its input.
            decoder_input: ``[s, b, h]``, or this rank's shard with sequence parallelism, the decoder's input instead of
                the embedding's output. A later stage ignores it.
            inference_context, inference_params: Megatron's names of ``cache``.
            packed_seq_params: sequences of a row ``[1, s]``; tokens attend within their sequence. Rotary positions
                restart in each sequence, and so do learned positions if ``position_ids`` is None.
            extra_block_kwargs, padding_mask: None.
            runtime_gather_output: whether to return all logits instead of this rank's part; None means the model's
                ``parallel_output`` decides.
            loss_mask: no effect; as in Megatron, the program weights the returned loss of each token.

        Returns:
            Loss ``[b, s]``, or logits ``[b, s, v/t]``, ``[b, s, v]`` if gathered; the engine's are ``[s, b, v/t]``.
            Hidden states as in ``GPT.forward``.

        Raises:
            ConfigError: ``inference_context`` is not a key-value cache or is given in addition to ``cache``, or both
                ``document_ids`` and ``packed_seq_params`` are given, or ``packed_seq_params`` with context parallelism;
                ``decoder_input`` is missing without ``scatter_embedding_sequence_parallel``, or holds integers; an
                argument is given that must be None.
            ShardingError: with context parallelism, an odd number of positions; ``decoder_input`` has the wrong shape.
        """
        refuse_set("a block's layers take no more arguments", extra_block_kwargs=extra_block_kwargs or None)
        refuse_set("give attention_mask [b, s], 1 for tokens, or lengths", padding_mask=padding_mask)
        hidden = self._checked_input(decoder_input) if self.pre_process else None
        inference_context = inference_params if inference_context is None else inference_context
        if self.splits_context:
            if packed_seq_params is not None:
                raise ConfigError(
                    "packed_seq_params describes a row whose sequences context-parallel ranks cut one by one, and here "
                    "they cut rows; give document_ids, cut by get_batch_on_this_cp_rank as the tokens are"
                )
            input_ids, position_ids, attention_mask, labels, document_ids = (
                self._whole(each) for each in (input_ids, position_ids, attention_mask, labels, document_ids)
            )
        elif self.config.variable_seq_lengths and not self.pre_process and inference_context is cache is None:
            input_ids, position_ids = self._as_the_input(input_ids, position_ids, labels)
        if inference_context is not None:
            if cache is not None or not callable(getattr(inference_context, "append", None)):
                raise ConfigError(
                    f"inference_context is of {type(inference_context).__name__}"
                    f"{' beside a cache' if cache is not None else ''}; give a key-value cache such as "
                    "shardwise.models.generation.PreallocatedCache, once"
                )
            cache = inference_context
        if packed_seq_params is not None:
            if document_ids is not None:
                raise ConfigError("packed_seq_params and document_ids both say which tokens are together; give one")
            s = self._sequence_of(input_ids, position_ids, labels, hidden=hidden).length
            b = 1 if input_ids is None else input_ids.size(0)
            document_ids, places = packed_seq_params.documents_and_positions(torch.Size((b, s)))
            if position_ids is None or self.position_embedding_type == "rope":
                position_ids = places
        arguments: dict[str, Any] = {"document_ids": document_ids, "lengths": lengths, "cache": cache, "hidden": hidden}
        if self.training or not self.config.use_inference_optimized_layers:
            output = GPT.forward(self, input_ids, position_ids, attention_mask, labels, **arguments)
        else:
            with torch.no_grad():
                view = self._inference_view()
                output = GPT.forward(view, input_ids, position_ids, attention_mask, labels, **arguments)
        if labels is not None or not self.post_process:
            return output
        return batch_first(self._gathered_or_not(output, runtime_gather_output))

    def next_logits(self, *args: Tensor | None, **options: Any) -> Tensor:
        """See ``GPT.next_logits``."""
        logits: Tensor = self(*args, **options)
        return logits[:, -1]

    def _as_the_input(
        self, input_ids: Tensor | None, position_ids: Tensor | None, labels: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return ids and positions of the shape of a later stage's input."""
        received, group = self._input_of_a_later_stage(), self.tp_group if self.sequence_parallel else None
        s, b = received.shape[:2]
        if group is not None:
            # This rank's part alone does not tell: 5 positions are those of 9, 10 or 11 on two ranks.
            host = device_of_host_facts(group, received.device)
            with accounting.uncounted():
                s = int(all_reduce(torch.tensor(s, device=host), group=group).item())
        matches = input_ids is not None and input_ids.shape == (b, s)
        if matches or (labels is not None and labels.shape != (b, s)):
            return input_ids, position_ids
        if position_ids is not None and position_ids.size(-1) != s:
            position_ids = None
        # Only the shape of ids is read.
        return torch.empty((), dtype=torch.int64, device=received.device).expand(b, s), position_ids

    def _checked_input(self, decoder_input: Tensor | None) -> Tensor | None:
        if decoder_input is None:
            if not self._scatters_embedding and self.sequence_parallel:
                raise ConfigError(
                    "scatter_embedding_sequence_parallel is False, so the embedding returns whole sequences; layers "
                    "take a shard; pass the shard as decoder_input"
                )
        elif not decoder_input.is_floating_point():
            raise ConfigError(
                f"decoder_input is {decoder_input.dtype}, and hidden states are floating point; it is the fourth "
                "argument, before labels, as in Megatron"
            )
        return decoder_input


class BertModel(MegatronTransformer, Bert):
    """``Bert`` with Megatron's arguments, and logits with Megatron's axes.

    Args:
        num_tokentypes: number of token types; 0 for none.
        transformer_layer_spec: spec of a layer's parts. Its ``SelfAttention`` is not causal, unless it has a mask type
            (``functools.partial(SelfAttention, attn_mask_type=...)``).
        add_binary_head: as in ``Bert``.
        return_embeddings: False.

    The other arguments and the errors are the same as in ``GPTModel``, the attributes the same as in ``Bert``.
    """

    def __init__(
        self,
        config: TransformerConfig,
        num_tokentypes: int,
        transformer_layer_spec: ModuleSpec | TransformerLayerSpec,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: PositionEmbedding = "learned_absolute",
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: float | None = None,
        add_binary_head: bool = True,
        return_embeddings: bool = False,
        vp_stage: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        rotary_base: float = 10000.0,
        rope_scaling: RotaryScaling | None = None,
    ) -> None:
        arguments = given(locals(), but=("return_embeddings",))
        refuse_set("forward returns losses or logits", return_embeddings=return_embeddings or None)
        self._construct(Bert, **arguments)
        if config.use_inference_optimized_layers:
            say_once("use_inference_optimized_layers", "BertModel has no layers for inference")

    def forward(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        tokentype_ids: Tensor | None = None,
        lm_labels: Tensor | None = None,
        inference_context: None = None,
        *,
        inference_params: None = None,
        position_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None] | Tensor:
        """Like ``Bert.forward``, but logits of tokens are ``[b, s, v/t]`` (``[b, s, v]`` without ``parallel_output``).

        Raises:
            ConfigError: ``inference_context`` or ``inference_params`` is given.
        """
        contexts = {"inference_context": inference_context, "inference_params": inference_params}
        refuse_set("BERT reads whole sequences, without a cache", **contexts)
        output = Bert.forward(self, input_ids, attention_mask, tokentype_ids, lm_labels, position_ids=position_ids)
        if lm_labels is not None or not isinstance(output, tuple):
            return output
        return batch_first(output[0]), output[1]


offer(globals(), "BertLMHead Pooler")
