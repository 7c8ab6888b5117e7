"""What Megatron's layers have beside the engine's: a config, marks on their parameters, and attributes of their own."""

import dataclasses
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise.core.initialization import initialize_shard_
from shardwise.core.sequence_view import SequenceView
from shardwise.core.sharding import ParamLayout
from shardwise.megatron.core.parallel_state.ambient import group_of
from shardwise.megatron.core.process_groups_config import ProcessGroupCollection
from shardwise.megatron.core.tensor_parallel.attributes import mark_parameter
from shardwise.megatron.core.tensor_parallel.linear_functions import (
    linear_with_frozen_weight,
    linear_with_grad_accumulation_and_async_allreduce,
)
from shardwise.megatron.core.transformer.transformer_config import ModelParallelConfig
from shardwise.megatron.errors import AssertedConfigError
from shardwise.models.transformer.mlp import layer_arguments
from shardwise.nn.linear import LinearParallelism, reduce_product
from shardwise.nn.module import ShardedModule
from shardwise.nn.parallel_linear import ParallelLinear
from shardwise.nn.recompute import is_checkpointing


class MegatronLayer(ShardedModule):
    """A layer that is made from a config, on the ambient topology's group if none is given.

    Attributes:
        config: dtype, initialisation and sequence parallelism.
        tp_group, tp_size, tp_rank: the ranks that share the layer, their number, and this rank among them.
        is_expert: whether the layer is part of an expert, split over the expert-tensor group.
        expert_parallel: whether experts are shared out over ranks.
        master_weight: the whole weight as it started, if the layer was asked to keep it.
    """

    config: ModelParallelConfig
    is_expert: bool
    expert_parallel: bool
    master_weight: Tensor | None

    def _arguments(
        self,
        config: ModelParallelConfig,
        tp_group: ProcessGroup | None,
        pg_collection: ProcessGroupCollection | None,
        *,
        linear: bool = True,
        is_expert: bool = False,
        keep_master: bool = False,
    ) -> dict[str, Any]:
        """The engine's arguments. What is set here is there when parameters are made."""
        name = "expt_tp" if is_expert else "tp"
        if tp_group is None:
            tp_group = getattr(pg_collection, name, None)
        if tp_group is None:
            tp_group = group_of(name)
        arguments = layer_arguments(config, group=tp_group, linear=linear)
        if linear and config.sequence_parallel and tp_group.size() == 1:
            warnings.warn(
                "sequence_parallel is set, but the tensor-parallel group has 1 rank, so there is nothing to split: "
                "sequence parallelism is off in this layer",
                stacklevel=3,
            )
            arguments["sequence_parallel"] = False
        self.config = config
        self.is_expert = is_expert
        self.expert_parallel = config.expert_model_parallel_size > 1
        self.master_weight = None
        self._keeps_master_weight = keep_master
        return arguments

    @staticmethod
    def _has_expert_communication(config: ModelParallelConfig, group: ProcessGroup) -> bool:
        """Whether tokens are exchanged between the ranks of experts, so that an expert's layers exchange nothing."""
        return group.size() > 1 or config.expert_model_parallel_size > 1

    @property
    def tp_group(self) -> ProcessGroup:
        return self.group

    @property
    def tp_size(self) -> int:
        return self.group.size()

    @property
    def tp_rank(self) -> int:
        return self.group.rank()

    def _made(self, name: str) -> None:
        param: Any = getattr(self, name)
        mark_parameter(param, self.param_layouts[name])
        param.sequence_parallel = "tp" in self.param_replicas[name].summed_over
        # Where experts have groups of their own, their gradients are not those of the data-parallel group.
        config = self.config
        expert_tp = config.expert_tensor_parallel_size
        own_groups = self.expert_parallel or expert_tp not in (None, config.tensor_model_parallel_size)
        param.allreduce = not (self.is_expert and own_groups)
        if not param.allreduce:
            self.param_replicas[name] = dataclasses.replace(self.param_replicas[name], same_over=())

    def _initialize(self, name: str) -> None:
        param = getattr(self, name)
        if name != "weight" or not self._keeps_master_weight or param.is_meta:
            super()._initialize(name)
            return
        # Drawn as by one rank, whose values are those of several.
        layout, method = self.param_layouts[name], self._init_methods[name]
        whole = ParamLayout(layout.global_shape, layout.dim, (((0, layout.global_shape[layout.dim or 0]),),), 1)
        self.master_weight = initialize_shard_(
            param.detach().new_empty(layout.global_shape), whole, 0, method, on_cpu=self.config.use_cpu_initialization
        )
        with torch.no_grad():
            param.copy_(layout.take(self.master_weight, self.tp_rank))


class MegatronLinear(MegatronLayer, ParallelLinear):
    """A linear layer that is made from a config, and whose product a subclass may replace.

    Attributes:
        embedding_activation_buffer, grad_output_buffer: where inputs and output gradients wait, or None.
    """

    embedding_activation_buffer: list[Tensor] | None = None
    grad_output_buffer: list[Tensor] | None = None

    @property
    def gradient_accumulation_fusion(self) -> bool:
        """Whether the weight's gradient is added to ``weight.main_grad``; may be set."""
        return self.fuse_weight_gradient

    @gradient_accumulation_fusion.setter
    def gradient_accumulation_fusion(self, value: bool) -> None:
        self.fuse_weight_gradient = value

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The product, by ``linear_with_grad_accumulation_and_async_allreduce`` or ``linear_with_frozen_weight``.

        What a subclass puts in its place is called with their arguments, by name. A row layer's sum over the ranks, and
        its bias, come after it.
        """
        if weight.requires_grad:
            return linear_with_grad_accumulation_and_async_allreduce(input, weight, *args, **kwargs)
        return linear_with_frozen_weight(input, weight, *args, **kwargs)

    def _multiply(
        self,
        input_: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sequence: SequenceView | None = None,
        parallelism: LinearParallelism | None = None,
    ) -> Tensor:
        offloading = getattr(self.config, "_cpu_offloading_context", None)
        if getattr(offloading, "inside_context", False) and getattr(self.config, "cpu_offloading", False):
            raise AssertedConfigError(
                "this layer is called inside config._cpu_offloading_context with cpu_offloading=True, and activations "
                "stay on their device here; set cpu_offloading=False, or use torch.autograd.graph.save_on_cpu()"
            )
        if getattr(self._forward_impl, "__func__", None) is MegatronLinear._forward_impl:
            return super()._multiply(input_, weight, bias, sequence, parallelism)
        parallelism = parallelism or self.parallelism
        defers = self.config.defer_embedding_wgrad_compute and weight.requires_grad
        buffer, limit = (self.grad_output_buffer, self.config.wgrad_deferral_limit) if defers else (None, None)
        inputs = self.embedding_activation_buffer
        keeps = buffer is not None and torch.is_grad_enabled() and not is_checkpointing()
        if keeps and inputs is not None and (not limit or len(inputs) < limit):
            inputs.append(input_)
        output = self._forward_impl(
            input=input_,
            weight=weight,
            bias=bias,
            gradient_accumulation_fusion=self.fuse_weight_gradient,
            allreduce_dgrad=parallelism is LinearParallelism.COLUMN,
            sequence_parallel=parallelism is LinearParallelism.COLUMN_SEQUENCE,
            grad_output_buffer=buffer,
            wgrad_deferral_limit=limit,
            tp_group=self.group,
            **({} if sequence is None else {"sequence_length": sequence.length}),
            **({} if self.output_dtype is None else {"output_dtype": self.output_dtype}),
        )
        return reduce_product(output, parallelism, self.group)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"TP={self.tp_size}"
        )


class StatelessExtra(nn.Module):
    """``get_extra_state`` and ``set_extra_state`` of a layer that has none.

    The state dict holds tensors only, and one with an ``_extra_state`` of this layer loads as well as one without.
    """

    def get_extra_state(self) -> None:
        """None: there is no state but the parameters."""

    def set_extra_state(self, state: Any) -> None:
        """Nothing happens, whatever ``state`` is."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if destination.get(prefix + "_extra_state", 0) is None:
            del destination[prefix + "_extra_state"]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict.setdefault(prefix + "_extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *args)
