"""The linear layer whose output features are split over the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from shardwise.collectives import moves
from shardwise.config import ModelParallelConfig
from shardwise.errors import ConfigError, ShardingError, WeightError
from shardwise.initialization import InitMethod
from shardwise.sharding import Interval, ParamLayout
from shardwise.tensor_parallel.linear import LinearParallelism, tensor_parallel_linear
from shardwise.tensor_parallel.module import StatelessExtra, TensorParallelModule
from shardwise.tensor_parallel.weight_gradient import WeightGradient


class ColumnParallelLinear(StatelessExtra, TensorParallelModule):
    """Linear layer ``Y = X A + b`` whose output features are split over the ranks.

    Args:
        input_size: width of the input, ``i``.
        output_size: width of the whole output, ``o``.
        config: dtype, initialisation, sequence parallelism, and where weight gradients go.
        init_method: fills the whole weight in place.
        bias: whether there is a bias.
        gather_output: return the whole output on every rank (not with sequence parallelism).
        stride: number of equal sections of the output, each split by itself: 2 for a gate and an up projection.
        keep_master_weight_for_test: keep the whole weight as it starts, in ``master_weight``.
        skip_bias_add: return the bias in place of adding it, for the caller to fuse.
        skip_weight_param_allocation: make no weight; it is passed to ``forward``.
        embedding_activation_buffer, grad_output_buffer: where inputs and output gradients are kept for
            ``drain_embedding_wgrad_compute``, with ``config.defer_embedding_wgrad_compute``.
        is_expert: the layer is part of an expert: its group is the expert-tensor one, and where experts' tokens are
            exchanged explicitly (several ranks per expert, or experts on several ranks) it communicates nothing itself.
        tp_comm_buffer_name: kept as an attribute; nothing depends on it.
        disable_grad_reduce: leave the input gradient a partial sum, for the caller to reduce (without sequence
            parallelism).
        tp_group: tensor-parallel group; the ambient one if None.
        sizes: output features of each rank, within one section; balanced if None.
        intervals: in place of ``sizes`` and ``stride``: for each rank the runs of output features that it holds, in the
            order of its output. Runs may be held by several ranks, and their weight gradients are then partial sums;
            such an output is not gathered.

    Attributes:
        weight: ``[o/t, i]``.
        bias: ``[o/t]`` or None.

    Raises:
        TopologyError: no group given and none initialised.
        ShardingError: ``sizes`` do not sum to a section.
        ConfigError: ``gather_output`` with sequence parallelism; a deferred weight gradient without both buffers;
            ``intervals`` with what they exclude.

    Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: InitMethod,
        bias: bool = True,
        gather_output: bool = False,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        embedding_activation_buffer: list[Tensor] | None = None,
        grad_output_buffer: list[Tensor] | None = None,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        disable_grad_reduce: bool = False,
        tp_group: ProcessGroup | None = None,
        sizes: Sequence[int] | None = None,
        intervals: Sequence[Sequence[Interval]] | None = None,
    ) -> None:
        super().__init__(config, tp_group, is_expert=is_expert)
        self.input_size = input_size
        self.output_size = output_size
        self.gather_output = gather_output
        self.stride = stride
        self.skip_bias_add = skip_bias_add
        self.embedding_activation_buffer = embedding_activation_buffer
        self.grad_output_buffer = grad_output_buffer
        self.tp_comm_buffer_name = tp_comm_buffer_name
        self.gradient_accumulation_fusion = config.gradient_accumulation_fusion
        self.disable_grad_reduce = disable_grad_reduce
        self.sequence_parallel = self._sequence_parallel()
        self.explicit_expert_comm = is_expert and (self.tp_size > 1 or self.expert_parallel)
        self.allreduce_dgrad = self.tp_size > 1 and not self.sequence_parallel and not disable_grad_reduce
        self._keeps_master_weight = keep_master_weight_for_test
        if gather_output and self.sequence_parallel:
            raise ConfigError("gather_output and sequence_parallel exclude each other; turn one off")
        if (embedding_activation_buffer is None) != (grad_output_buffer is None):
            raise ConfigError(
                "a deferred weight gradient needs both embedding_activation_buffer and grad_output_buffer; give both "
                "lists or neither"
            )
        self._parallelism = LinearParallelism.LOCAL
        if not self.explicit_expert_comm:
            if self.sequence_parallel:
                self._parallelism = LinearParallelism.COLUMN_SEQUENCE
            elif self.allreduce_dgrad:
                self._parallelism = LinearParallelism.COLUMN
        self._delay_weight_gradients(self.tp_group if self._parallelism is LinearParallelism.COLUMN_SEQUENCE else None)

        if intervals is not None and (gather_output or stride != 1 or sizes is not None):
            raise ConfigError("intervals exclude gather_output, stride and sizes; leave those at their defaults")

        def layout_of(shape: tuple[int, ...]) -> ParamLayout:
            if intervals is not None:
                return ParamLayout.of_intervals(shape, 0, intervals)
            return ParamLayout.split(shape, 0, self.tp_size, stride=stride, sizes=sizes)

        self._can_gather = intervals is None
        layout = layout_of((output_size, input_size))
        self.weight_shape = torch.Size(layout.local_shape(self.tp_rank))
        self.output_size_per_partition = self.weight_shape[0]
        self._output_sizes = [layout.local_size(rank) for rank in range(self.tp_size)]
        self.weight: Parameter | None
        self.bias: Parameter | None
        if skip_weight_param_allocation:
            self.register_parameter("weight", None)
        else:
            self._make_parameter("weight", layout, init_method)
        if bias:
            self._make_parameter("bias", layout_of((output_size,)), torch.nn.init.zeros_)
        else:
            self.register_parameter("bias", None)

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        *,
        sequence_length: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Apply the layer.

        Args:
            input_: ``[s, b, i]``, the same on every rank, or this rank's shard ``[s/t, b, i]`` with sequence
                parallelism; not modified.
            weight: ``[o/t, i]``, in place of the layer's own.
            runtime_gather_output: overrides ``gather_output`` for this call.
            sequence_length: ``s``, where the ranks do not divide it, with sequence parallelism: shards are then of the
                balanced sizes. None if all ranks hold as many positions.

        Returns:
            The output ``[s, b, o/t]`` (``[s, b, o]`` when gathered), and the bias with ``skip_bias_add``, else None.

        Raises:
            ShardingError: the input is not of the layer's width.
            WeightError: there is no weight, or a passed one is not of this layer's shape.
        """
        self._check_width(input_, self.input_size)
        if weight is None:
            weight = self.weight
            if weight is None:
                raise WeightError("the layer was made with skip_weight_param_allocation; pass a weight to forward")
        elif weight.shape != self.weight_shape:
            raise WeightError(
                f"the weight has shape {list(weight.shape)}; rank {self.tp_rank} needs {list(self.weight_shape)}"
            )
        output = tensor_parallel_linear(
            input_,
            weight,
            None if self.skip_bias_add else self.bias,
            parallelism=self._parallelism,
            group=self.tp_group,
            sequence_length=sequence_length,
            weight_gradient=self._weight_gradient(weight),
        )
        gather = self.gather_output if runtime_gather_output is None else runtime_gather_output
        if gather and self.tp_size > 1:
            output = self._gather(output)
        return output, self.bias if self.skip_bias_add else None

    def _weight_gradient(self, weight: Tensor) -> WeightGradient | None:
        config = self.config
        defers = config.defer_embedding_wgrad_compute and self.grad_output_buffer is not None
        delayed = self.delayed_weight_gradients
        if not (self.gradient_accumulation_fusion or defers or delayed) or not weight.requires_grad:
            return None
        return WeightGradient(
            weight,
            fuse=self.gradient_accumulation_fusion,
            activation_buffer=self.embedding_activation_buffer if defers else None,
            grad_output_buffer=self.grad_output_buffer if defers else None,
            deferral_limit=config.wgrad_deferral_limit,
            delayed=delayed,
        )

    def _gather(self, output: Tensor) -> Tensor:
        if not self._can_gather:
            raise ShardingError("the layer was made with intervals; its output cannot be gathered")
        gathered = moves.gather(output, dim=-1, group=self.tp_group, sizes=self._output_sizes)
        if self.stride == 1:
            return gathered
        # Each rank's part holds its piece of every section; the whole has the sections one after the other.
        parts = [part.chunk(self.stride, dim=-1) for part in gathered.split(self._output_sizes, dim=-1)]
        return torch.cat([part[section] for section in range(self.stride) for part in parts], dim=-1)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.input_size}, out_features={self.output_size}, bias={self.bias is not None}, "
            f"local={self.output_size_per_partition}, tp={self.tp_rank}/{self.tp_size}"
        )
