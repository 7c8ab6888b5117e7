"""The common base of Megatron's GPT and BERT: construction, marks on parameters, and an output layer with pairs."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

from torch import Tensor

from shardwise.core.communication import moves
from shardwise.core.errors import ConfigError
from shardwise.core.sequence_view import SequenceView
from shardwise.core.sharding import ParamShard, ShardedOffset
from shardwise.core.topology import Groups
from shardwise.megatron.absent import say_once
from shardwise.megatron.core.enums import ModelType as ModelType
from shardwise.megatron.core.models.language_module import LanguageModule
from shardwise.megatron.core.process_groups_config import ProcessGroupCollection
from shardwise.megatron.core.tensor_parallel import ColumnParallelLinear
from shardwise.megatron.core.tensor_parallel.module import (
    _warn_of_one_rank,
    adopt_marks_,
    mark_parameter,
    mark_replicas,
)
from shardwise.megatron.core.transformer.module import ModuleSpec
from shardwise.megatron.core.transformer.transformer_config import TransformerConfig
from shardwise.megatron.core.transformer.transformer_layer import _move_norms_, layer_spec_of
from shardwise.megatron.errors import AssertedShardingError, asserting
from shardwise.models.bert import BertLMHead as BertLMHead, Pooler as Pooler
from shardwise.models.transformer.layer import TransformerLayerSpec
from shardwise.models.transformer.rotary import RotaryScaling
from shardwise.models.transformer_model import TransformerModel
from shardwise.nn import ShardedModule, viewless
from shardwise.storage.huggingface.megatron.folder import RENAMED


class MegatronTransformer(LanguageModule, TransformerModel):
    """Base class of Megatron's GPT and BERT, with marks on parameters and an output layer that returns a pair.

    Attributes:
        embedding_activation_buffer, grad_output_buffer: with ``config.defer_embedding_wgrad_compute``, arguments for
            ``drain_embedding_wgrad_compute`` after the last backward and before the optimizer's step.
    """

    model_type = ModelType.encoder_or_decoder
    set_input_tensor = asserting(AssertedShardingError)(TransformerModel.set_input_tensor)

    def _enter(self, pg_collection: ProcessGroupCollection | None) -> Groups:
        groups = super()._enter(pg_collection)
        self.embedding_activation_buffer: list[Tensor] | None = None
        self.grad_output_buffer: list[Tensor] | None = None
        self._marks: dict[str, dict[str, Any]] = {}
        return groups

    def _construct(
        self,
        engine: Any,
        *,
        config: TransformerConfig,
        transformer_layer_spec: ModuleSpec | TransformerLayerSpec | None,
        fp16_lm_cross_entropy: bool,
        pg_collection: ProcessGroupCollection | None,
        rope_scaling: bool | RotaryScaling | None = None,
        rope_scaling_factor: float = 8.0,
        seq_len_interpolation_factor: float | None = None,
        **options: Any,
    ) -> None:
        """Construct the model as an object of class ``engine``, after checking for options that the class lacks."""
        if transformer_layer_spec is None:
            raise ConfigError("transformer_layer_spec is None; give one, such as get_gpt_layer_local_spec()")
        if fp16_lm_cross_entropy:
            say_once("fp16_lm_cross_entropy", "the loss is in fp32 or wider")
        config.check_complete()
        groups = self._enter(pg_collection)
        if config.context_parallel_size > 1:
            sharing, every = (getattr(self.pg_collection, name, None) for name in ("cp", "dp_cp"))
            number = 1 if sharing is None else sharing.size()
            if number != config.context_parallel_size:
                raise ConfigError(
                    f"context_parallel_size of the config is {config.context_parallel_size}, and the context-parallel "
                    f"group has {number} ranks; give both the same (initialize_model_parallel)"
                )
            groups = dataclasses.replace(groups, cp=sharing, dp=every)
        if config.sequence_parallel and groups.tp.size() == 1:
            _warn_of_one_rank("model")
        own = self._dealt_out(config, groups, options["pre_process"] and options["post_process"])
        self._layer_spec = layer_spec = layer_spec_of(transformer_layer_spec, own)
        scaling = _rotary_scaling(rope_scaling, rope_scaling_factor, seq_len_interpolation_factor)
        engine.__init__(self, own, groups=groups, layer_spec=layer_spec, rope_scaling=scaling, **options)
        config.note_read(self.config)

    @staticmethod
    def _dealt_out(config: TransformerConfig, groups: Groups, is_whole: bool) -> TransformerConfig:
        """Return the config of a stage, with the number of stages if the program left it out.

        Megatron would build all layers on every stage.
        """
        if is_whole or groups.num_stages == 1 or config.pipeline_model_parallel_size != 1:
            return config
        staged = copy.copy(config)
        staged.pipeline_model_parallel_size = groups.num_stages
        staged.microbatch_group_size_per_vp_stage = groups.num_stages
        return staged

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[ShardedOffset] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ParamShard]:
        """See ``LanguageModel.sharded_state_dict``; the key of a norm does not depend on where its parameters are.

        ``metadata`` gets the model's data-parallel group as ``dp_cp_group`` if it has none, as in Megatron.
        """
        if metadata is not None and self.groups.dp is not None:
            metadata.setdefault("dp_cp_group", self.groups.dp)
        entries = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        for fused, plain in RENAMED:
            entries |= {n: e.with_key(e.key.replace(fused, plain)) for n, e in entries.items() if fused in e.key}
        return entries

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Like ``torch.nn.Module.load_state_dict``, but also accepts the names of ``sharded_state_dict``.

        A later stage numbers its layers from 0 in ``state_dict``. In ``sharded_state_dict``, and so in the result of
        ``dist_checkpointing.load``, it continues the numbers of earlier stages.
        """
        tensors = self.state_dict(keep_vars=True)
        # The keys of experts are not the names of their parameters.
        named = [*tensors.items(), *self.named_parameters(), *self.named_buffers()]
        own = {id(tensor): name for name, tensor in named}
        names = {name: own.get(id(shard.data), name) for name, shard in self.sharded_state_dict().items()}
        if state_dict.keys() != tensors.keys() and state_dict.keys() == names.keys():
            state_dict = {names[name]: value for name, value in state_dict.items()}
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def _make_output_layer(self, vocab_size: int, bias: bool) -> ColumnParallelLinear:
        queue = self.output_queue
        if queue is not None:
            self.embedding_activation_buffer, self.grad_output_buffer = queue.inputs, queue.grad_outputs
        assert self.config.init_method is not None
        return ColumnParallelLinear(
            self.config.hidden_size,
            vocab_size,
            config=self.config,
            init_method=self.config.init_method,
            bias=bias,
            skip_weight_param_allocation=self.pre_process and self.share_embeddings_and_output_weights,
            embedding_activation_buffer=self.embedding_activation_buffer,
            grad_output_buffer=self.grad_output_buffer,
            tp_group=self.tp_group,
        )

    def _logits(self, hidden: Tensor, sequence: SequenceView) -> Tensor:
        weight = self.shared_embedding_or_output_weight()
        layer: Any = self.output_layer
        if isinstance(layer, ColumnParallelLinear):
            logits: Tensor = layer(hidden, weight, not self.parallel_output, sequence_length=sequence.length)[0]
        else:
            # A program's own head, such as one of values.
            logits = layer(hidden, weight=weight, runtime_gather_output=None)[0]
        return logits

    def _gathered_or_not(self, logits: Tensor, gathers: bool | None) -> Tensor:
        """Gather logits over the vocabulary, or leave this rank's part; None as ``parallel_output`` says."""
        layer: Any = self.output_layer
        if gathers is None or gathers != self.parallel_output or not isinstance(layer, ColumnParallelLinear):
            return logits
        if gathers:
            return layer.gather(logits)
        return moves.scatter(logits, dim=-1, group=self.tp_group)

    def _loss(self, hidden: Tensor, labels: Tensor, sequence: SequenceView) -> Tensor:
        shared_weight, s = self.shared_embedding_or_output_weight(), sequence.length
        return self.compute_output_layer_and_language_model_loss(
            hidden,
            labels,
            self.output_layer.weight if shared_weight is None else shared_weight,
            sequence_parallel_enabled=self.sequence_parallel,
            column_parallel_linear=self.output_layer,
            col_linear_kwargs={"weight": shared_weight, "runtime_gather_output": False, "sequence_length": s},
            bias=self.output_layer.bias,
        )

    def _setup_embeddings(self) -> None:
        """Mark the parameters, at the end of construction and again after ``reset_parameters``."""
        for layer in getattr(self, self.block_name).layers:
            _move_norms_(layer, self._layer_spec, self.config)
        # A program's own modules may have marked their parameters.
        adopt_marks_(self)
        for module in self.modules():
            if isinstance(module, ShardedModule):
                for name, layout in module.param_layouts.items():
                    param: Any = getattr(module, name)
                    if param is not None:
                        mark_parameter(param, layout)
                        if not hasattr(param, "allreduce"):
                            param.allreduce = not module.param_replicas[name].is_of_expert
        mark_replicas(self)
        if self.pre_process or self.post_process:
            self.setup_embeddings_and_output_layer()
        if not self._marks:
            self._marks = {name: dict(vars(param)) for name, param in self.named_parameters()}

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Like PyTorch's method; new parameters (``to_empty``) get the marks of the old ones."""
        super()._apply(fn, recurse)
        for name, marks in self._marks.items():
            vars(self.get_parameter(name)).update(marks)
        return self

    def untie_(self) -> None:
        """See ``LanguageModel.untie_``."""
        super().untie_()
        self._marks = {name: dict(vars(param)) for name, param in self.named_parameters()}


def batch_first(logits: Tensor) -> Tensor:
    """Return ``[b, s, v]`` of ``[s, b, v]``."""
    return viewless(logits.transpose(0, 1).contiguous())


def _rotary_scaling(
    scaling: bool | RotaryScaling | None, factor: float, interpolation: float | None
) -> RotaryScaling | None:
    """Return the engine's scaling of rotary frequencies; dividing the positions is dividing the frequencies."""
    if scaling and interpolation is not None:
        raise ConfigError(
            f"rope_scaling is {scaling!r} and seq_len_interpolation_factor {interpolation}; frequencies are scaled in "
            "one way here, so leave one of them out"
        )
    if interpolation is not None:
        return RotaryScaling("linear", interpolation)
    return RotaryScaling("llama3", factor, 8192) if scaling is True else scaling or None


def refuse_set(why: str, **arguments: Any) -> None:
    """Raise ConfigError for an argument that differs from Megatron's default."""
    for name, value in arguments.items():
        if value is not None:
            raise ConfigError(f"{name} is given, which is not offered here: {why}; leave it out")
