"""Megatron's base class of language models."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from shardwise.core.errors import ConfigError
from shardwise.core.sharding import ParamShard
from shardwise.core.topology import Groups
from shardwise.core.validation import validation_applies
from shardwise.megatron.core.parallel_state import resolve_tensor_model_parallel_group
from shardwise.megatron.core.process_groups_config import ProcessGroupCollection, _groups_of
from shardwise.megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from shardwise.megatron.core.tensor_parallel.module import adopt_marks_, mark_replicas
from shardwise.megatron.core.transformer.module import MegatronModule
from shardwise.megatron.core.transformer.transformer_config import TransformerConfig
from shardwise.megatron.errors import AssertedConfigError, AssertedShardingError, asserting
from shardwise.megatron.surface import given
from shardwise.models import token_embedding
from shardwise.models.language_model import LanguageModel
from shardwise.models.model_fields import PositionEmbedding as PositionEmbedding
from shardwise.nn import viewless
from shardwise.training.gradients.replicas import check_replicas, fingerprints
from shardwise.training.pipeline.stage import wrapped

__all__ = ["LanguageModelEmbedding", "LanguageModule"]


class LanguageModule(LanguageModel, MegatronModule):
    """Base class of GPT, BERT and similar models, and of a program's own models.

    It differs from the engine's ``LanguageModel`` in two points: subclasses call ``setup_embeddings_and_output_layer``
    at the end of their construction, and need not set ``vocab_size``.

    Args:
        config: sizes of the model.
        pg_collection: process groups; None means those of the ambient topology. A model of one stage needs only ``tp``;
            a model of several stages also needs ``pp`` and, with tied weights, ``embd``.

    Attributes:
        tp_group: tensor-parallel group.
        pp_group: pipeline-parallel group, or None.
        embd_group: group of the stages that hold a tied weight, or None.
        cp_group: context-parallel group, or None.
        vp_stage: index of this chunk on its stage; None without interleaving.
        vp_size: number of chunks of each stage; None without interleaving.

    Raises:
        TopologyError: no groups are given and none are initialised.
        ConfigError: ``config.attention_backend`` does not work here.
    """

    config: TransformerConfig
    # Hashes of the labels of the first step. A wrapper that needs them sets an empty list.
    targets_of_first_step: list[Tensor] | None = None
    has_checked_replicas = False

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        LanguageModel.__init__(self, config, self._enter(pg_collection))

    def _enter(self, pg_collection: ProcessGroupCollection | None) -> Groups:
        """Store the collection, by default the ambient topology's, and return it as the engine's ``Groups``."""
        self.pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        return _groups_of(self.pg_collection)

    @property
    def cp_group(self) -> ProcessGroup | None:
        return getattr(self.pg_collection, "cp", None)

    @property
    def vp_size(self) -> int | None:
        return self.config.virtual_pipeline_model_parallel_size

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; before the first one, the tensor-parallel ranks compare the parameters that all hold whole.

        Raises:
            DesyncError: on every rank of the group, if the parameters differ.
        """
        if not self.has_checked_replicas and validation_applies():
            self.has_checked_replicas = True
            adopt_marks_(self)
            check_replicas(self, tp_group=self.tp_group)
        return super().__call__(*args, **kwargs)

    def note_targets(self, labels: Tensor) -> None:
        """Store the hash of a training step's labels if a wrapper needs it."""
        targets = self.targets_of_first_step
        if targets is not None and self.training and torch.is_grad_enabled() and validation_applies():
            targets.append(fingerprints([labels])[0])

    def _set_attention_backend(self) -> None:
        """Raise ConfigError if ``config.attention_backend`` does not work here; no global state is set."""
        self._check_attention_backend()

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Compute the loss ``[b, s]`` from labels ``[b, s]`` and logits ``[s, b, v/t]``; see ``loss_of_logits``."""
        return self.loss_of_logits(labels, logits)

    def loss_of_logits(
        self, labels: Tensor, logits: Tensor, *, inplace_: bool = False, is_scaled: bool = True
    ) -> Tensor:
        """Like the engine's method, but also for models without ``vocab_size``."""
        self.note_targets(labels)
        if self.vocab_size is not None:
            return super().loss_of_logits(labels, logits, inplace_=inplace_, is_scaled=is_scaled)
        options = {"inplace_": inplace_, **({} if is_scaled else self._loss_options)}
        loss = vocab_parallel_cross_entropy(logits, labels.t().contiguous(), tp_group=self.tp_group, **options)
        return viewless(loss.t().contiguous())

    @asserting(AssertedConfigError)
    def compute_output_layer_and_language_model_loss(
        self,
        hidden: Tensor,
        labels: Tensor,
        weight: Tensor | None = None,
        sequence_parallel_enabled: bool = False,
        column_parallel_linear: nn.Module | None = None,
        col_linear_kwargs: dict[str, Any] | None = None,
        reduction: str = "none",
        ignore_index: int = -100,
        *,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Compute the output layer and the cross entropy of each token.

        The two are fused, without all ranks' logits, if there is no ``column_parallel_linear`` or if the config says so
        (``cross_entropy_loss_fusion`` with ``cross_entropy_fusion_impl="linear"``).

        Args:
            hidden: ``[s, b, h]``, or this rank's shard ``[s/t, b, h]`` with sequence parallelism; not modified.
            labels: ``[b, s]`` global ids.
            weight: ``[v/t, h]``, weight of the output layer, or of the embedding that is tied to it.
            sequence_parallel_enabled: whether ``hidden`` is a shard of the sequence.
            column_parallel_linear: the output layer.
            col_linear_kwargs: other arguments of the output layer.
            reduction: ``"none"``, ``"mean"`` or ``"sum"``; only "none" if not fused.
            ignore_index: label that does not contribute to the loss; only -100 if not fused.
            bias: ``[v/t]`` or None, bias of the fused output layer.

        Returns:
            ``[b, s]``, or a scalar if reduced; fp32 (fp64 for fp64 hidden states), the same on every rank.

        Raises:
            VocabularyError: a label outside the vocabulary.
            ConfigError: a missing weight or ``vocab_size``, or an option that needs fusion.
        """
        if column_parallel_linear is not None and not self.fuses_output_layer_and_loss:
            if reduction != "none" or ignore_index != -100:
                raise ConfigError(
                    f"reduction={reduction!r} and ignore_index={ignore_index} need output layer and loss in one; set "
                    "cross_entropy_loss_fusion and cross_entropy_fusion_impl='linear', or leave them out"
                )
            logits, _ = column_parallel_linear(hidden, **(col_linear_kwargs or {}))
            # Only the loss reads these logits, so their gradient may overwrite them.
            return self.loss_of_logits(labels, logits, inplace_=True, is_scaled=False)
        if weight is None:
            raise ConfigError("output layer and loss in one need the output layer's weight; pass it")
        self.note_targets(labels)
        return self.loss_of_hidden(
            hidden,
            labels,
            weight,
            bias=bias,
            sequence_parallel=sequence_parallel_enabled,
            ignore_index=ignore_index,
            reduction=reduction,
        )

    @property
    def fuses_output_layer_and_loss(self) -> bool:
        """True if the config requests a fused output layer and loss, and the group's arithmetic allows it."""
        config = self.config
        fuses = config.cross_entropy_loss_fusion and config.cross_entropy_fusion_impl == "linear"
        return fuses and self._may_fuse_loss and not config.defer_embedding_wgrad_compute

    def setup_embeddings_and_output_layer(self) -> None:
        """Mark the weights of embedding and output layer, and make tied weights equal on the stages that hold them.

        Both weights get ``is_embedding_or_output_parameter``. A weight that is tied on one stage also gets
        ``zero_out_wgrad``. Weights that are tied across stages get ``shared_embedding``, and the last stage's copy gets
        ``shared``; the call is then collective, with the errors of ``setup_tied_weight``.
        """
        model: Any = self
        if self.pre_process:
            model.embedding.word_embeddings.weight.is_embedding_or_output_parameter = True
        if self.post_process and model.output_layer.weight is not None:
            model.output_layer.weight.is_embedding_or_output_parameter = True
        self.setup_tied_weight()
        shared: Any = self.shared_embedding_or_output_weight()
        if shared is not None:
            mark_replicas(self._tied_layer())
            if self.config.pipeline_model_parallel_size == 1:
                shared.zero_out_wgrad = True

    def untie_(self) -> None:
        """See ``LanguageModel.untie_``."""
        shared = self.shared_embedding_or_output_weight()
        for mark in ("shared_embedding", "shared", "zero_out_wgrad") if shared is not None else ():
            vars(shared).pop(mark, None)
        super().untie_()

    @asserting(AssertedShardingError)
    def tie_embeddings_and_output_weights_state_dict(
        self,
        sharded_state_dict: dict[str, ParamShard],
        output_layer_weight_key: str,
        first_stage_word_emb_key: str,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        """Rename the output layer's tied weight to the embedding's name, in-place.

        The last stage's copy becomes a replica of the first stage's entry, which is written once and read by both
        stages.

        Args:
            sharded_state_dict: entries of this stage; modified.
            output_layer_weight_key: name of the output layer's weight, whose entry is removed.
            first_stage_word_emb_key: name of the embedding's weight.
            metadata: no effect.

        Raises:
            ShardingError: a stage without an output layer has an entry for its weight.
        """
        self._tie_state(sharded_state_dict, output_layer_weight_key, first_stage_word_emb_key)


def _output_weight_of(model: nn.Module) -> Parameter:
    """Return the output layer's weight, own or tied, of a model or of the model that it wraps."""
    language_model: Any = wrapped(model, "shared_embedding_or_output_weight")
    shared = language_model.shared_embedding_or_output_weight()
    weight: Parameter = language_model.output_layer.weight if shared is None else shared
    return weight


class LanguageModelEmbedding(token_embedding.TokenEmbedding):
    """``TokenEmbedding`` with the same arguments, by default on the ambient tensor-parallel group."""

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        max_sequence_length: int,
        position_embedding_type: PositionEmbedding = "learned_absolute",
        num_tokentypes: int = 0,
        scatter_to_sequence_parallel: bool = True,
        tp_group: ProcessGroup | None = None,
    ) -> None:
        tp_group = resolve_tensor_model_parallel_group(tp_group)
        super().__init__(**given(locals()))
        mark_replicas(self)

    def zero_parameters(self) -> None:
        """Set all parameters to 0, and mark them as another stage's copies."""
        for table in (self.word_embeddings, self.position_embeddings, self.tokentype_embeddings):
            if table is not None:
                weight: Any = table.weight
                weight.data.zero_()
                weight.shared = True
