"""Layers whose parameters are split over the tensor-parallel group.

Each layer keeps ``param_layouts``: for each of its own parameters, where this rank's part lies in the whole one.
Weights start with the values of the dense layer, whatever the number of ranks (``shardwise.initialization``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from shardwise.collectives.regions import (
    _GatherFromModelParallelRegion,
    _ReduceFromModelParallelRegion,
    _ReduceScatterToSequenceParallelRegion,
    _ScatterToModelParallelRegion,
)
from shardwise.config import ModelParallelConfig
from shardwise.errors import ConfigError, ShardingError
from shardwise.initialization import InitMethod, initialize_shard_
from shardwise.parallel_state import resolve_tensor_model_parallel_group
from shardwise.sharding import ParamLayout
from shardwise.tensor_parallel.linear import LinearParallelism, tensor_parallel_linear
from shardwise.validation import check_ids

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "named_param_layouts",
    "set_tensor_model_parallel_attributes",
]


def set_tensor_model_parallel_attributes(tensor: Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Mark how a parameter is split, in the attributes that programs written for the reference read.

    Args:
        tensor: the parameter; gets ``tensor_model_parallel``, ``partition_dim`` and ``partition_stride``.
        is_parallel: whether it is split; False for a parameter that every rank holds whole.
        dim: dimension that is split.
        stride: number of sections split by themselves.
    """
    tensor.tensor_model_parallel = is_parallel  # type: ignore[attr-defined]
    tensor.partition_dim = dim  # type: ignore[attr-defined]
    tensor.partition_stride = stride  # type: ignore[attr-defined]


def named_param_layouts(module: nn.Module, world_size: int) -> Iterator[tuple[str, Parameter, ParamLayout]]:
    """Name, parameter and layout of every parameter of ``module``; a tied parameter comes once, under its first name.

    Args:
        module: any module; a parameter that no tensor-parallel layer owns is one that every rank holds whole.
        world_size: size of the tensor-parallel group.
    """
    seen: set[int] = set()
    for prefix, owner in module.named_modules():
        layouts: dict[str, ParamLayout] = getattr(owner, "param_layouts", {})
        for name, param in owner.named_parameters(recurse=False):
            if id(param) in seen:
                continue
            seen.add(id(param))
            layout = layouts.get(name) or ParamLayout.replicated(param.shape, world_size)
            yield f"{prefix}.{name}" if prefix else name, param, layout


class _TensorParallelModule(nn.Module):
    """What the layers share: their group, and making parameters from layouts."""

    def __init__(self, config: ModelParallelConfig, tp_group: ProcessGroup | None) -> None:
        super().__init__()
        self.config = config
        self.tp_group = resolve_tensor_model_parallel_group(tp_group)
        self.tp_size = self.tp_group.size()
        self.tp_rank = self.tp_group.rank()
        self.param_layouts: dict[str, ParamLayout] = {}

    def _make_parameter(self, name: str, layout: ParamLayout, init_method: InitMethod) -> Parameter:
        param = Parameter(torch.empty(layout.local_shape(self.tp_rank), dtype=self.config.params_dtype))
        if self.config.perform_initialization:
            initialize_shard_(param, layout, self.tp_rank, init_method)
        is_parallel = layout.dim is not None and self.tp_size > 1
        set_tensor_model_parallel_attributes(
            param, is_parallel, -1 if layout.dim is None else layout.dim, layout.stride
        )
        self.param_layouts[name] = layout
        return param


class VocabParallelEmbedding(_TensorParallelModule):
    """Embedding whose rows, the vocabulary, are split over the ranks by the balanced rule.

    Args:
        num_embeddings: size of the vocabulary, of any size.
        embedding_dim: width of an embedding, ``h``.
        init_method: fills the whole weight in place.
        reduce_scatter_embeddings: return this rank's shard of the sequence, ``[s/t, b, h]``.
        config: dtype and initialisation.
        tp_group: tensor-parallel group; the ambient one if None.

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
    ) -> None:
        super().__init__(config, tp_group)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.reduce_scatter_embeddings = reduce_scatter_embeddings
        layout = ParamLayout.split((num_embeddings, embedding_dim), 0, self.tp_size)
        self.vocab_start_index, self.vocab_end_index = layout.intervals[self.tp_rank][0]
        self.num_embeddings_per_partition = self.vocab_end_index - self.vocab_start_index
        self.weight = self._make_parameter("weight", layout, init_method)

    def forward(self, input_: Tensor) -> Tensor:
        """Look ids up.

        Args:
            input_: ``[b, s]`` global ids, the same on every rank; not modified.

        Returns:
            ``[b, s, h]``, the same on every rank, or ``[s/t, b, h]`` with ``reduce_scatter_embeddings``.

        Raises:
            VocabularyError: an id outside the vocabulary.
        """
        check_ids(input_, self.num_embeddings, what="token id")
        if self.tp_size == 1:
            output = F.embedding(input_, self.weight)
            return output.transpose(0, 1).contiguous() if self.reduce_scatter_embeddings else output
        if self.reduce_scatter_embeddings:
            input_ = input_.transpose(0, 1)
        local = input_ - self.vocab_start_index
        elsewhere = (local < 0) | (local >= self.num_embeddings_per_partition)
        if self.num_embeddings_per_partition > 0:
            output = F.embedding(local.masked_fill_(elsewhere, 0), self.weight)
        else:
            output = self.weight.new_zeros(*input_.shape, self.embedding_dim) + self.weight.sum()
        # Nothing saved the lookup's output, so it may be masked in place.
        output = output.masked_fill_(elsewhere.unsqueeze(-1), 0.0)
        if self.reduce_scatter_embeddings:
            scattered: Tensor = _ReduceScatterToSequenceParallelRegion.apply(output, self.tp_group)
            return scattered
        reduced: Tensor = _ReduceFromModelParallelRegion.apply(output, self.tp_group)
        return reduced

    def extra_repr(self) -> str:
        return (
            f"num_embeddings={self.num_embeddings}, embedding_dim={self.embedding_dim}, "
            f"ids=[{self.vocab_start_index}, {self.vocab_end_index}), tp={self.tp_rank}/{self.tp_size}"
        )


class ColumnParallelLinear(_TensorParallelModule):
    """Linear layer ``Y = X A + b`` whose output features are split over the ranks.

    Args:
        input_size: width of the input, ``i``.
        output_size: width of the whole output, ``o``.
        config: dtype, initialisation and sequence parallelism.
        init_method: fills the whole weight in place.
        bias: whether there is a bias.
        gather_output: return the whole output on every rank (not with sequence parallelism).
        stride: number of equal sections of the output, each split by itself: 2 for a gate and an up projection.
        skip_bias_add: return the bias in place of adding it, for the caller to fuse.
        skip_weight_param_allocation: make no weight; it is passed to ``forward``.
        tp_group: tensor-parallel group; the ambient one if None.
        sizes: output features of each rank, within one section; balanced if None.

    Attributes:
        weight: ``[o/t, i]``.
        bias: ``[o/t]`` or None.

    Raises:
        TopologyError: no group given and none initialised.
        ShardingError: ``sizes`` do not sum to a section.
        ConfigError: ``gather_output`` with sequence parallelism, or with several sections.

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
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        tp_group: ProcessGroup | None = None,
        sizes: Sequence[int] | None = None,
    ) -> None:
        super().__init__(config, tp_group)
        self.input_size = input_size
        self.output_size = output_size
        self.gather_output = gather_output
        self.stride = stride
        self.skip_bias_add = skip_bias_add
        self.sequence_parallel = config.sequence_parallel and self.tp_size > 1
        if gather_output and self.sequence_parallel:
            raise ConfigError("gather_output and sequence_parallel exclude each other; turn one off")
        self._check_order(gather_output)
        layout = ParamLayout.split((output_size, input_size), 0, self.tp_size, stride=stride, sizes=sizes)
        self.weight_shape = layout.local_shape(self.tp_rank)
        self.output_size_per_partition = self.weight_shape[0]
        self._output_sizes = [layout.local_size(rank) for rank in range(self.tp_size)]
        if skip_weight_param_allocation:
            self.register_parameter("weight", None)
        else:
            self.weight = self._make_parameter("weight", layout, init_method)
        if bias:
            bias_layout = ParamLayout.split((output_size,), 0, self.tp_size, stride=stride, sizes=sizes)
            self.bias = self._make_parameter("bias", bias_layout, torch.nn.init.zeros_)
        else:
            self.register_parameter("bias", None)

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Apply the layer.

        Args:
            input_: ``[s, b, i]``, the same on every rank, or this rank's shard ``[s/t, b, i]`` with sequence
                parallelism; not modified.
            weight: ``[o/t, i]``, in place of the layer's own.
            runtime_gather_output: overrides ``gather_output`` for this call.

        Returns:
            The output ``[s, b, o/t]`` (``[s, b, o]`` when gathered), and the bias with ``skip_bias_add``, else None.

        Raises:
            ShardingError: there is no weight, or a passed one is not of this layer's shape.
            ConfigError: the output is to be gathered, but has several sections.
        """
        gather = self.gather_output if runtime_gather_output is None else runtime_gather_output
        self._check_order(gather)
        if weight is None:
            weight = self.weight
            if weight is None:
                raise ShardingError("the layer was made with skip_weight_param_allocation; pass a weight to forward")
        elif tuple(weight.shape) != self.weight_shape:
            raise ShardingError(
                f"the weight has shape {list(weight.shape)}; rank {self.tp_rank} needs {list(self.weight_shape)}"
            )
        output = tensor_parallel_linear(
            input_,
            weight,
            None if self.skip_bias_add else self.bias,
            parallelism=LinearParallelism.COLUMN_SEQUENCE if self.sequence_parallel else LinearParallelism.COLUMN,
            group=self.tp_group,
        )
        if gather and self.tp_size > 1:
            output = _GatherFromModelParallelRegion.apply(output, self.tp_group, self._output_sizes)
        return output, self.bias if self.skip_bias_add else None

    def _check_order(self, gather: bool) -> None:
        if gather and self.stride > 1:
            raise ConfigError(
                f"gathering the output would return its {self.stride} sections out of order; use stride=1"
            )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.input_size}, out_features={self.output_size}, bias={self.bias is not None}, "
            f"local={self.output_size_per_partition}, tp={self.tp_rank}/{self.tp_size}"
        )


class RowParallelLinear(_TensorParallelModule):
    """Linear layer ``Y = X A + b`` whose input features are split over the ranks.

    Args:
        input_size: width of the whole input, ``i``.
        output_size: width of the output, ``o``.
        config: dtype, initialisation and sequence parallelism.
        init_method: fills the whole weight in place.
        bias: whether there is a bias; every rank holds it whole.
        input_is_parallel: the input is already this rank's part (not optional with sequence parallelism).
        skip_bias_add: return the bias in place of adding it, for the caller to fuse.
        stride: number of equal sections of the input, each split by itself.
        tp_group: tensor-parallel group; the ambient one if None.
        sizes: input features of each rank, within one section; balanced if None.

    Attributes:
        weight: ``[o, i/t]``.
        bias: ``[o]`` or None. With sequence parallelism its gradient is a partial sum (``bias.sequence_parallel``).

    Raises:
        TopologyError: no group given and none initialised.
        ShardingError: ``sizes`` do not sum to a section.

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
        tp_group: ProcessGroup | None = None,
        sizes: Sequence[int] | None = None,
    ) -> None:
        super().__init__(config, tp_group)
        self.input_size = input_size
        self.output_size = output_size
        self.input_is_parallel = input_is_parallel
        self.skip_bias_add = skip_bias_add
        self.sequence_parallel = config.sequence_parallel and self.tp_size > 1
        if self.sequence_parallel and not input_is_parallel:
            raise ConfigError("sequence_parallel needs input_is_parallel=True: the input is split over features")
        if not input_is_parallel and stride > 1:
            raise ConfigError(f"an input that is not parallel is split in one section; stride is {stride}, use 1")
        layout = ParamLayout.split((output_size, input_size), 1, self.tp_size, stride=stride, sizes=sizes)
        self._input_sizes = [layout.local_size(rank) for rank in range(self.tp_size)]
        self.input_size_per_partition = self._input_sizes[self.tp_rank]
        self.weight = self._make_parameter("weight", layout, init_method)
        if bias:
            self.bias = self._make_parameter(
                "bias", ParamLayout.replicated((output_size,), self.tp_size), torch.nn.init.zeros_
            )
            self.bias.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        else:
            self.register_parameter("bias", None)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Apply the layer.

        Args:
            input_: ``[s, b, i/t]``, or ``[s, b, i]`` without ``input_is_parallel``; not modified.

        Returns:
            The output ``[s, b, o]``, the same on every rank (``[s/t, b, o]`` with sequence parallelism), and the bias
            with ``skip_bias_add``, else None.
        """
        if not self.input_is_parallel and self.tp_size > 1:
            input_ = _ScatterToModelParallelRegion.apply(input_, self.tp_group, self._input_sizes)
        output = tensor_parallel_linear(
            input_,
            self.weight,
            # On one rank the bias goes with the product; on several it must be added once, after the sum.
            self.bias if self.tp_size == 1 and not self.skip_bias_add else None,
            parallelism=LinearParallelism.ROW_SEQUENCE if self.sequence_parallel else LinearParallelism.ROW,
            group=self.tp_group,
        )
        if self.skip_bias_add:
            return output, self.bias
        if self.bias is not None and self.tp_size > 1:
            # Under autocast the output has another dtype than the bias; a whole linear would add in the output's.
            output = output + self.bias.to(output.dtype)
        return output, None

    def extra_repr(self) -> str:
        return (
            f"in_features={self.input_size}, out_features={self.output_size}, bias={self.bias is not None}, "
            f"local={self.input_size_per_partition}, tp={self.tp_rank}/{self.tp_size}"
        )
