"""Megatron's transformer block: the engine's stack of layers, and how programs describe one."""

from typing import Any

from torch import Tensor

from shardwise.core.errors import ConfigError
from shardwise.megatron.absent import HasInstances
from shardwise.megatron.core.process_groups_config import ProcessGroupCollection, _groups_of
from shardwise.megatron.core.tensor_parallel.module import adopt_marks_, mark_replicas
from shardwise.megatron.core.transformer.layer_parts import _engine_arguments
from shardwise.megatron.core.transformer.module import MegatronModule
from shardwise.megatron.core.transformer.transformer_config import TransformerConfig
from shardwise.megatron.core.transformer.transformer_layer import (
    TransformerBlockSubmodules as TransformerBlockSubmodules,
    _chunk_of_layers,
    _move_norms_,
    get_transformer_layer_offset as get_transformer_layer_offset,
    layer_spec_of,
)
from shardwise.megatron.surface import offer
from shardwise.models.transformer import block


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


class TransformerBlock(block.TransformerBlock, MegatronModule, metaclass=HasInstances):
    """The engine's ``TransformerBlock`` with Megatron's arguments: the layers of this stage, for a model of one's own.

    Args:
        config: sizes of the model.
        spec: spec of a layer or of a block; all layers have one.
        post_layer_norm: whether there is a norm after the model's last layer.
        pre_process: whether this is the first stage; on others ``forward`` reads the tensor of ``set_input_tensor``.
        post_process: whether this is the last stage.
        pg_collection: collection with the group ``tp``; None means the ambient topology's.
        vp_stage: index of this stage's chunk, with interleaving.

    Attributes:
        layers: the layers of this stage; ``layer_number`` of each is its number in the model, from 1.
        input_tensor: hidden states of the stage before, or None.
        checkpoint_core_attention: whether the backward recomputes the scores and their product with the values.

    Raises:
        ConfigError: a spec that layers do not support here.
    """

    # Also the blocks of models.
    implementation = block.TransformerBlock

    def __init__(
        self,
        config: TransformerConfig,
        spec: Any,
        post_layer_norm: bool = True,
        pre_process: bool = True,
        post_process: bool = True,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
    ) -> None:
        config.check_complete()
        groups = _groups_of(pg_collection)
        layer_spec = layer_spec_of(spec, config)
        super().__init__(
            config,
            layer_spec,
            groups.tp,
            layers=_chunk_of_layers(config, vp_stage, None),
            post_process=post_process and post_layer_norm,
            groups=groups,
        )
        self.pre_process, self.post_process, self.vp_stage = pre_process, post_process, vp_stage
        self.num_layers_per_pipeline_rank = len(self.layers)
        self.checkpoint_core_attention = config.recompute.recomputes("core_attn")
        self.input_tensor: Tensor | None = None
        layers: Any = self.layers
        for layer in layers:
            _move_norms_(layer, layer_spec, config)
        adopt_marks_(self)
        mark_replicas(self)
        self.config = config
        config.note_read()

    def set_input_tensor(self, input_tensor: Tensor) -> None:
        """Set the hidden states of the stage before, which ``forward`` reads without ``pre_process``."""
        self.input_tensor = input_tensor

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor | None, attention_mask: Tensor | None, **arguments: Any
    ) -> Tensor:
        """Apply the layers.

        Args:
            hidden_states: ``[s, b, h]``, or this rank's shard ``[s/t, b, h]`` with sequence parallelism; unused without
                ``pre_process``.
            attention_mask, arguments: as for ``TransformerLayer``.

        Returns:
            The hidden states, of the same shape.

        Raises:
            ConfigError: an argument that layers do not take here, or no hidden states.
        """
        hidden = hidden_states if self.pre_process else self.input_tensor
        if hidden is None:
            raise ConfigError(f"pre_process is {self.pre_process}; give hidden_states, or call set_input_tensor before")
        return super().forward(hidden, **_engine_arguments(self, hidden, attention_mask, **arguments))

    def _get_layer(self, layer_number: int) -> Any:
        return self.layers[layer_number]


offer(globals(), "TransformerBlockSubmodules get_transformer_layer_offset")
