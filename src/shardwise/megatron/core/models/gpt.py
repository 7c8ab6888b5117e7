"""Megatron's GPT."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from shardwise.core.errors import ConfigError
from shardwise.megatron.arguments import given
from shardwise.megatron.core.models.transformer import MegatronTransformer
from shardwise.megatron.core.packed_seq_params import PackedSeqParams
from shardwise.megatron.core.process_groups_config import ProcessGroupCollection
from shardwise.megatron.core.transformer.spec_utils import ModuleSpec
from shardwise.megatron.core.transformer.transformer_config import TransformerConfig
from shardwise.megatron.errors import AssertedShardingError, asserting
from shardwise.models.generation.cache import with_block
from shardwise.models.gpt import GPT
from shardwise.models.token_embedding import PositionEmbedding
from shardwise.models.transformer.attention import KeyValueCache, SelfAttention
from shardwise.models.transformer.inference_block import InferenceBlock
from shardwise.models.transformer.layer import TransformerLayerSpec
from shardwise.models.transformer.rotary import RotaryScaling

__all__ = ["GPTModel"]


class GPTModel(MegatronTransformer, GPT):
    """``GPT`` as Megatron has it.

    Args:
        config: sizes of the model.
        transformer_layer_spec: what a layer is made of, such as ``get_gpt_layer_local_spec()``.
        vocab_size, max_sequence_length, pre_process, post_process, parallel_output,
            share_embeddings_and_output_weights, position_embedding_type, rotary_percent, rotary_base, rope_scaling,
            vp_stage: as ``GPT``.
        fp16_lm_cross_entropy: accepted with a warning; the loss is in fp32 or wider always.
        pg_collection: process groups; the ambient topology's if None.

    Attributes:
        embedding, decoder, output_layer: as ``GPT``; the output layer returns its logits and None.

    Raises:
        ConfigError: a size or an option out of range.
        TopologyError: no groups given and none initialised, or not those that the stages need.
    """

    set_input_tensor = asserting(AssertedShardingError)(GPT.set_input_tensor)

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
        *,
        rope_scaling: RotaryScaling | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
    ) -> None:
        self._construct(GPT, **given(locals()))
        if isinstance(transformer_layer_spec, ModuleSpec):
            self._check_own_attention()
        # In a tuple, so that it is no child of this model.
        self._inference_blocks: tuple[InferenceBlock, ...] = ()
        if config.use_inference_optimized_layers:
            self._inference_view()

    def _check_own_attention(self) -> None:
        """Raise ConfigError where an attention of the program's own would be given angles, and not their factor."""
        scaling = self.rope_scaling
        if scaling is None or scaling.cos_sin_factor == 1.0:
            return
        if not all(type(layer.self_attention) is SelfAttention for layer in self.decoder.layers):
            raise ConfigError(
                f"rope_scaling of kind {scaling.kind!r} multiplies cosine and sine by {scaling.cos_sin_factor}, which "
                "an attention of the program's own is not told; use SelfAttention"
            )

    def _inference_view(self) -> GPTModel:
        """The model on layers for inference, which are made again after parameters may have been replaced."""
        if not self._inference_blocks:
            fused = self.config.inference_fuse_tp_communication
            self._inference_blocks = (InferenceBlock.of(self.decoder, fused=fused),)
        return with_block(self, self._inference_blocks[0])

    def train(self, mode: bool = True) -> Self:
        """As ``torch.nn.Module``'s."""
        self._inference_blocks = ()
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._inference_blocks = ()
        return super()._apply(fn, recurse)

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        """As ``torch.nn.Module``'s."""
        self._inference_blocks = ()
        return super().load_state_dict(*args, **options)

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        inference_context: KeyValueCache | None = None,
        loss_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        lengths: Tensor | None = None,
        cache: KeyValueCache | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """As ``GPT``'s, with Megatron's names; in evaluation mode without gradient if the config says so.

        With ``config.use_inference_optimized_layers`` evaluation mode is on layers for inference, and with
        ``inference_fuse_tp_communication`` each of their half blocks makes one exchange.

        Args:
            input_ids, position_ids, attention_mask, labels, document_ids, lengths, cache: as there.
            inference_context: a cache, under Megatron's name for what generation goes on from.
            packed_seq_params: the sequences of a row ``[1, s]``: tokens see those of their own sequence only. Rotary
                positions begin anew in each, and so do those of a table where ``position_ids`` is None.
            loss_mask: accepted; the loss of each token is returned, and the program weighs it, as with Megatron's.

        Returns:
            As there.

        Raises:
            ConfigError: ``inference_context`` is no key-value cache; there is another ``cache``, or ``document_ids`` as
                well as ``packed_seq_params``.
        """
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
            s = self._sequence_of(input_ids, position_ids, labels).length
            b = 1 if input_ids is None else input_ids.size(0)
            document_ids, places = packed_seq_params.documents_and_positions(torch.Size((b, s)))
            if position_ids is None or self.position_embedding_type == "rope":
                position_ids = places
        arguments: dict[str, Any] = {"document_ids": document_ids, "lengths": lengths, "cache": cache}
        if self.training or not self.config.use_inference_optimized_layers:
            return GPT.forward(self, input_ids, position_ids, attention_mask, labels, **arguments)
        with torch.no_grad():
            return GPT.forward(self._inference_view(), input_ids, position_ids, attention_mask, labels, **arguments)
