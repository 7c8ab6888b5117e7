"""Column-parallel linear layer: the output features are split over the ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from shardwise.core.communication import moves
from shardwise.core.errors import ConfigError, ShardingError, WeightError
from shardwise.core.initialization import InitMethod
from shardwise.core.layout import I, Layout, R, V
from shardwise.core.sequence_view import SequenceView
from shardwise.core.sharding import Interval, ParamLayout, Replicas
from shardwise.nn.linear import LinearParallelism
from shardwise.nn.parallel_linear import ParallelLinear, as_linear
from shardwise.nn.weight_gradient import WeightGradientQueue


class ColumnLinear(ParallelLinear):
    """Linear layer ``y = x A^T + b`` whose output features are split over the ranks.

    Given the same state of the default generator, the layer's initial weight is this rank's rows of
    ``torch.nn.Linear(in_features, out_features, bias)``. With ``sequence_parallel`` the input is this rank's shard of
    the sequence, and the layer gathers it.

    Args:
        in_features: width of the input, ``i``.
        out_features: width of the whole output, ``o``.
        bias: whether there is a bias.
        group: the ranks that share the layer.
        init: fills the whole weight in place, and the bias starts at 0; None means both as in ``torch.nn.Linear``.
        sizes: output features of each rank, within one section; balanced if None.
        sections: number of equal parts of the output, each split separately: 2 for a gate and an up projection.
        intervals: alternative to ``sizes`` and ``sections``: each rank's intervals of output features, in the order of
            its output. If several ranks hold the same interval, their weight gradients are partial sums. ``gather``
            does not support such a layer.
        own_weight: whether to create a weight. If False, the caller passes the weight to ``forward``.
        output_dtype: dtype of the output, without rounding to a narrower dtype before; None means the input's dtype.
        sequence_parallel, parallelism, overlap, align_rows, fuse_weight_gradient: as for ``ParallelLinear``.
        delay_weight_gradient, weight_gradient_queue, device, dtype: as for ``ParallelLinear``.
        initialize, init_on_cpu: as for ``ParallelLinear``.

    Attributes:
        weight: ``[o/t, i]``, or None.
        bias: ``[o/t]``, or None.

    Raises:
        ShardingError: ``sizes`` do not sum to a section.
        ConfigError: ``intervals`` together with ``sizes`` or ``sections``; ``output_dtype`` is not a floating-point
            dtype, or the group uses exact arithmetic.

    Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3.
    """

    _usual_parallelism = (LinearParallelism.COLUMN, LinearParallelism.COLUMN_SEQUENCE)

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
        intervals: Sequence[Sequence[Interval]] | None = None,
        own_weight: bool = True,
        output_dtype: torch.dtype | None = None,
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
        if intervals is not None and (sections != 1 or sizes is not None):
            raise ConfigError("intervals exclude sections and sizes; leave those at their defaults")
        t = group.size()
        self._can_gather = intervals is None

        def layout_of(*shape: int) -> ParamLayout:
            if intervals is not None:
                return ParamLayout.of_intervals(shape, 0, intervals)
            return ParamLayout.split(shape, 0, t, stride=sections, sizes=sizes)

        layout = layout_of(out_features, in_features)
        self.weight_shape = torch.Size(layout.local_shape(group.rank()))
        self.local_features = self.weight_shape[0]
        self._output_sizes = [layout.local_size(rank) for rank in range(t)]
        self._weight_layout, self._init = layout, init
        products = self._arithmetic.products(layout, "output", group=group)
        if output_dtype is not None:
            if not output_dtype.is_floating_point:
                raise ConfigError(
                    f"output_dtype is {output_dtype}; it must be a floating-point dtype, or None for the input's"
                )
            products, self.output_dtype = products.in_dtype(output_dtype), output_dtype
        self.plan = self.plan.with_products(products)
        self._make_parameters(layout if own_weight else None, layout_of(out_features) if bias else None, init)

    @property
    def input_layout(self) -> Layout:
        """I; V(dim=0) with sequence parallelism; R if the layer does not reduce its input's gradient."""
        return self.parallelism.outside or (I if self.group.size() == 1 else R)

    @property
    def output_layout(self) -> Layout:
        """V(dim=-1), this rank's features."""
        return V(dim=-1, sizes=tuple(self._output_sizes))

    def own_weight_(self, weight: Tensor) -> None:
        """Set the weight, ``[o/t, i]``, of a layer that was constructed without a weight, in place."""
        self._check_shape(weight)
        self.param_layouts = {"weight": self._weight_layout, **self.param_layouts}
        self.param_replicas = {"weight": Replicas(), **self.param_replicas}
        self._init_methods["weight"] = self._init or as_linear
        self.weight = Parameter(weight)
        self._made("weight")

    def forward(self, input_: Tensor, weight: Tensor | None = None, *, sequence: SequenceView | None = None) -> Tensor:
        """Apply the layer.

        Args:
            input_: ``[s, b, i]``, the same on every rank, or this rank's shard ``[s/t, b, i]`` with sequence
                parallelism; not modified.
            weight: ``[o/t, i]``, replaces the layer's weight.
            sequence: used with sequence parallelism; None if all ranks hold the same number of positions.

        Returns:
            ``[s, b, o/t]``.

        Raises:
            ShardingError: the input does not have the layer's width.
            WeightError: there is no weight, or the passed weight does not have this layer's shape.
        """
        if input_.shape[-1:] != (self.in_features,):
            raise self._wrong_width(input_, self.in_features)
        if weight is not None:
            self._check_shape(weight)
        elif (weight := self.weight) is None:
            raise WeightError("the layer was made without a weight; pass a weight to forward")
        return self._multiply(input_, weight, None if self.skip_bias_add else self.bias, sequence)

    def _check_shape(self, weight: Tensor) -> None:
        if weight.shape != self.weight_shape:
            raise WeightError(
                f"the weight has shape {list(weight.shape)}; rank {self.group.rank()} needs {list(self.weight_shape)}"
            )

    def gather(self, output: Tensor) -> Tensor:
        """Gather the whole output ``[s, b, o]`` from every rank's part ``[s, b, o/t]``.

        Layout V -> I: forward all-gather, backward split.

        Raises:
            ShardingError: the layer has ``intervals``.
        """
        if not self._can_gather:
            raise ShardingError("the layer was made with intervals; its output cannot be gathered")
        if self.group.size() == 1:
            return output
        gathered = moves.gather(output, dim=-1, group=self.group, sizes=self._output_sizes)
        if self.sections == 1:
            return gathered
        # Each rank's part holds its piece of every section. In the whole output the sections follow one another.
        parts = [part.chunk(self.sections, dim=-1) for part in gathered.split(self._output_sizes, dim=-1)]
        return torch.cat([part[section] for section in range(self.sections) for part in parts], dim=-1)
