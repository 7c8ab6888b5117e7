"""The base of language models: process groups, loss over a split vocabulary, tied weights, and checkpoint state."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication.collectives import all_reduce
from shardwise.core.communication.context import device_of
from shardwise.core.errors import ConfigError, ShardingError, TopologyError
from shardwise.core.sequence_view import SequenceView
from shardwise.core.sharded_state import state_of_parts
from shardwise.core.sharding import ParamShard, Replicas, ShardedOffset
from shardwise.core.topology import Groups
from shardwise.exact import sum_in_parts
from shardwise.models.config import ModelConfig
from shardwise.models.transformer.attention_backends import check_attention_backend
from shardwise.nn import GroupModule, arithmetic_of, parameter_device, viewless
from shardwise.nn.loss.cross_entropy import vocab_parallel_cross_entropy
from shardwise.nn.loss.linear_cross_entropy import vocab_parallel_linear_cross_entropy
from shardwise.nn.replicated import set_replicas_


class LanguageModel(GroupModule):
    """Base of language models.

    A subclass sets ``pre_process`` (whether it has ``embedding.word_embeddings``), ``post_process`` (whether it has
    ``output_layer``), ``share_embeddings_and_output_weights``, ``vocab_size`` and, with interleaving, ``vp_stage``. It
    calls ``setup_tied_weight`` at the end of its constructor. With tied weights, only a stage without the embedding has
    a separate weight in the output layer.

    Args:
        config: sizes of the model.
        groups: process groups. A model of several stages needs ``pp`` and, with tied weights, ``embd``.

    Attributes:
        vp_stage: index of the chunk in its stage; None without interleaving.

    Raises:
        ConfigError: ``config.attention_backend`` does not work on this device.
    """

    config: ModelConfig
    pre_process: bool
    post_process: bool
    # Defaults for models that do not set these.
    share_embeddings_and_output_weights: bool = False
    vocab_size: int | None = None
    vp_stage: int | None = None
    alibi_slopes: Tensor | None = None
    # Whether attention always has a mask or bias besides the causal one, which some backends do not support.
    _attention_is_masked = False

    def __init__(self, config: ModelConfig, groups: Groups) -> None:
        super().__init__()
        self.config = config
        self.groups = groups
        self._check_attention_backend()
        if config.exact_parts is not None:
            for name in ("gradient_accumulation_fusion", "defer_embedding_wgrad_compute"):
                if getattr(config, name):
                    raise ConfigError(
                        f"exact_parts is {config.exact_parts}, and {name} has no exact form; turn one of them off"
                    )
            sum_in_parts(groups.tp, config.exact_parts, context=groups.data.group)
        self._arithmetic = arithmetic_of(groups.tp)
        self._may_fuse_loss = self._arithmetic.may_fuse_loss()

    @property
    def depends_on_length(self) -> bool:
        """True if the result for a token depends on the length of its text."""
        return False

    @property
    def needs_lengths(self) -> bool:
        """True if training reads the lengths of texts."""
        return self.depends_on_length

    @property
    def splits_context(self) -> bool:
        """True if ranks share the positions of each sample (context parallelism)."""
        return self.groups.data.group is not None

    def view_of(self, length: int) -> SequenceView:
        """Return this rank's view of the hidden states of sequences of ``length`` tokens."""
        return self.groups.data.view(length, self.tp_group if self.config.sequence_parallel else None)

    @property
    def tp_group(self) -> ProcessGroup:
        """The ranks that split each layer."""
        return self.groups.tp

    @property
    def pp_group(self) -> ProcessGroup | None:
        """The ranks of the pipeline stages."""
        return self.groups.pp

    @property
    def embd_group(self) -> ProcessGroup | None:
        """The stages that hold a tied weight."""
        return self.groups.embd

    def _check_attention_backend(self) -> None:
        device = parameter_device(self.tp_group, on_cpu=self.config.use_cpu_initialization)
        check_attention_backend(self.config, device, masked=self._attention_is_masked)

    @property
    def _loss_options(self) -> dict[str, Any]:
        return {"softcap": self.config.final_logit_softcap, "temperature": self.config.logits_scaling}

    def loss_of_logits(
        self, labels: Tensor, logits: Tensor, *, inplace_: bool = False, is_scaled: bool = True
    ) -> Tensor:
        """Compute the cross entropy of each token.

        Args:
            labels: ``[b, s]`` global ids; -100 has loss 0.
            logits: ``[s, b, v/t]``; not modified, unless ``inplace_`` allows the gradient to overwrite them.
            is_scaled: whether ``config.final_logit_softcap`` and ``config.logits_scaling`` were already applied.

        Returns:
            ``[b, s]``, fp32 (fp64 for fp64 logits), the same on every rank.

        Raises:
            VocabularyError: a label is outside the vocabulary.
        """
        assert self.vocab_size is not None
        loss = vocab_parallel_cross_entropy(
            logits,
            labels.t().contiguous(),
            group=self.tp_group,
            vocab_size=self.vocab_size,
            inplace_=inplace_,
            **({} if is_scaled else self._loss_options),
        )
        return viewless(loss.t().contiguous())

    def loss_of_hidden(
        self,
        hidden: Tensor,
        labels: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
        sequence_parallel: bool = False,
        ignore_index: int = -100,
        reduction: str = "none",
    ) -> Tensor:
        """Compute the fused output layer and cross entropy of each token, without the logits of all ranks.

        Args:
            hidden: ``[s, b, h]``, or this rank's shard ``[s/t, b, h]`` with sequence parallelism; not modified.
            labels: ``[b, s]`` global ids; ``ignore_index`` has loss 0.
            weight, bias: ``[v/t, h]`` and ``[v/t]`` or None, of the output layer; or the weight of the tied embedding.
            sequence_parallel: whether ``hidden`` is a shard of the sequence.
            reduction: ``"none"``, ``"mean"`` or ``"sum"``.

        Returns:
            ``[b, s]``, or a scalar if reduced; fp32 (fp64 for fp64 hidden states), the same on every rank.

        Raises:
            VocabularyError: a label is outside the vocabulary.
        """
        if self.vocab_size is None:
            raise ConfigError(
                "output layer and loss in one need the size of the vocabulary, and this "
                f"{type(self).__name__}'s vocab_size is None; set it"
            )
        # The output layer, which is not called, would have waited for the weight's pending all-gather.
        wait_for_values = getattr(weight, "wait_for_values", None)
        if wait_for_values is not None:
            wait_for_values()
        loss = vocab_parallel_linear_cross_entropy(
            hidden,
            weight,
            labels.t().contiguous(),
            bias=bias,
            group=self.tp_group,
            vocab_size=self.vocab_size,
            ignore_index=ignore_index,
            reduction=reduction,
            sequence_parallel=sequence_parallel,
            gradient_accumulation_fusion=self.config.gradient_accumulation_fusion,
            **self._loss_options,
        )
        return viewless(loss.t().contiguous()) if reduction == "none" else loss

    @property
    def fuses_output_layer_and_loss(self) -> bool:
        """True if the output layer and the loss are fused."""
        # A deferred weight gradient needs a call of the output layer, and a layer with adapters adds further products.
        separate = self.config.defer_embedding_wgrad_compute or not self._may_fuse_loss
        output_layer: Any = getattr(self, "output_layer", None)
        separate |= not getattr(output_layer, "is_one_product", True)
        return self.config.fuse_output_layer_and_loss and not separate

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """Return the tied weight on this stage: the word embedding's on the first, the output layer's on the last.

        Returns:
            ``[v/t, h]``, or None on a middle stage or if the weights are not tied.
        """
        if not self.share_embeddings_and_output_weights:
            return None
        return self._tied_layer().weight if self.pre_process or self.post_process else None

    def _tied_layer(self) -> Any:
        model: Any = self
        return model.embedding.word_embeddings if self.pre_process else model.output_layer

    def setup_tied_weight(self) -> None:
        """Synchronize the copies of a weight that is tied over several stages, and set their replicas.

        Gradients are summed over the embedding group. The last stage's weight has ``is_copy``, so that norms and
        checkpoints include the weight once. For such a weight the call is collective over the embedding group: the copy
        is set to 0, and one all-reduce gives it the first stage's values. For a meta tensor only replicas are set.

        Raises:
            TopologyError: weights are tied over several stages, but there is no embedding group.
            ConfigError: the ranks of the embedding group are not the first and the last stage.
        """
        weight: Any = self.shared_embedding_or_output_weight()
        num_stages = self.config.pipeline_model_parallel_size if self.pp_group is None else self.groups.num_stages
        if weight is None or num_stages == 1 or (self.pre_process and self.post_process):
            return
        if self.embd_group is None:
            raise TopologyError(
                "embedding and output layer are tied over several pipeline stages, and there is no embedding group; "
                "give the model's groups a group 'embd' of the first and the last stage"
            )
        self._check_embedding_group(self.embd_group)
        replicas = Replicas(("tp", "dp", "embd"), summed_over=("embd",), is_copy=not self.pre_process)
        set_replicas_(self._tied_layer(), replicas, "weight")
        if not weight.is_meta and self._is_in_embd_group():
            with torch.no_grad():
                if not self.pre_process:
                    weight.zero_()
                own = weight.detach()
                # A GPU group may not be able to communicate a weight that was drawn on the CPU.
                own = own.to(device_of(self.embd_group)) if own.is_cpu else own
                weight.copy_(all_reduce(own, group=self.embd_group))

    def untie_(self) -> None:
        """Give a tied output layer a separate weight with the embedding's values, in place; no communication."""
        shared: Any = self.shared_embedding_or_output_weight()
        self.share_embeddings_and_output_weights = False
        if shared is None:
            return
        set_replicas_(self._tied_layer(), Replicas(), "weight")
        model: Any = self
        if self.pre_process and self.post_process:
            model.output_layer.own_weight_(shared.detach().clone())
            model.output_layer.weight.requires_grad_(shared.requires_grad)

    def _check_embedding_group(self, group: ProcessGroup) -> None:
        if self.pp_group is None:
            return
        ranks, stages = dist.get_process_group_ranks(group), dist.get_process_group_ranks(self.pp_group)
        if set(ranks) != {stages[0], stages[-1]}:
            raise ConfigError(
                f"the embedding group has ranks {ranks}, and of the stages {stages} the first and the last hold the "
                "tied weight; leave get_embedding_ranks out"
            )

    def _is_in_embd_group(self) -> bool:
        """Return whether this part of the model is in the embedding group."""
        if self.embd_group is None:
            return False
        # The first chunk of the first rank, the last chunk of the last rank, and every chunk of any rank between them
        # (``get_embedding_ranks`` may add some).
        ranks = dist.get_process_group_ranks(self.embd_group)
        chunk, num_chunks = self.vp_stage or 0, self.config.virtual_pipeline_model_parallel_size or 1
        if dist.get_rank() == ranks[0]:
            return chunk == 0
        if dist.get_rank() == ranks[-1]:
            return chunk == num_chunks - 1
        return dist.get_rank() in ranks

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[ShardedOffset] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ParamShard]:
        """Return this rank's part of every parameter, by its name in the whole model.

        Layers are numbered over all stages. A tied output weight is stored once, under the embedding's name. A
        vocabulary may have another size on load (``allow_shape_mismatch``).

        Args:
            prefix: prefix of each name.
            sharded_offsets: ``(axis, index, count)`` of leading axes that stack this model with others of one name.
            metadata: passed to submodules that define ``sharded_state_dict``.

        Raises:
            ShardingError: ``sharded_offsets`` contradict each other.
        """
        entries = state_of_parts(self, prefix, sharded_offsets, metadata, group=self.tp_group)
        output_weight, output_bias = f"{prefix}output_layer.weight", f"{prefix}output_layer.bias"
        for name in (output_weight, output_bias):
            if name in entries:
                entries[name] = entries[name].with_key(entries[name].key, allow_shape_mismatch=True)
        if self.share_embeddings_and_output_weights:
            self._tie_state(entries, output_weight, f"{prefix}embedding.word_embeddings.weight")
        return entries

    def _tie_state(self, entries: dict[str, ParamShard], output_key: str, embedding_key: str) -> None:
        """Rename the tied output weight to the embedding's name, so that it is written once and both stages read it."""
        if not self.post_process:
            if output_key in entries:
                raise ShardingError(
                    f"{output_key!r} is in the state of a stage without output layer (post_process=False)"
                )
            return
        copy = entries.pop(output_key, None)
        if self.pre_process:
            return
        if copy is None:
            raise ShardingError(
                f"{output_key!r} is not in the state of the last stage; a tied weight over several stages has a copy "
                "there"
            )
        entries[embedding_key] = copy.with_key(embedding_key, allow_shape_mismatch=True)
        # Trained rows of the copy are copies, too.
        output, embedding = (key.removesuffix("weight") for key in (output_key, embedding_key))
        for key in [key for key, each in entries.items() if key.startswith(output) and each.replicas.is_copy]:
            name = embedding + key.removeprefix(output)
            entries[name] = entries.pop(key).with_key(name)
