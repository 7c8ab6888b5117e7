"""What Megatron's layers have beside the engine's: a config, marks on their parameters, and attributes of their own."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise import parallel_state
from shardwise.initialization import initialize_shard_
from shardwise.layers.arguments import layer_arguments
from shardwise.layers.module import ShardedModule
from shardwise.layers.parallel_linear import ParallelLinear
from shardwise.megatron.config import ModelParallelConfig
from shardwise.sharding import ParamLayout
from shardwise.tensor_parallel.attributes import mark_parameter


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
        *,
        linear: bool = True,
        is_expert: bool = False,
        keep_master: bool = False,
    ) -> dict[str, Any]:
        """The engine's arguments. What is set here is there when parameters are made."""
        if tp_group is None:
            tp_group = parallel_state.get_topology().group("expt_tp" if is_expert else "tp")
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

    def _mark(self, name: str) -> None:
        super()._mark(name)
        param: Any = getattr(self, name)
        mark_parameter(param, self.param_layouts[name])
        # Where experts have groups of their own, their gradients are not those of the data-parallel group.
        config = self.config
        expert_tp = config.expert_tensor_parallel_size
        own_groups = self.expert_parallel or expert_tp not in (None, config.tensor_model_parallel_size)
        param.allreduce = not (self.is_expert and own_groups)

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
    """A linear layer that is made from a config."""

    @property
    def gradient_accumulation_fusion(self) -> bool:
        """Whether the weight's gradient is added to ``weight.main_grad``; may be set."""
        return self.fuse_weight_gradient

    @gradient_accumulation_fusion.setter
    def gradient_accumulation_fusion(self, value: bool) -> None:
        self.fuse_weight_gradient = value


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
