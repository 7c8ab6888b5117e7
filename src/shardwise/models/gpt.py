"""GPT: a decoder-only language model, split over the tensor-parallel group."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.collectives.regions import _ScatterToSequenceParallelRegion
from shardwise.config import TransformerConfig
from shardwise.errors import ConfigError, ShardingError
from shardwise.initialization import initialize_shard_
from shardwise.models.language_module import LanguageModule
from shardwise.process_groups_config import ProcessGroupCollection
from shardwise.sharding import ParamLayout
from shardwise.tensor_parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from shardwise.transformer.attention import KeyValueCache
from shardwise.transformer.block import TransformerBlock
from shardwise.transformer.layer import ResidualDropout, TransformerLayerSpec
from shardwise.transformer.rotary import RotaryEmbedding

PositionEmbedding = Literal["learned_absolute", "rope", "none"]


class GPTModel(LanguageModule):
    """Embedding, transformer block and output layer.

    Args:
        config: sizes of the model.
        transformer_layer_spec: what a layer is made of.
        vocab_size: number of token ids, of any size.
        max_sequence_length: longest sequence; the size of a learned position embedding.
        parallel_output: return this rank's part of the logits in place of all.
        share_embeddings_and_output_weights: the output layer uses the embedding's weight.
        position_embedding_type: ``"learned_absolute"``, ``"rope"`` or ``"none"``.
        rotary_percent: share of a head that is rotated.
        rotary_base: base of the rotary wavelengths.
        pg_collection: process groups; the ambient topology's if None.

    Attributes:
        embedding_activation_buffer, grad_output_buffer: with ``config.defer_embedding_wgrad_compute``, what
            ``drain_embedding_wgrad_compute`` must be given after the last backward before the optimizer's step.

    Raises:
        ConfigError: a size that cannot be.
        TopologyError: no groups given and none initialised.
    """

    def __init__(
        self,
        config: TransformerConfig,
        transformer_layer_spec: TransformerLayerSpec,
        vocab_size: int,
        max_sequence_length: int,
        *,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: PositionEmbedding = "learned_absolute",
        rotary_percent: float = 1.0,
        rotary_base: float = 10000.0,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config, pg_collection)
        if vocab_size < self.tp_group.size() or max_sequence_length < 1:
            raise ConfigError(
                f"vocab_size {vocab_size} must be at least the {self.tp_group.size()} tensor-parallel ranks, and "
                f"max_sequence_length {max_sequence_length} at least 1"
            )
        if position_embedding_type not in ("learned_absolute", "rope", "none"):
            raise ConfigError(
                f"position_embedding_type is {position_embedding_type!r}; "
                "it must be 'learned_absolute', 'rope' or 'none'"
            )
        if config.sequence_parallel and self.tp_group.size() == 1:
            warnings.warn(
                "sequence_parallel is set, but the tensor-parallel group has 1 rank, so there is nothing to split: "
                "sequence parallelism is off in this model",
                stacklevel=2,
            )
            # Said once, and not again by each of its layers.
            config = dataclasses.replace(config, sequence_parallel=False)
        assert config.init_method is not None
        self._init_method = config.init_method
        self.vocab_size = vocab_size
        self.max_sequence_length = max_sequence_length
        self.parallel_output = parallel_output
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        self.sequence_parallel = config.sequence_parallel
        learned = position_embedding_type == "learned_absolute"
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size,
            config.hidden_size,
            init_method=config.init_method,
            # Positions are added to the whole sequence before it is split.
            reduce_scatter_embeddings=self.sequence_parallel and not learned,
            config=config,
            tp_group=self.tp_group,
        )
        self.position_embeddings: nn.Parameter | None = None
        if learned:
            table = self.word_embeddings.weight.detach().new_empty(max_sequence_length, config.hidden_size)
            self.position_embeddings = nn.Parameter(table)
            if config.perform_initialization:
                self._initialize_positions()
        self.rotary: RotaryEmbedding | None = None
        if position_embedding_type == "rope":
            self.rotary = RotaryEmbedding(config.heads[2], rotary_percent, rotary_base)
        self.embedding_dropout = ResidualDropout(config.hidden_dropout, self.sequence_parallel, self.tp_group)
        self.decoder = TransformerBlock(config, transformer_layer_spec, self.tp_group)
        defers = config.defer_embedding_wgrad_compute
        self.embedding_activation_buffer: list[Tensor] | None = [] if defers else None
        self.grad_output_buffer: list[Tensor] | None = [] if defers else None
        self.output_layer = ColumnParallelLinear(
            config.hidden_size,
            vocab_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            skip_weight_param_allocation=share_embeddings_and_output_weights,
            embedding_activation_buffer=self.embedding_activation_buffer,
            grad_output_buffer=self.grad_output_buffer,
            tp_group=self.tp_group,
        )
        # A deferred weight gradient is the output layer's own affair.
        self.fuses_output_layer_and_loss = (
            config.cross_entropy_loss_fusion and config.cross_entropy_fusion_impl == "linear" and not defers
        )
        self._gradient_is_partial = {
            name: param.sequence_parallel
            for name, param in self.named_parameters()
            if hasattr(param, "sequence_parallel")
        }

    def _initialize_positions(self) -> None:
        table = self.position_embeddings
        assert table is not None
        layout = ParamLayout.replicated(table.shape, self.tp_group.size())
        initialize_shard_(
            table, layout, self.tp_group.rank(), self._init_method, on_cpu=self.config.use_cpu_initialization
        )

    def reset_parameters(self) -> None:
        """Give all parameters their initial values, as when the model was made.

        A model made under ``torch.device("meta")`` is first allocated on PyTorch's default device (call ``to_empty``
        before for another). The values are those that a model made there would have had, if the generator is in the
        same state.
        """
        if any(param.is_meta for param in self.parameters()):
            self.to_empty(device=torch.get_default_device())
        # `to_empty` may make new parameters, without their marks.
        for name, is_partial in self._gradient_is_partial.items():
            param: Any = self.get_parameter(name)
            param.sequence_parallel = is_partial
        for module in self.modules():
            reset: Any = getattr(module, "reset_parameters", None)
            if reset is None or module is self:
                continue
            reset()
            if module is self.word_embeddings and self.position_embeddings is not None:
                self._initialize_positions()

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """The weight that embedding and output layer share, or None if they do not."""
        return self.word_embeddings.weight if self.share_embeddings_and_output_weights else None

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Loss of each token with ``labels``, else logits.

        Args:
            input_ids: ``[b, s]`` token ids.
            position_ids: ``[s]`` or ``[b, s]``; 0 to ``s - 1`` if None.
            attention_mask: True where attention is forbidden, broadcast to ``[b, heads, s, keys]``; causal if None.
            labels: ``[b, s]`` ids to predict; -100 costs nothing.
            cache: keys and values of earlier tokens, for generation; give ``position_ids`` with it.

        Returns:
            Loss ``[b, s]``, or logits ``[s, b, v/t]`` (``[s, b, v]`` without ``parallel_output``).

        Raises:
            ShardingError: the sequence is too long.
            VocabularyError: an id outside the vocabulary.
        """
        hidden, rotary = self._embed(input_ids, position_ids)
        s = input_ids.size(1)
        hidden = self.decoder(hidden, attention_mask=attention_mask, rotary=rotary, cache=cache, sequence_length=s)
        shared_weight = self.shared_embedding_or_output_weight()
        if labels is not None and self.fuses_output_layer_and_loss:
            weight = self.output_layer.weight if shared_weight is None else shared_weight
            assert weight is not None
            return self.compute_output_layer_and_language_model_loss(
                hidden, labels, weight, sequence_parallel=self.sequence_parallel
            )
        logits, _ = self.output_layer(
            hidden,
            shared_weight,
            runtime_gather_output=labels is None and not self.parallel_output,
            sequence_length=s,
        )
        if labels is None:
            result: Tensor = logits
            return result
        # Only the loss reads these logits, so their memory may become their gradient's.
        return self._loss(labels, logits, inplace_=True)

    def _embed(self, input_ids: Tensor, position_ids: Tensor | None) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        s = input_ids.size(1)
        if s > self.max_sequence_length:
            raise ShardingError(
                f"the sequence has {s} tokens, the model's max_sequence_length is {self.max_sequence_length}"
            )
        if position_ids is None:
            position_ids = torch.arange(s, device=input_ids.device)
        hidden = self.word_embeddings(input_ids)
        if not self.word_embeddings.reduce_scatter_embeddings:
            if self.position_embeddings is not None:
                hidden = hidden + F.embedding(position_ids, self.position_embeddings)
            hidden = hidden.transpose(0, 1).contiguous()
            if self.sequence_parallel:
                hidden = _ScatterToSequenceParallelRegion.apply(hidden, self.tp_group)
        rotary = None if self.rotary is None else self.rotary(position_ids, hidden.dtype)
        return self.embedding_dropout(hidden, sequence_length=s), rotary
