"""Megatron's column-parallel linear layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.errors import ConfigError, WeightError
from shardwise.core.initialization import InitMethod
from shardwise.core.layout import I, Layout
from shardwise.core.sharding import Interval
from shardwise.megatron.core.process_groups_config import ProcessGroupCollection
from shardwise.megatron.core.tensor_parallel.linear_functions import warn_of_connections
from shardwise.megatron.core.tensor_parallel.module import MegatronLinear, StatelessExtra
from shardwise.megatron.core.tensor_parallel.private_names import divide
from shardwise.megatron.core.transformer.transformer_config import ModelParallelConfig
from shardwise.nn.column import ColumnLinear
from shardwise.nn.linear import LinearParallelism
from shardwise.nn.weight_gradient import WeightGradientQueue


class ColumnParallelLinear(StatelessExtra, MegatronLinear, ColumnLinear):
    """``ColumnLinear`` as Megatron has it: from a config, and with a pair for its result.

    Args:
        input_size: width of the input, ``i``.
        output_size: width of the whole output, ``o``.
        config: dtype, initialisation, sequence parallelism, and where weight gradients go.
        init_method: fills the whole weight in place.
        bias: whether there is a bias.
        gather_output: return the whole output on every rank.
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
        tp_group: tensor-parallel group; that of ``pg_collection`` if None, and the ambient one where it has none.
        name: changes nothing.
        output_dtype: of the output, whose sums are not rounded to a narrower one; that of the input if None.
        pg_collection: process groups, of which the layer takes ``tp``, or ``expt_tp`` of an expert.
        sizes, intervals: as ``ColumnLinear``.

    Attributes:
        weight: ``[o/t, i]``.
        bias: ``[o/t]`` or None.

    Raises:
        TopologyError: no group given and none initialised.
        ShardingError: ``sizes`` do not sum to a section.
        ConfigError: a deferred weight gradient without both buffers; ``intervals`` with what they exclude; an
            ``output_dtype`` that is no floating-point dtype, or in a group that sums over parts.

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
        name: str | None = None,
        output_dtype: torch.dtype | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        sizes: Sequence[int] | None = None,
        intervals: Sequence[Sequence[Interval]] | None = None,
    ) -> None:
        divide(output_size, stride)
        arguments = self._arguments(
            config, tp_group, pg_collection, is_expert=is_expert, keep_master=keep_master_weight_for_test
        )
        if intervals is not None and gather_output:
            raise ConfigError("intervals exclude gather_output, stride and sizes; leave those at their defaults")
        if (embedding_activation_buffer is None) != (grad_output_buffer is None):
            raise ConfigError(
                "a deferred weight gradient needs both embedding_activation_buffer and grad_output_buffer; give both "
                "lists or neither"
            )
        queue: WeightGradientQueue | None = None
        if config.defer_embedding_wgrad_compute and grad_output_buffer is not None:
            queue = WeightGradientQueue(
                limit=config.wgrad_deferral_limit,
                inputs=embedding_activation_buffer,
                grad_outputs=grad_output_buffer,
                from_forward=True,
            )
        explicit_expert_comm = is_expert and self._has_expert_communication(config, arguments["group"])
        communicates_nothing = explicit_expert_comm or (disable_grad_reduce and not arguments["sequence_parallel"])
        ColumnLinear.__init__(
            self,
            input_size,
            output_size,
            bias,
            sizes=sizes,
            init=init_method,
            sections=stride,
            intervals=intervals,
            own_weight=not skip_weight_param_allocation,
            output_dtype=output_dtype,
            parallelism=LinearParallelism.LOCAL if communicates_nothing else None,
            weight_gradient_queue=queue,
            **arguments,
        )
        warn_of_connections(self._device(), self.parallelism)
        self.explicit_expert_comm = explicit_expert_comm
        self.input_size, self.output_size, self.stride = input_size, output_size, stride
        self.output_size_per_partition = self.local_features
        self.gather_output = gather_output
        self.skip_bias_add = skip_bias_add
        self.embedding_activation_buffer = embedding_activation_buffer
        self.grad_output_buffer = grad_output_buffer
        self.tp_comm_buffer_name = tp_comm_buffer_name
        self.disable_grad_reduce = disable_grad_reduce
        self.allreduce_dgrad = self.tp_size > 1 and not self.sequence_parallel and not disable_grad_reduce

    @property
    def output_layout(self) -> Layout:
        """V(dim=-1), or I with ``gather_output``."""
        return I if self.gather_output else super().output_layout

    def forward(  # type: ignore[override]  # Megatron's layers return pairs.
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
        if weight is None and self.weight is None:
            raise WeightError("the layer was made with skip_weight_param_allocation; pass a weight to forward")
        added_bias = None if self.skip_bias_add else self.bias
        output = self._multiply(input_, self._checked_weight(input_, weight), added_bias, sequence_length)
        gather = self.gather_output if runtime_gather_output is None else runtime_gather_output
        if gather and self.tp_size > 1:
            output = self.gather(output)
        return output, self.bias if self.skip_bias_add else None
