"""Megatron's row-parallel linear layer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.errors import ContradictionError
from shardwise.core.initialization import InitMethod
from shardwise.core.layout import I, Layout
from shardwise.megatron.core.process_groups_config import ProcessGroupCollection
from shardwise.megatron.core.tensor_parallel.module import MegatronLinear, StatelessExtra
from shardwise.megatron.core.tensor_parallel.private_names import divide
from shardwise.megatron.core.transformer.transformer_config import ModelParallelConfig
from shardwise.megatron.errors import AssertedConfigError
from shardwise.nn.linear import LinearParallelism
from shardwise.nn.row import RowLinear


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
