"""Megatron's BERT."""

from shardwise.megatron.arguments import given
from shardwise.megatron.core.models.transformer import MegatronTransformer
from shardwise.megatron.core.process_groups_config import ProcessGroupCollection
from shardwise.megatron.core.transformer.spec_utils import ModuleSpec
from shardwise.megatron.core.transformer.transformer_config import TransformerConfig
from shardwise.megatron.errors import AssertedShardingError, asserting
from shardwise.megatron.inert_settings import say_once
from shardwise.models.bert import Bert, BertLMHead, Pooler
from shardwise.models.token_embedding import PositionEmbedding
from shardwise.models.transformer.layer import TransformerLayerSpec
from shardwise.models.transformer.rotary import RotaryScaling

__all__ = ["BertLMHead", "BertModel", "Pooler"]


class BertModel(MegatronTransformer, Bert):
    """``Bert`` as Megatron has it.

    Args:
        config: sizes of the model.
        num_tokentypes: number of token types; 0 for none.
        transformer_layer_spec: what a layer is made of. Its ``SelfAttention`` is not causal here, unless one is given
            that says what it forbids (``functools.partial(SelfAttention, attn_mask_type=...)``).
        vocab_size, max_sequence_length, pre_process, post_process, parallel_output,
            share_embeddings_and_output_weights, position_embedding_type, rotary_percent, rotary_base, add_binary_head,
            rope_scaling, vp_stage: as ``Bert``.
        fp16_lm_cross_entropy: accepted with a warning; the loss is in fp32 or wider always.
        pg_collection: process groups; the ambient topology's if None.

    Attributes:
        embedding, encoder, lm_head, output_layer, pooler, binary_head: as ``Bert``.

    Raises:
        ConfigError: a size or an option out of range.
        TopologyError: no groups given and none initialised, or not those that the stages need.
    """

    set_input_tensor = asserting(AssertedShardingError)(Bert.set_input_tensor)

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
        rotary_base: float = 10000.0,
        add_binary_head: bool = True,
        *,
        rope_scaling: RotaryScaling | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
    ) -> None:
        self._construct(Bert, **given(locals()))
        if config.use_inference_optimized_layers:
            say_once("use_inference_optimized_layers", "BertModel has no layers for inference")
