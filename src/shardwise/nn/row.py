"""Row-parallel linear layer: the input features are split over the ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from shardwise.core.communication import moves
from shardwise.core.errors import ShardingError
from shardwise.core.initialization import InitMethod
from shardwise.core.layout import I, Layout, P, V
from shardwise.core.sequence_view import SequenceView
from shardwise.core.sharding import ParamLayout
from shardwise.nn.linear import LinearParallelism
from shardwise.nn.parallel_linear import ParallelLinear
from shardwise.nn.weight_gradient import WeightGradientQueue


class RowLinear(ParallelLinear):
    """Linear layer ``y = x A^T + b`` whose input features are split over the ranks.

    Given the same state of the default generator, the layer's initial weight is this rank's columns of
    ``torch.nn.Linear(in_features, out_features, bias)``, and its bias the whole bias. With ``sequence_parallel`` each
    rank keeps its shard of the output's sequence.

    Args:
        in_features: width of the whole input, ``i``.
        out_features: width of the output, ``o``.
        bias: whether there is a bias; every rank holds it whole.
        group, init, sequence_parallel and the options after it: as for ``ColumnLinear``.
        sizes: input features of each rank, within one section; balanced if None.
        sections: number of equal parts of the input, each split separately.

    Attributes:
        weight: ``[o, i/t]``.
        bias: ``[o]``, or None. With sequence parallelism its gradient is a partial sum.

    Raises:
        ShardingError: ``sizes`` do not sum to the size of a section.

    Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3.
    """

    weight: Parameter
    _usual_parallelism = (LinearParallelism.ROW, LinearParallelism.ROW_SEQUENCE)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: ProcessGroup,
        init: InitMethod | None = None,
        sizes: Sequence[int] | None = None,
        sections: int = 1,
        sequence_parallel: bool = False,
        parallelism: LinearParallelism | None = None,
        overlap: bool = False,
        align_rows: bool = False,
        fuse_weight_gradient: bool = False,
        delay_weight_gradient: bool = False,
        weight_gradient_queue: WeightGradientQueue | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        initialize: bool = True,
        init_on_cpu: bool = False,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            group=group,
            sections=sections,
            sequence_parallel=sequence_parallel,
            parallelism=parallelism,
            overlap=overlap,
            align_rows=align_rows,
            fuse_weight_gradient=fuse_weight_gradient,
            delay_weight_gradient=delay_weight_gradient,
            weight_gradient_queue=weight_gradient_queue,
            device=device,
            dtype=dtype,
            initialize=initialize,
            init_on_cpu=init_on_cpu,
        )
        t = group.size()
        layout = ParamLayout.split((out_features, in_features), 1, t, stride=sections, sizes=sizes)
        self._input_sizes = [layout.local_size(rank) for rank in range(t)]
        self.local_features = self._input_sizes[group.rank()]
        self.plan = self.plan.with_products(self._arithmetic.products(layout, "input", group=group))
        self._norm = self._arithmetic.norm(group, sequence_parallel=self.sequence_parallel)
        bias_layout = ParamLayout.replicated((out_features,), t) if bias else None
        replicas = self._norm.replicas(applied_apart=self.sequence_parallel)
        self._make_parameters(layout, bias_layout, init, replicas)

    @property
    def input_layout(self) -> Layout:
        """V(dim=-1), this rank's features."""
        return V(dim=-1, sizes=tuple(self._input_sizes))

    @property
    def output_layout(self) -> Layout:
        """I; V(dim=0) with sequence parallelism; P if the layer does not reduce its output."""
        return self.parallelism.outside or (I if self.group.size() == 1 else P)

    def forward(self, input_: Tensor, *, sequence: SequenceView | None = None) -> Tensor:
        """Apply the layer.

        Args:
            input_: ``[s, b, i/t]``, this rank's features; not modified.
            sequence: positions of the input, which only the dropout of adapters reads.

        Returns:
            ``[s, b, o]``, the same on every rank; ``[s/t, b, o]`` with sequence parallelism, by the balanced rule.

        Raises:
            ShardingError: the input does not have this rank's number of features.
        """
        own = None if self.skip_bias_add else self.bias
        return self._norm.row_output(lambda bias: self._apply_linear(input_, bias, sequence), own)

    def _apply_linear(self, input_: Tensor, bias: Tensor | None, sequence: SequenceView | None = None) -> Tensor:
        if input_.shape[-1:] != (self.local_features,):
            raise self._wrong_width(input_, self.local_features)
        return self._multiply(input_, self.weight, bias, sequence)

    def scatter(self, input_: Tensor) -> Tensor:
        """Return this rank's features ``[s, b, i/t]`` of a whole input ``[s, b, i]``.

        Layout I -> V: forward split, backward all-gather.

        Raises:
            ShardingError: the input does not have the layer's width.
        """
        if input_.size(-1) != self.in_features:
            raise ShardingError(
                f"the input has {input_.size(-1)} features, the layer {self.in_features}; it takes the whole input"
            )
        if self.sections > 1:
            # Reorder the features so that each rank's intervals are adjacent.
            runs = [run for rank_runs in self.param_layouts["weight"].intervals for run in rank_runs]
            input_ = torch.cat([input_[..., start:stop] for start, stop in runs], dim=-1)
        return moves.scatter(input_, dim=-1, group=self.group, sizes=self._input_sizes)
