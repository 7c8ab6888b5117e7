"""Megatron's transformer block: the engine's stack of layers, and how programs describe one."""

from shardwise.megatron.core.transformer.transformer_config import TransformerConfig
from shardwise.megatron.core.transformer.transformer_layer import (
    TransformerBlockSubmodules as TransformerBlockSubmodules,
    _chunk_of_layers,
    get_transformer_layer_offset as get_transformer_layer_offset,
)
from shardwise.megatron.surface import offer
from shardwise.models.transformer.block import TransformerBlock as TransformerBlock


def get_num_layers_to_build(config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None) -> int:
    """Number of layers of a stage, or of its chunk ``vp_stage``.

    Args:
        config: config with the distribution of layers over stages.
        vp_stage: index of the chunk, with interleaving.
        pp_rank: index of the stage; None means this rank's stage.

    Raises:
        ConfigError: there is no such stage or chunk.
    """
    return len(_chunk_of_layers(config, vp_stage, pp_rank))


offer(globals(), "TransformerBlock TransformerBlockSubmodules get_transformer_layer_offset")
