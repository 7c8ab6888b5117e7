"""Layers whose parameters are split over the tensor-parallel group, and the linear functions behind them.

Each layer keeps ``param_layouts``: for each of its own parameters, where this rank's part lies in the whole one.
Weights start with the values of the dense layer, whatever the number of ranks (``shardwise.core.initialization``).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.errors import ConfigError, ContradictionError, WeightError
from shardwise.core.initialization import InitMethod
from shardwise.core.layout import I, Layout
from shardwise.core.sharding import Interval
from shardwise.megatron.core.process_groups_config import ProcessGroupCollection
from shardwise.megatron.core.tensor_parallel.attributes import (  # noqa: F401
    _MODEL_PARALLEL_ATTRIBUTE_DEFAULTS,
    HAVE_TE,
    _grad_accum_fusion_available,
    _initialize_affine_weight_cpu,
    _initialize_affine_weight_gpu,
    copy_tensor_model_parallel_attributes,
    custom_bwd,
    custom_fwd,
    dist_all_gather_func,
    dist_reduce_scatter_func,
    divide,
    param_is_not_tensor_parallel_duplicate,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)
from shardwise.megatron.core.tensor_parallel.linear_functions import (
    LinearWithFrozenWeight,
    LinearWithGradAccumulationAndAsyncCommunication,
    drain_embedding_wgrad_compute,
    linear_with_frozen_weight,
    linear_with_grad_accumulation_and_async_allreduce,
    sequence_view,
    warn_of_connections,
)
from shardwise.megatron.core.tensor_parallel.module import MegatronLayer, MegatronLinear, StatelessExtra
from shardwise.megatron.core.transformer.transformer_config import ModelParallelConfig
from shardwise.megatron.errors import AssertedConfigError
from shardwise.nn.column import ColumnLinear
from shardwise.nn.embedding import VocabEmbedding
from shardwise.nn.linear import LinearParallelism
from shardwise.nn.replicated import named_param_layouts
from shardwise.nn.row import RowLinear
from shardwise.nn.weight_gradient import WeightGradientQueue

__all__ = [
    "ColumnParallelLinear",
    "LinearWithFrozenWeight",
    "LinearWithGradAccumulationAndAsyncCommunication",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "copy_tensor_model_parallel_attributes",
    "drain_embedding_wgrad_compute",
    "linear_with_frozen_weight",
    "linear_with_grad_accumulation_and_async_allreduce",
    "named_param_layouts",
    "param_is_not_tensor_parallel_duplicate",
    "set_defaults_if_not_set_tensor_model_parallel_attributes",
    "set_tensor_model_parallel_attributes",
]


class VocabParallelEmbedding(MegatronLayer, VocabEmbedding):
    """``VocabEmbedding`` as Megatron has it: from a config.

    Args:
        num_embeddings: size of the vocabulary, of any size.
        embedding_dim: width of an embedding, ``h``.
        init_method: fills the whole weight in place.
        reduce_scatter_embeddings: return this rank's shard of the sequence, ``[s/t, b, h]``.
        config: dtype and initialisation; with ``deterministic_mode`` the gradient is summed in a fixed order.
        tp_group: tensor-parallel group; that of ``pg_collection`` if None, and the ambient one where it has none.
        pg_collection: process groups, of which the layer takes ``tp``.
        name: changes nothing.

    Attributes:
        weight: ``[v/t, h]``.
        vocab_start_index, vocab_end_index: ids on this rank, the end excluded.
        num_embeddings_per_partition: number of ids on this rank.

    Raises:
        TopologyError: no group given and none initialised.

    Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: InitMethod,
        reduce_scatter_embeddings: bool = False,
        config: ModelParallelConfig,
        tp_group: ProcessGroup | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
    ) -> None:
        VocabEmbedding.__init__(
            self,
            num_embeddings,
            embedding_dim,
            sequence_parallel=reduce_scatter_embeddings,
            init=init_method,
            deterministic=config.deterministic_mode,
            **self._arguments(config, tp_group, pg_collection, linear=False),
        )
        self.reduce_scatter_embeddings = reduce_scatter_embeddings
        self.deterministic_mode = config.deterministic_mode
        self.num_embeddings_per_partition = self.vocab_end_index - self.vocab_start_index


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
        sequence = sequence_view(sequence_length, self.group)
        output = self._multiply(input_, self._checked_weight(input_, weight), added_bias, sequence)
        gather = self.gather_output if runtime_gather_output is None else runtime_gather_output
        if gather and self.tp_size > 1:
            output = self.gather(output)
        return output, self.bias if self.skip_bias_add else None


class RowParallelLinear(StatelessExtra, MegatronLinear, RowLinear):
    """``RowLinear`` as Megatron has it: from a config, and with a pair for its result.

    Args:
        input_size: width of the whole input, ``i``.
        output_size: width of the output, ``o``.
        config: dtype, initialisation, sequence parallelism, and where weight gradients go.
        init_method: fills the whole weight in place.
        bias: whether there is a bias; every rank holds it whole.
        input_is_parallel: the input is already this rank's part (not optional with sequence parallelism).
        skip_bias_add: return the bias in place of adding it, for the caller to fuse.
        stride: number of equal sections of the input, each split by itself.
        keep_master_weight_for_test: keep the whole weight as it starts, in ``master_weight``.
        is_expert: the layer is part of an expert: its group is the expert-tensor one, and where experts' tokens are
            exchanged explicitly (several ranks per expert, or experts on several ranks) its output stays a partial sum.
        tp_comm_buffer_name: kept as an attribute; nothing depends on it.
        tp_group: tensor-parallel group; that of ``pg_collection`` if None, and the ambient one where it has none.
        name: changes nothing.
        pg_collection: process groups, of which the layer takes ``tp``, or ``expt_tp`` of an expert.
        sizes: input features of each rank, within one section; balanced if None.

    Attributes:
        weight: ``[o, i/t]``.
        bias: ``[o]`` or None. With sequence parallelism its gradient is a partial sum (``bias.sequence_parallel``).

    Raises:
        TopologyError: no group given and none initialised.
        ShardingError: ``sizes`` do not sum to a section.
        ConfigError: sequence parallelism without ``input_is_parallel``; an expert with explicit communication without
            ``skip_bias_add``, since a bias must be added once, after the sum.

    Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: InitMethod,
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: ProcessGroup | None = None,
        name: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        sizes: Sequence[int] | None = None,
    ) -> None:
        divide(input_size, stride)
        arguments = self._arguments(
            config, tp_group, pg_collection, is_expert=is_expert, keep_master=keep_master_weight_for_test
        )
        if arguments["sequence_parallel"] and not input_is_parallel:
            raise ContradictionError("sequence_parallel needs input_is_parallel=True: the input is split over features")
        explicit_expert_comm = is_expert and self._has_expert_communication(config, arguments["group"])
        if explicit_expert_comm and not skip_bias_add:
            raise AssertedConfigError(
                f"an expert's output stays a partial sum over {arguments['group'].size()} ranks, to which a bias "
                "cannot be added; use skip_bias_add=True and add it after the sum"
            )
        RowLinear.__init__(
            self,
            input_size,
            output_size,
            bias,
            sizes=sizes,
            init=init_method,
            sections=stride,
            parallelism=LinearParallelism.LOCAL if explicit_expert_comm else None,
            **arguments,
        )
        self.explicit_expert_comm = explicit_expert_comm
        self.input_size, self.output_size, self.stride = input_size, output_size, stride
        self.input_size_per_partition = self.local_features
        self.input_is_parallel = input_is_parallel
        self.skip_bias_add = skip_bias_add
        self.tp_comm_buffer_name = tp_comm_buffer_name

    @property
    def input_layout(self) -> Layout:
        """V(dim=-1), or I without ``input_is_parallel``."""
        return super().input_layout if self.input_is_parallel else I

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]  # A pair.
        """Apply the layer.

        Args:
            input_: ``[s, b, i/t]``, or ``[s, b, i]`` without ``input_is_parallel``; not modified.

        Returns:
            The output ``[s, b, o]``, the same on every rank (``[s/t, b, o]`` with sequence parallelism, by the balanced
            rule; a partial sum for an expert with explicit communication), and the bias with ``skip_bias_add``, else
            None.

        Raises:
            ShardingError: the input is not of the width that the layer takes.
        """
        if not self.input_is_parallel and self.tp_size > 1:
            input_ = self.scatter(input_)
        if self.skip_bias_add:
            return self._apply_linear(input_, None), self.bias
        return RowLinear.forward(self, input_), None
