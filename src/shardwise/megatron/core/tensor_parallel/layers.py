"""Layers whose parameters are split over the tensor-parallel group, and their linear functions.

A layer's ``param_layouts`` describe the position of this rank's part in each whole parameter. Initial weights equal
those of the dense layer for any number of ranks (``shardwise.core.initialization``).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.errors import ConfigError, ContradictionError, WeightError
from shardwise.core.initialization import InitMethod
from shardwise.core.layout import I, Layout
from shardwise.core.sharding import Interval
from shardwise.megatron.absent import ABSENT, absent_names
from shardwise.megatron.core.process_groups_config import ProcessGroupCollection
from shardwise.megatron.core.tensor_parallel import attributes, linear_functions
from shardwise.megatron.core.tensor_parallel.attributes import *  # noqa: F403
from shardwise.megatron.core.tensor_parallel.attributes import divide
from shardwise.megatron.core.tensor_parallel.linear_functions import *  # noqa: F403
from shardwise.megatron.core.tensor_parallel.linear_functions import _sequence_view, _warn_of_connections
from shardwise.megatron.core.tensor_parallel.module import MegatronLayer, MegatronLinear
from shardwise.megatron.core.transformer.transformer_config import ModelParallelConfig
from shardwise.megatron.errors import AssertedConfigError
from shardwise.megatron.surface import offer
from shardwise.nn.column import ColumnLinear
from shardwise.nn.embedding import VocabEmbedding
from shardwise.nn.linear import LinearParallelism
from shardwise.nn.replicated import named_param_layouts as named_param_layouts
from shardwise.nn.row import RowLinear
from shardwise.nn.weight_gradient import WeightGradientQueue


class VocabParallelEmbedding(MegatronLayer, VocabEmbedding):
    """``VocabEmbedding`` with Megatron's config.

    Args:
        num_embeddings: size of the vocabulary; any number.
        embedding_dim: size of an embedding, ``h``.
        init_method: function that fills the whole weight in-place.
        reduce_scatter_embeddings: whether to return this rank's shard of the sequence, ``[s/t, b, h]``.
        config: dtype and initialisation; with ``deterministic_mode`` the gradient is summed in a fixed order.
        tp_group: tensor-parallel group; None means ``pg_collection.tp``, or the ambient group without that.
        name: no effect.

    Attributes:
        weight: ``[v/t, h]``.
        vocab_start_index, vocab_end_index: range of ids on this rank, the end excluded.
        num_embeddings_per_partition: number of ids on this rank.

    Raises:
        TopologyError: no group is given and none is initialised.

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
        arguments = self._arguments(config, init_method, tp_group, pg_collection, linear=False)
        arguments |= {"sequence_parallel": reduce_scatter_embeddings, "deterministic": config.deterministic_mode}
        VocabEmbedding.__init__(self, num_embeddings, embedding_dim, **arguments)
        self.reduce_scatter_embeddings = reduce_scatter_embeddings
        self.deterministic_mode = config.deterministic_mode
        self.num_embeddings_per_partition = self.vocab_end_index - self.vocab_start_index


class ColumnParallelLinear(MegatronLinear, ColumnLinear):
    """``ColumnLinear`` with Megatron's config and a pair as its result.

    Args:
        input_size: size of the input, ``i``.
        output_size: size of the whole output, ``o``.
        config: dtype, initialisation, sequence parallelism, and destination of weight gradients.
        init_method: function that fills the whole weight in-place.
        bias: whether there is a bias.
        gather_output: whether to return the whole output on every rank.
        stride: number of equal sections of the output, each split separately: 2 for a gate and an up projection.
        keep_master_weight_for_test: whether to keep the initial whole weight in ``master_weight``.
        skip_bias_add: whether to return the bias instead of adding it, so that the caller can fuse the addition.
        skip_weight_param_allocation: whether to make no weight; ``forward`` then needs one.
        embedding_activation_buffer, grad_output_buffer: buffers of inputs and output gradients for
            ``drain_embedding_wgrad_compute``, with ``config.defer_embedding_wgrad_compute``.
        is_expert: whether the layer is part of an expert. Its group is then the expert-tensor group. It communicates
            nothing if tokens are exchanged explicitly (several ranks per expert, or experts on several ranks).
        tp_comm_buffer_name: stored as an attribute; no effect.
        disable_grad_reduce: whether to leave the input gradient a partial sum, which the caller reduces (without
            sequence parallelism).
        tp_group: tensor-parallel group; None means that of ``pg_collection`` (``tp``, or ``expt_tp`` for an expert), or
            the ambient group without that.
        name: no effect.
        output_dtype: dtype of the output, without rounding to a narrower dtype before; None means the input's dtype.
        sizes, intervals: as in ``ColumnLinear``.

    Attributes:
        weight: ``[o/t, i]``.
        bias: ``[o/t]`` or None.

    Raises:
        TopologyError: no group is given and none is initialised.
        ShardingError: the sum of ``sizes`` is not the size of a section.
        ConfigError: only one of the two buffers; ``intervals`` with ``gather_output``, ``stride`` or ``sizes``; an
            ``output_dtype`` that is not a floating-point dtype, or is given in a group that sums over parts.

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
            config, init_method, tp_group, pg_collection, is_expert, keep_master_weight_for_test
        )
        if intervals is not None and gather_output:
            raise ConfigError("intervals exclude gather_output, stride and sizes; leave those at their defaults")
        if (embedding_activation_buffer is None) != (grad_output_buffer is None):
            raise ConfigError("give both embedding_activation_buffer and grad_output_buffer, or neither")
        queue: WeightGradientQueue | None = None
        if config.defer_embedding_wgrad_compute and grad_output_buffer is not None:
            buffers = {"inputs": embedding_activation_buffer, "grad_outputs": grad_output_buffer}
            queue = WeightGradientQueue(limit=config.wgrad_deferral_limit, from_forward=True, **buffers)
        communicates_nothing = self.explicit_expert_comm or (disable_grad_reduce and not arguments["sequence_parallel"])
        arguments |= {"sections": stride, "sizes": sizes, "intervals": intervals, "output_dtype": output_dtype}
        arguments |= {"own_weight": not skip_weight_param_allocation, "weight_gradient_queue": queue}
        parallelism = LinearParallelism.LOCAL if communicates_nothing else None
        ColumnLinear.__init__(self, input_size, output_size, bias, parallelism=parallelism, **arguments)
        _warn_of_connections(self._device(), self.parallelism)
        self.input_size, self.output_size, self.stride = input_size, output_size, stride
        self.output_size_per_partition = self.local_features
        self.gather_output, self.skip_bias_add = gather_output, skip_bias_add
        self.embedding_activation_buffer = embedding_activation_buffer
        self.grad_output_buffer = grad_output_buffer
        self.tp_comm_buffer_name, self.disable_grad_reduce = tp_comm_buffer_name, disable_grad_reduce
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
            weight: ``[o/t, i]``, overrides the layer's weight.
            runtime_gather_output: overrides ``gather_output`` for this call.
            sequence_length: ``s`` with sequence parallelism, if the ranks do not divide it; shards then have the
                balanced sizes. None means that all ranks hold the same number of positions.

        Returns:
            The output ``[s, b, o/t]`` (``[s, b, o]`` when gathered), and the bias with ``skip_bias_add``, else None.

        Raises:
            ShardingError: the input does not have the layer's size.
            WeightError: there is no weight, or the given weight has another shape.
        """
        if weight is None and self.weight is None:
            raise WeightError("the layer was made with skip_weight_param_allocation; pass a weight to forward")
        output = ColumnLinear.forward(self, input_, weight, sequence=_sequence_view(sequence_length, self.group))
        gather = self.gather_output if runtime_gather_output is None else runtime_gather_output
        if gather and self.tp_size > 1:
            output = self.gather(output)
        return output, self.bias if self.skip_bias_add else None


class RowParallelLinear(MegatronLinear, RowLinear):
    """``RowLinear`` with Megatron's config and a pair as its result.

    Args:
        input_size: size of the whole input, ``i``.
        output_size: size of the output, ``o``.
        bias: whether there is a bias; every rank holds it whole.
        input_is_parallel: whether the input is already this rank's part (required with sequence parallelism).
        stride: number of equal sections of the input, each split separately.
        config, init_method, skip_bias_add, keep_master_weight_for_test, tp_comm_buffer_name, tp_group, name: as in
            ``ColumnParallelLinear``.
        is_expert: whether the layer is part of an expert. Its group is then the expert-tensor group. Its output stays a
            partial sum if tokens are exchanged explicitly (several ranks per expert, or experts on several ranks).
        sizes: number of input features of each rank, within one section; balanced if None.

    Attributes:
        weight: ``[o, i/t]``.
        bias: ``[o]`` or None. With sequence parallelism its gradient is a partial sum (``bias.sequence_parallel``).

    Raises:
        TopologyError: no group is given and none is initialised.
        ShardingError: the sum of ``sizes`` is not the size of a section.
        ConfigError: sequence parallelism without ``input_is_parallel``; or an expert with explicit communication but
            without ``skip_bias_add``, because a bias must be added once, after the sum.

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
            config, init_method, tp_group, pg_collection, is_expert, keep_master_weight_for_test
        )
        if arguments["sequence_parallel"] and not input_is_parallel:
            raise ContradictionError("sequence_parallel needs input_is_parallel=True: the input is split over features")
        if self.explicit_expert_comm and not skip_bias_add:
            raise AssertedConfigError(
                f"an expert's output stays a partial sum over {arguments['group'].size()} ranks, to which a bias "
                "cannot be added; use skip_bias_add=True and add it after the sum"
            )
        parallelism = LinearParallelism.LOCAL if self.explicit_expert_comm else None
        arguments |= {"sections": stride, "sizes": sizes, "parallelism": parallelism}
        RowLinear.__init__(self, input_size, output_size, bias, **arguments)
        self.input_size, self.output_size, self.stride = input_size, output_size, stride
        self.input_size_per_partition = self.local_features
        self.input_is_parallel, self.skip_bias_add = input_is_parallel, skip_bias_add
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
            ShardingError: the input does not have the layer's input size.
        """
        if not self.input_is_parallel and self.tp_size > 1:
            input_ = self.scatter(input_)
        if self.skip_bias_add:
            return self._apply_linear(input_, None), self.bias
        wide = self._wide_bias(input_)
        if wide is not None:
            return self._apply_linear(input_, None) + wide, None
        return RowLinear.forward(self, input_), None


_absent = absent_names("tensor_parallel.layers")


def __getattr__(name: str) -> Any:
    # Megatron's private names, which programs import from this module.
    return _absent(name) if name in ABSENT["tensor_parallel.layers"] else getattr(attributes, name)


offer(globals(), attributes, linear_functions, "named_param_layouts")
