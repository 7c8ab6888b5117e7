"""What Megatron's GPT and BERT have beside the engine's."""

import copy
import warnings
from collections.abc import Mapping
from typing import Any, Self

from torch import Tensor

from shardwise.core.errors import ConfigError
from shardwise.core.sequence_view import SequenceView
from shardwise.core.topology import Groups
from shardwise.megatron.core.models.language_module import LanguageModule
from shardwise.megatron.core.process_groups_config import ProcessGroupCollection
from shardwise.megatron.core.tensor_parallel import ColumnParallelLinear
from shardwise.megatron.core.tensor_parallel.attributes import adopt_marks_, mark_parameter, mark_replicas
from shardwise.megatron.core.transformer.spec_utils import ModuleSpec
from shardwise.megatron.core.transformer.transformer_config import TransformerConfig
from shardwise.megatron.core.transformer.transformer_layer import layer_spec_of
from shardwise.megatron.inert_settings import say_once
from shardwise.models.transformer.layer import TransformerLayerSpec
from shardwise.nn import ShardedModule


class MegatronTransformer(LanguageModule):
    """What Megatron's GPT and BERT have beside the engine's: marks on parameters, an output layer that returns a pair.

    Attributes:
        embedding_activation_buffer, grad_output_buffer: with ``config.defer_embedding_wgrad_compute``, what
            ``drain_embedding_wgrad_compute`` must be given after the last backward before the optimizer's step.
    """

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
        **options: Any,
    ) -> None:
        """Construct the model as one of class ``engine``, after checking what that does not have."""
        if transformer_layer_spec is None:
            raise ConfigError(
                "transformer_layer_spec is None; say what a layer is made of, such as get_gpt_layer_local_spec()"
            )
        if fp16_lm_cross_entropy:
            say_once("fp16_lm_cross_entropy", "the loss is in fp32 or wider")
        groups = self._enter(pg_collection)
        if config.context_parallel_size > 1:
            raise ConfigError(
                f"context_parallel_size is {config.context_parallel_size}, and attention here needs the whole "
                "sequence; leave it at 1 and split the sequence between layers with sequence_parallel"
            )
        if config.sequence_parallel and groups.tp.size() == 1:
            warnings.warn(
                "sequence_parallel is set, but the tensor-parallel group has 1 rank, so there is nothing to split: "
                "sequence parallelism is off in this model",
                stacklevel=3,
            )
        config = self._dealt_out(config, groups, options["pre_process"] and options["post_process"])
        layer_spec = layer_spec_of(transformer_layer_spec, config)
        engine.__init__(self, config, groups=groups, layer_spec=layer_spec, **options)

    @staticmethod
    def _dealt_out(config: TransformerConfig, groups: Groups, is_whole: bool) -> TransformerConfig:
        """The config of a stage's part of a model: with the number of stages, where the program left that out.

        Megatron then builds all layers on every stage.
        """
        if is_whole or groups.num_stages == 1 or config.pipeline_model_parallel_size != 1:
            return config
        staged = copy.copy(config)
        staged.pipeline_model_parallel_size = groups.num_stages
        staged.microbatch_group_size_per_vp_stage = groups.num_stages
        return staged

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As ``torch.nn.Module``'s; the names may also be those of ``sharded_state_dict``, which are the whole model's.

        A later stage counts its layers from 0 in ``state_dict``, and from those before it in ``sharded_state_dict``, as
        ``dist_checkpointing.load`` then does.
        """
        tensors = self.state_dict(keep_vars=True)
        own = {id(tensor): name for name, tensor in tensors.items()}
        names = {name: own.get(id(shard.data), name) for name, shard in self.sharded_state_dict().items()}
        if state_dict.keys() != tensors.keys() and state_dict.keys() == names.keys():
            state_dict = {names[name]: value for name, value in state_dict.items()}
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def _make_output_layer(self, vocab_size: int, bias: bool) -> ColumnParallelLinear:
        model: Any = self
        queue = model.output_queue
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
        model: Any = self
        weight = self.shared_embedding_or_output_weight()
        s = sequence.length
        logits: Tensor = model.output_layer(hidden, weight, not model.parallel_output, sequence_length=s)[0]
        return logits

    def _loss(self, hidden: Tensor, labels: Tensor, sequence: SequenceView) -> Tensor:
        model: Any = self
        shared_weight, s = self.shared_embedding_or_output_weight(), sequence.length
        return self.compute_output_layer_and_language_model_loss(
            hidden,
            labels,
            model.output_layer.weight if shared_weight is None else shared_weight,
            sequence_parallel_enabled=model.sequence_parallel,
            column_parallel_linear=model.output_layer,
            col_linear_kwargs={"weight": shared_weight, "runtime_gather_output": False, "sequence_length": s},
            bias=model.output_layer.bias,
        )

    def _setup_embeddings(self) -> None:
        """At the end of construction, and again after ``reset_parameters``."""
        # A program's own parts may have marked theirs.
        adopt_marks_(self)
        for module in self.modules():
            if isinstance(module, ShardedModule):
                for name, layout in module.param_layouts.items():
                    param: Any = getattr(module, name)
                    if param is not None:
                        mark_parameter(param, layout)
                        param.allreduce = True
        mark_replicas(self)
        if self.pre_process or self.post_process:
            self.setup_embeddings_and_output_layer()
        if not self._marks:
            self._marks = {name: dict(vars(param)) for name, param in self.named_parameters()}

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """As PyTorch's; where parameters are made anew (``to_empty``), they get the marks that they had."""
        super()._apply(fn, recurse)
        for name, marks in self._marks.items():
            vars(self.get_parameter(name)).update(marks)
        return self

    def untie_(self) -> None:
        """See ``LanguageModel.untie_``."""
        super().untie_()
        self._marks = {name: dict(vars(param)) for name, param in self.named_parameters()}
