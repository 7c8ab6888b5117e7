"""BERT (Devlin et al. 2018, arXiv:1810.04805): bidirectional attention, heads for masked tokens and next sentences."""

import dataclasses
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication import moves
from shardwise.core.errors import ConfigError
from shardwise.core.sequence_view import SequenceView
from shardwise.core.topology import Groups
from shardwise.models.config import ModelConfig
from shardwise.models.model_input import ModelInput, is_token
from shardwise.models.transformer.block import TransformerBlock
from shardwise.models.transformer.layer import TransformerLayerSpec, attention_of
from shardwise.models.transformer.masks import AttnMaskType
from shardwise.models.transformer.mlp import layer_arguments, make_norm
from shardwise.models.transformer_model import TransformerModel
from shardwise.nn import GroupModule, ReplicatedLinear, parameter_device


def _dense(
    config: ModelConfig, out_features: int, tp_group: ProcessGroup, *, sequence_shards: bool = False
) -> ReplicatedLinear:
    assert config.init_method is not None
    arguments = layer_arguments(config, group=tp_group, linear=False)
    return ReplicatedLinear(
        config.hidden_size, out_features, init=config.init_method, sequence_shards=sequence_shards, **arguments
    )


class BertLMHead(GroupModule):
    """Dense layer, activation and norm before the output layer, whole on every rank and applied to its positions."""

    def __init__(self, config: ModelConfig, tp_group: ProcessGroup) -> None:
        super().__init__()
        self.activation_func = config.activation_func
        self.dense = _dense(config, config.hidden_size, tp_group, sequence_shards=config.sequence_parallel)
        with parameter_device(tp_group, on_cpu=config.use_cpu_initialization):
            self.layernorm = make_norm(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[s, b, h]``, or ``[s/t, b, h]``, to the same shape."""
        output: Tensor = self.layernorm(self.activation_func(self.dense(hidden)))
        return output


class Pooler(GroupModule):
    """Summary of the sequence: a dense layer and tanh of the first token's hidden state; whole on every rank."""

    def __init__(self, config: ModelConfig, tp_group: ProcessGroup) -> None:
        super().__init__()
        self.dense = _dense(config, config.hidden_size, tp_group)

    def forward(self, hidden: Tensor, sequence: SequenceView) -> Tensor:
        """Map ``[s, b, h]``, or this rank's shard ``[s/t, b, h]``, to ``[b, h]``.

        With context parallelism the result has zeros on ranks without the first token.
        """
        first = hidden[:1]
        if sequence.group is not None:
            # Each rank that has tokens contributes one. The first rank's token is the first of the sequence.
            sizes = [min(size, 1) for size in sequence.sizes]
            first = moves.gather(first, dim=0, group=sequence.group, sizes=sizes)
        output: Tensor = torch.tanh(self.dense(first[0]))
        # The product keeps the result connected to each rank's backward.
        return output if sequence.context is None else output * float(sequence.context.intervals[0][0] == 0)


class Bert(TransformerModel):
    """Embedding, transformer block, and heads for masked tokens and for the next sentence, or one stage of them.

    The original BERT and Hugging Face's use ``norm_position="post"``, ``embedding_layernorm=True`` and
    ``final_layernorm=False``. Megatron's is pre-norm.

    Args:
        config: the model. Arguments that are not None replace its fields of the same names.
        vocab_size: number of token ids; need not be divisible by the number of ranks.
        max_sequence_length: longest sequence; the size of a learned position embedding.
        groups: process groups, one for each kind of parallelism.
        num_tokentypes: number of token types; 0 for none.
        layer_spec: parts of a layer. The default attention is not causal; for another mask, give
            ``functools.partial(SelfAttention, attn_mask_type=...)``.
        add_binary_head: whether there are a pooler and a head for the next sentence.
        add_lm_head: False for a model without heads, whose result is the hidden states ``[s, b, h]`` of the last layer.
        options: ``pre_process`` and later arguments of ``GPT``.

    Attributes:
        embedding: ``TokenEmbedding``; on the first stage.
        encoder: this stage's layers.
        lm_head: layers before the output layer; on the last stage, like all modules below.
        output_layer: output layer with a bias; with tied weights it has no weight if this is also the first stage.
        pooler, binary_head: modules or None.

    Raises:
        ConfigError: a size or an option is out of range.
        TopologyError: a process group that the stages need is missing or has the wrong ranks.
    """

    block_name = "encoder"
    _attention_is_masked = True
    _output_bias = True
    encoder: TransformerBlock

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int | None = None,
        max_sequence_length: int | None = None,
        *,
        groups: Groups,
        num_tokentypes: int | None = None,
        layer_spec: TransformerLayerSpec | None = None,
        add_binary_head: bool | None = None,
        add_lm_head: bool | None = None,
        **options: Any,
    ) -> None:
        if config.exact_parts is not None:
            raise ConfigError(
                f"exact_parts is {config.exact_parts}, and BERT has no exact form; leave exact_parts at None"
            )
        spec = layer_spec or TransformerLayerSpec()
        if spec.attention is None:
            attention = partial(attention_of(config), attn_mask_type=AttnMaskType.padding)
            spec = dataclasses.replace(spec, attention=attention)
        # The base class creates all parts, and reads these attributes.
        self.num_tokentypes = config.num_tokentypes if num_tokentypes is None else num_tokentypes
        self.add_binary_head = config.add_binary_head if add_binary_head is None else add_binary_head
        self.add_lm_head = config.add_lm_head if add_lm_head is None else add_lm_head
        if not self.add_lm_head:
            if config.final_layernorm:
                raise ConfigError(
                    "add_lm_head is False, and final_layernorm True; a model without heads has no last norm"
                )
            # The last stage is like one in the middle, and there is no output layer to tie.
            options |= {"post_process": False, "share_embeddings_and_output_weights": False}
        self.pooler: Pooler | None = None
        self.binary_head: ReplicatedLinear | None = None
        super().__init__(config, vocab_size, max_sequence_length, groups=groups, layer_spec=spec, **options)

    def _make_heads(self) -> None:
        with self._seeded("lm_head"):
            self.lm_head = BertLMHead(self.config, self.tp_group)
        if self.add_binary_head:
            with self._seeded("pooler"):
                self.pooler = Pooler(self.config, self.tp_group)
            with self._seeded("binary_head"):
                self.binary_head = _dense(self.config, 2, self.tp_group)

    def forward(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        tokentype_ids: Tensor | None = None,
        lm_labels: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None] | Tensor:
        """Return the loss of each token (logits without ``lm_labels``) and the logits of the next-sentence head.

        Args:
            input_ids: ``[b, s]`` token ids. A stage that is not the first reads only their shape, and takes its input
                from ``set_input_tensor``.
            attention_mask: ``[b, s]``, 1 for real tokens and 0 for padding; None means no padding.
            tokentype_ids: ``[b, s]``; all 0 if None and there are token types.
            lm_labels: ``[b, s]`` ids of the masked tokens; -100, whose loss is 0, for other tokens.
            position_ids: ``[s]`` or ``[b, s]``; 0 to ``s - 1`` if None.

        Returns:
            On a stage that is not the last, as for ``GPT.forward``. Otherwise a pair: loss ``[b, s]``, or logits
            ``[s, b, v/t]`` (``[s, b, v]`` without ``parallel_output``); and the logits of "B follows A" and "B is
            random", ``[b, 2]``, or None without ``add_binary_head``. With context parallelism ``s`` is this rank's
            number of positions, and ``b`` of the second its share of the samples (``ContextShard.own_samples``).

        Raises:
            ShardingError: the sequence is too long, a mask has the wrong shape, or a later stage has no input.
            VocabularyError: an id is outside the vocabulary, or a label is invalid.
        """
        view, b = self._sequence_of(input_ids, attention_mask, lm_labels), self._num_samples(input_ids)
        tokens = None if attention_mask is None else is_token(attention_mask, b, view.whole_length)
        batch = ModelInput.of(view, b, input_ids, position_ids, None, lm_labels, tokens=tokens)
        hidden: Tensor = self._hidden_of(batch, tokentype_ids)
        hidden = self.encoder(hidden, **self._for_layers(batch, hidden))
        if not self.post_process:
            return hidden
        binary_logits = None
        if self.pooler is not None and self.binary_head is not None:
            pooled = self.pooler(hidden, view)
            if view.context is not None:
                pooled = moves.reduce_scatter(pooled, dim=0, group=view.context.group)
            binary_logits = self.binary_head(pooled)
        hidden = self.lm_head(hidden)
        scores = self._logits(hidden, view) if batch.labels is None else self._loss(hidden, batch.labels, view)
        return scores, binary_logits
