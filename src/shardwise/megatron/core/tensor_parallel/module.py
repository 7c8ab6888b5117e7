"""Base classes of Megatron's layers, with a config, marks on parameters, and attributes that engine layers lack."""

import dataclasses
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise.core.errors import ConfigError
from shardwise.core.initialization import InitMethod
from shardwise.core.sequence_view import SequenceView
from shardwise.core.sharding import ParamLayout, Replicas
from shardwise.megatron.core.process_groups_config import ProcessGroupCollection, _group_of
from shardwise.megatron.core.tensor_parallel import linear_functions
from shardwise.megatron.core.tensor_parallel.attributes import _initialize_whole_, _mark
from shardwise.megatron.core.transformer.transformer_config import ModelParallelConfig
from shardwise.megatron.errors import AssertedConfigError
from shardwise.models.transformer.mlp import layer_arguments
from shardwise.nn.linear import LinearParallelism, reduce_product
from shardwise.nn.module import ShardedModule
from shardwise.nn.parallel_linear import ParallelLinear
from shardwise.nn.recompute import is_checkpointing
from shardwise.nn.replicated import set_replicas_


def mark_parameter(param: Tensor, layout: ParamLayout) -> None:
    """Mark a parameter according to its layout, replacing earlier marks."""
    _mark(param, layout.dim is not None, -1 if layout.dim is None else layout.dim, layout.stride)


def mark_replicas(module: nn.Module) -> None:
    """Mark the parameters of a module and its children according to their replicas."""
    for owner in module.modules():
        for name, replicas in getattr(owner, "param_replicas", {}).items():
            param: Any = getattr(owner, name)
            if param is not None:
                param.sequence_parallel = "tp" in replicas.summed_over
                if "embd" in replicas.summed_over:
                    param.shared_embedding = True
                if replicas.is_copy:
                    param.shared = True


def adopt_marks_(module: nn.Module) -> None:
    """Set the replicas of a module and its children from the marks that a program has set on their parameters.

    Parameters without marks keep their replicas.
    """
    for owner in module.modules():
        layouts: dict[str, ParamLayout] = getattr(owner, "param_layouts", {})
        for name, param in owner.named_parameters(recurse=False):
            old: Replicas = getattr(owner, "param_replicas", {}).get(name, Replicas())
            is_split = name in layouts and layouts[name].dim is not None
            differs_over_tp = getattr(param, "tensor_model_parallel", "tp" not in old.same_over) and not is_split
            is_tied = getattr(param, "shared_embedding", "embd" in old.summed_over)
            same = {"tp": not differs_over_tp, "dp": True, "embd": is_tied}
            summed = {"tp": getattr(param, "sequence_parallel", "tp" in old.summed_over), "embd": is_tied}
            if not getattr(param, "allreduce", not old.is_of_expert):
                same = {"expert_dp": True}
            is_copy = bool(getattr(param, "shared", old.is_copy))
            new = Replicas(tuple(filter(same.get, same)), tuple(filter(summed.get, summed)), is_copy)
            if new != old:
                set_replicas_(owner, new, name)


def _warn_of_one_rank(what: str) -> None:
    warnings.warn(
        "sequence_parallel is set, but the tensor-parallel group has 1 rank, so there is nothing to split: sequence "
        f"parallelism is off in this {what}",
        stacklevel=4,
    )


class _Completed:
    """A config; fields that a program's own object lacks have the defaults of ``ModelParallelConfig``."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name) if hasattr(self._config, name) else getattr(ModelParallelConfig(), name)


class MegatronLayer(ShardedModule):
    """A layer made from a config, by default on the ambient topology's group.

    Attributes:
        config: dtype, initialisation and sequence parallelism.
        tp_group, tp_size, tp_rank: group of the ranks that share the layer, its size, and this rank's index in it.
        is_expert: whether the layer is part of an expert, split over the expert-tensor group.
        expert_parallel: whether experts are distributed over ranks.
        explicit_expert_comm: whether the ranks of an expert exchange tokens, so that its layers do not communicate.
        master_weight: initial whole weight, if the layer keeps it.
    """

    def _arguments(
        self,
        config: ModelParallelConfig,
        init_method: InitMethod,
        tp_group: ProcessGroup | None,
        pg_collection: ProcessGroupCollection | None,
        is_expert: bool = False,
        keep_master: bool = False,
        linear: bool = True,
    ) -> dict[str, Any]:
        """Return the engine's arguments, and set attributes that the creation of parameters needs."""
        if tp_group is None:
            tp_group = _group_of(pg_collection, "expt_tp" if is_expert else "tp")
        completed: Any = _Completed(config)
        arguments = {"init": init_method, **layer_arguments(completed, group=tp_group, linear=linear)}
        if linear and config.sequence_parallel and tp_group.size() == 1:
            _warn_of_one_rank("layer")
            arguments["sequence_parallel"] = False
        self.config = config
        self.is_expert = is_expert
        self.expert_parallel = config.expert_model_parallel_size > 1
        self.explicit_expert_comm = is_expert and (tp_group.size() > 1 or self.expert_parallel)
        self.master_weight: Tensor | None = None
        self._keeps_master_weight = keep_master
        return arguments

    @property
    def tp_group(self) -> ProcessGroup:
        """The group; another one of as many ranks, in which this rank has the same place, may be set."""
        return self.group

    @tp_group.setter
    def tp_group(self, group: ProcessGroup) -> None:
        place, wanted = (group.rank(), group.size()), (self.group.rank(), self.group.size())
        if place != wanted:
            raise ConfigError(
                f"tp_group is set to a group in which this rank is {place[0]} of {place[1]}, and the layer has the "
                f"part of rank {wanted[0]} of {wanted[1]}; make another layer with that group"
            )
        self.group = group

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
        # If experts have other groups, their gradients are not reduced over the data-parallel group.
        config = _Completed(self.config)
        own_groups = self.expert_parallel or config.expert_tensor_parallel_size not in (
            None,
            config.tensor_model_parallel_size,
        )
        param.allreduce = not (self.is_expert and own_groups)
        if not param.allreduce:
            self.param_replicas[name] = dataclasses.replace(self.param_replicas[name], same_over=("expert_dp",))

    def _initialize(self, name: str) -> None:
        param = getattr(self, name)
        if name != "weight" or not self._keeps_master_weight or param.is_meta:
            super()._initialize(name)
            return
        layout, method, on_cpu = self.param_layouts[name], self._init_methods[name], self.config.use_cpu_initialization
        whole = param.detach().new_empty(layout.global_shape)
        self.master_weight = _initialize_whole_(whole, param, layout, self.tp_rank, method, on_cpu=on_cpu)


class MegatronLinear(MegatronLayer, ParallelLinear):
    """A linear layer made from a config; subclasses may override its product.

    Attributes:
        embedding_activation_buffer, grad_output_buffer: queues of inputs and output gradients, or None.
    """

    embedding_activation_buffer: list[Tensor] | None = None
    grad_output_buffer: list[Tensor] | None = None

    @property
    def gradient_accumulation_fusion(self) -> bool:
        """Whether the weight's gradient is added to ``weight.main_grad``; writable."""
        return self.fuse_weight_gradient

    @gradient_accumulation_fusion.setter
    def gradient_accumulation_fusion(self, value: bool) -> None:
        self.fuse_weight_gradient = value

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Call ``linear_with_grad_accumulation_and_async_allreduce`` or ``linear_with_frozen_weight``.

        An override in a subclass gets their arguments by name. The sum over ranks and the bias of a row layer follow
        this call.
        """
        if weight.requires_grad:
            return linear_functions.linear_with_grad_accumulation_and_async_allreduce(input, weight, *args, **kwargs)
        return linear_functions.linear_with_frozen_weight(input, weight, *args, **kwargs)

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
        wide = None if bias is None else self._wide_bias(input_)
        if wide is not None:
            return self._multiply(input_, weight, None, sequence, parallelism) + wide
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

    def _wide_bias(self, input_: Tensor) -> Tensor | None:
        """Return the bias if it widens the output, as in Megatron: under autocast, if it has another dtype."""
        kind = input_.device.type
        if self.bias is None or not torch.is_autocast_enabled(kind):
            return None
        return self.bias if self.bias.dtype != torch.get_autocast_dtype(kind) else None

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"TP={self.tp_size}"
        )

    def get_extra_state(self) -> None:
        """Return None, because the only state is the parameters.

        The state dict holds only tensors. A state dict loads with or without an ``_extra_state`` of this layer.
        """

    def set_extra_state(self, state: Any) -> None:
        """Accept the extra state of another layer, which says nothing about this one."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if destination.get(prefix + "_extra_state", 0) is None:
            del destination[prefix + "_extra_state"]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict.setdefault(prefix + "_extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *args)
