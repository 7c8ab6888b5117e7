"""What the tensor-parallel layers share: their group, parameters made from layouts, and state for checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from shardwise import parallel_state
from shardwise.config import ModelParallelConfig
from shardwise.errors import ShardingError
from shardwise.initialization import InitMethod, initialize_shard_
from shardwise.sharding import ParamLayout, ParamShard, ShardedOffset
from shardwise.tensor_parallel.attributes import set_tensor_model_parallel_attributes
from shardwise.tensor_parallel.copying import GroupModule
from shardwise.tensor_parallel.weight_gradient import DelayedWeightGradients


def parameter_device(config: ModelParallelConfig, tp_group: ProcessGroup) -> torch.device:
    """Where the parameters of a layer are made: PyTorch's default device, or the GPU if the ranks talk by NCCL."""
    default = torch.get_default_device()
    if config.use_cpu_initialization or default.type != "cpu":
        return default
    if dist.get_backend(tp_group) == "nccl":
        # These groups cannot talk about anything that lies on the CPU.
        return torch.device("cuda", torch.cuda.current_device())
    return default


class TensorParallelModule(GroupModule):
    """A layer whose parameters are split over a group.

    Attributes:
        config: dtype, initialisation and sequence parallelism.
        tp_group, tp_size, tp_rank: the ranks that share the layer, their number, and this rank among them.
        is_expert: whether the layer is part of an expert, split over the expert-tensor group.
        expert_parallel: whether experts are shared out over ranks.
        param_layouts: for each of the layer's own parameters, where this rank's part lies in the whole one.
        master_weight: the whole weight as it started, if the layer was asked to keep it.
        delayed_weight_gradients: of a linear with ``config.delay_wgrad_compute``, the gradients that wait; else None.
    """

    # Of a vocabulary, whose padding may differ between a checkpoint and this layer.
    _allow_shape_mismatch = False

    def __init__(self, config: ModelParallelConfig, tp_group: ProcessGroup | None, *, is_expert: bool = False) -> None:
        super().__init__()
        if tp_group is None:
            tp_group = parallel_state.get_topology().group("expt_tp" if is_expert else "tp")
        self.config = config
        self.tp_group = tp_group
        self.tp_size = tp_group.size()
        self.tp_rank = tp_group.rank()
        self.is_expert = is_expert
        self.expert_parallel = config.expert_model_parallel_size > 1
        self.param_layouts: dict[str, ParamLayout] = {}
        self.master_weight: Tensor | None = None
        self._init_methods: dict[str, InitMethod] = {}
        self._partial_gradients: set[str] = set()
        self._keeps_master_weight = False
        self.delayed_weight_gradients: DelayedWeightGradients | None = None

    @property
    def _device(self) -> torch.device:
        return parameter_device(self.config, self.tp_group)

    def _sequence_parallel(self) -> bool:
        """Whether the config's sequence parallelism holds on this group; warns where it cannot."""
        if self.config.sequence_parallel and self.tp_size == 1:
            warnings.warn(
                "sequence_parallel is set, but the tensor-parallel group has 1 rank, so there is nothing to split: "
                "sequence parallelism is off in this layer",
                stacklevel=3,
            )
            return False
        return self.config.sequence_parallel

    def _make_parameter(
        self, name: str, layout: ParamLayout, init_method: InitMethod, *, partial_gradient: bool = False
    ) -> None:
        """Make parameter ``name``; ``partial_gradient``: each rank's gradient is of its own part of the sequence."""
        self.param_layouts[name] = layout
        self._init_methods[name] = init_method
        if partial_gradient:
            self._partial_gradients.add(name)
        shape = layout.local_shape(self.tp_rank)
        param = Parameter(torch.empty(shape, dtype=self.config.params_dtype, device=self._device))
        self.register_parameter(name, param)
        self._mark(name)
        if self.config.perform_initialization:
            self._initialize(name)

    def _delay_weight_gradients(self, gather_group: ProcessGroup | None) -> None:
        """Let weight gradients wait, if the config asks for it; inputs are shards of ``gather_group``'s sequence."""
        if self.config.delay_wgrad_compute:
            self.delayed_weight_gradients = DelayedWeightGradients(
                fuse=self.config.gradient_accumulation_fusion, gather_group=gather_group
            )

    def backward_dw(self) -> None:
        """Compute the weight gradients that the backward passes left (``config.delay_wgrad_compute``).

        They are added to ``weight.grad``, or to ``weight.main_grad`` with ``gradient_accumulation_fusion``; hooks on
        the weight do not run. With sequence parallelism a column-parallel layer gathers its inputs: every rank of the
        group calls.
        """
        if self.delayed_weight_gradients is not None:
            self.delayed_weight_gradients.take()()

    def _check_width(self, input_: Tensor, width: int) -> None:
        if input_.shape[-1:] != (width,):
            raise ShardingError(
                f"the input has shape {list(input_.shape)}; rank {self.tp_rank} of {self.tp_size} needs {width} "
                "features in the last dimension"
            )

    def _mark(self, name: str) -> None:
        """Set the attributes that gradient reductions, clipping and checkpoints of other programs read."""
        param: Any = getattr(self, name)
        layout = self.param_layouts[name]
        set_tensor_model_parallel_attributes(
            param, layout.dim is not None, -1 if layout.dim is None else layout.dim, layout.stride
        )
        # Where experts have groups of their own, their gradients are not those of the data-parallel group.
        config = self.config
        expert_tp = config.expert_tensor_parallel_size
        own_groups = self.expert_parallel or expert_tp not in (None, config.tensor_model_parallel_size)
        param.allreduce = not (self.is_expert and own_groups)
        param.sequence_parallel = name in self._partial_gradients

    def _initialize(self, name: str) -> None:
        param, layout, method = getattr(self, name), self.param_layouts[name], self._init_methods[name]
        on_cpu = self.config.use_cpu_initialization
        if name == "weight" and self._keeps_master_weight and not param.is_meta:
            # Drawn as by one rank, whose values are those of several.
            whole = ParamLayout(layout.global_shape, layout.dim, (((0, layout.global_shape[layout.dim or 0]),),), 1)
            self.master_weight = initialize_shard_(
                param.detach().new_empty(layout.global_shape), whole, 0, method, on_cpu=on_cpu
            )
            with torch.no_grad():
                param.copy_(layout.take(self.master_weight, self.tp_rank))
            return
        initialize_shard_(param, layout, self.tp_rank, method, on_cpu=on_cpu)

    def reset_parameters(self) -> None:
        """Give the parameters their initial values, as when the layer was made.

        Parameters on the meta device are first allocated on PyTorch's default device (``to_empty`` chooses another).
        The values are those that a layer made there would have had, if the generator is in the same state.
        """
        for name in self.param_layouts:
            param = getattr(self, name)
            if param is None:
                continue
            if param.is_meta:
                empty = torch.empty(param.shape, dtype=param.dtype, device=self._device)
                setattr(self, name, Parameter(empty, requires_grad=param.requires_grad))
            # `to_empty` may make new parameters, without their marks.
            self._mark(name)
            self._initialize(name)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Sequence[ShardedOffset] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, ParamShard]:
        """This rank's part of each parameter, with where it lies in the whole.

        Args:
            prefix: put before each name, such as ``"decoder.layers.0.mlp.linear_fc1."``.
            sharded_offsets: ``(axis, index, count)`` of leading axes that stack this layer with others of one name.
            metadata: accepted for programs that pass it; nothing depends on it.

        Returns:
            An entry for each parameter that the layer owns.

        Raises:
            ShardingError: ``sharded_offsets`` do not fit together.
        """
        return {
            prefix + name: ParamShard(
                prefix + name, param, layout, self.tp_rank, tuple(sharded_offsets), self._allow_shape_mismatch
            )
            for name, layout in self.param_layouts.items()
            if (param := getattr(self, name)) is not None
        }


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
