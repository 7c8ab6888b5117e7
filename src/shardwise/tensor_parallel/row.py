"""The linear layer whose input features are split over the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from shardwise.collectives import moves
from shardwise.config import ModelParallelConfig
from shardwise.errors import AssertedConfigError, ContradictionError, ShardingError
from shardwise.initialization import InitMethod
from shardwise.sharding import ParamLayout
from shardwise.tensor_parallel.linear import LinearParallelism, tensor_parallel_linear
from shardwise.tensor_parallel.module import StatelessExtra, TensorParallelModule
from shardwise.tensor_parallel.weight_gradient import WeightGradient


class RowParallelLinear(StatelessExtra, TensorParallelModule):
    """Linear layer ``Y = X A + b`` whose input features are split over the ranks.

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
        tp_group: tensor-parallel group; the ambient one if None.
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
        sizes: Sequence[int] | None = None,
    ) -> None:
        super().__init__(config, tp_group, is_expert=is_expert)
        self.input_size = input_size
        self.output_size = output_size
        self.input_is_parallel = input_is_parallel
        self.skip_bias_add = skip_bias_add
        self.stride = stride
        self.tp_comm_buffer_name = tp_comm_buffer_name
        self.gradient_accumulation_fusion = config.gradient_accumulation_fusion
        self.sequence_parallel = self._sequence_parallel()
        self.explicit_expert_comm = is_expert and (self.tp_size > 1 or self.expert_parallel)
        self._keeps_master_weight = keep_master_weight_for_test
        if self.sequence_parallel and not input_is_parallel:
            raise ContradictionError("sequence_parallel needs input_is_parallel=True: the input is split over features")
        if self.explicit_expert_comm and not skip_bias_add:
            raise AssertedConfigError(
                f"an expert's output stays a partial sum over {self.tp_size} ranks, to which a bias cannot be added; "
                "use skip_bias_add=True and add it after the sum"
            )
        self._parallelism = LinearParallelism.LOCAL
        if self.tp_size > 1 and not self.explicit_expert_comm:
            self._parallelism = LinearParallelism.ROW_SEQUENCE if self.sequence_parallel else LinearParallelism.ROW
        self._delay_weight_gradients(None)

        layout = ParamLayout.split((output_size, input_size), 1, self.tp_size, stride=stride, sizes=sizes)
        self._input_sizes = [layout.local_size(rank) for rank in range(self.tp_size)]
        self.input_size_per_partition = self._input_sizes[self.tp_rank]
        self.weight: Parameter
        self.bias: Parameter | None
        self._make_parameter("weight", layout, init_method)
        if bias:
            self._make_parameter(
                "bias",
                ParamLayout.replicated((output_size,), self.tp_size),
                torch.nn.init.zeros_,
                partial_gradient=self.sequence_parallel,
            )
        else:
            self.register_parameter("bias", None)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
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
            input_ = self._split(input_)
        else:
            self._check_width(input_, self.input_size_per_partition)
        weight = self.weight
        # On one rank the bias goes with the product; on several it must be added once, after the sum.
        adds_later = self.bias is not None and not self.skip_bias_add and self.tp_size > 1
        output = tensor_parallel_linear(
            input_,
            weight,
            None if self.skip_bias_add or adds_later else self.bias,
            parallelism=self._parallelism,
            group=self.tp_group,
            weight_gradient=self._weight_gradient(),
        )
        if self.skip_bias_add:
            return output, self.bias
        if adds_later:
            assert self.bias is not None
            # Under autocast the output has another dtype than the bias; a whole linear would add in the output's.
            output = output + self.bias.to(output.dtype)
        return output, None

    def _weight_gradient(self) -> WeightGradient | None:
        fuse, delayed = self.gradient_accumulation_fusion, self.delayed_weight_gradients
        if not (fuse or delayed) or not self.weight.requires_grad:
            return None
        return WeightGradient(self.weight, fuse=fuse, delayed=delayed)

    def _split(self, input_: Tensor) -> Tensor:
        if input_.size(-1) != self.input_size:
            raise ShardingError(
                f"the input has {input_.size(-1)} features, the layer {self.input_size}; with input_is_parallel=False "
                "it is given the whole input"
            )
        if self.stride > 1:
            # Each rank's runs side by side, so that what it keeps is one.
            runs = [run for rank_runs in self.param_layouts["weight"].intervals for run in rank_runs]
            input_ = torch.cat([input_[..., start:stop] for start, stop in runs], dim=-1)
        return moves.scatter(input_, dim=-1, group=self.tp_group, sizes=self._input_sizes)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.input_size}, out_features={self.output_size}, bias={self.bias is not None}, "
            f"local={self.input_size_per_partition}, tp={self.tp_rank}/{self.tp_size}"
        )
