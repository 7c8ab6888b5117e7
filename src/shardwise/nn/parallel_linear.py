"""The base of the linear layers: their communication and the destination of their weight gradients."""

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter, init

from shardwise.core.errors import ShardingError
from shardwise.core.initialization import InitMethod
from shardwise.core.sequence_view import SequenceView
from shardwise.core.sharding import ParamLayout, Replicas
from shardwise.kernels.products import Products
from shardwise.nn.arithmetic import arithmetic_of
from shardwise.nn.linear import LinearParallelism, LinearPlan, planned_linear
from shardwise.nn.module import ShardedModule
from shardwise.nn.quantization import QuantizedTensor
from shardwise.nn.weight_gradient import DelayedGradients, WeightGradient, WeightGradientQueue

# As torch.nn.Linear: uniform within 1 / sqrt(fan in).
as_linear = functools.partial(init.kaiming_uniform_, a=math.sqrt(5))


class ParallelLinear(DelayedGradients, ShardedModule):
    """Base of ``ColumnLinear`` and ``RowLinear``, with the options that both have.

    Args:
        in_features, out_features, group, sections: arguments of the subclass.
        sequence_parallel: whether each rank holds its shard of the sequence outside the layer.
        parallelism: communication of the layer, instead of the default. With LOCAL the caller must sum a row layer's
            output, and the gradient of a column layer's input.
        overlap: with ``sequence_parallel``, whether to overlap products and communication
            (``core.communication.overlap``).
        align_rows: whether rows of the output begin at multiples of 16 bytes, if a gradient is recorded on CUDA: for
            outputs as wide as a vocabulary, whose size may be odd.
        fuse_weight_gradient: whether to add the weight's gradient to ``weight.main_grad`` instead of ``weight.grad``.
        delay_weight_gradient: whether ``backward_dw`` computes the weight's gradient, instead of the backward.
        weight_gradient_queue: queue that weight gradients enter first while it has room.
        device, dtype, initialize, init_on_cpu: as for ``ShardedModule``.

    Attributes:
        in_features, out_features: features of the whole layer.
        local_features: this rank's number of features along the split dimension.
        plan: how the layer multiplies and communicates.
    """

    weight: Parameter | None
    bias: Parameter | None
    local_features: int
    # None means the dtype of the input and the weight.
    output_dtype: torch.dtype | None = None
    plan: LinearPlan
    # The defaults on several ranks, without and with sequence parallelism.
    _usual_parallelism: tuple[LinearParallelism, LinearParallelism]
    skip_bias_add = False  # If True, the caller adds the bias.

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: ProcessGroup,
        sections: int,
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
        super().__init__(group, device=device, dtype=dtype, initialize=initialize, init_on_cpu=init_on_cpu)
        self._arithmetic = arithmetic_of(group)
        self.in_features = in_features
        self.out_features = out_features
        self.sequence_parallel = sequence_parallel and group.size() > 1
        self.sections = sections
        usual = self._usual_parallelism[self.sequence_parallel]
        self.align_rows = align_rows
        if delay_weight_gradient:
            self._delayed = WeightGradientQueue(inputs=[])
        self.plan = LinearPlan(
            LinearParallelism.LOCAL if group.size() == 1 else parallelism or usual,
            group,
            overlap=overlap,
            fuse=fuse_weight_gradient,
            queues=tuple(queue for queue in (weight_gradient_queue, self._delayed) if queue is not None),
        )

    @property
    def parallelism(self) -> LinearParallelism:
        """Communication of the layer; writable."""
        return self.plan.parallelism

    @parallelism.setter
    def parallelism(self, value: LinearParallelism) -> None:
        self.plan = replace(self.plan, parallelism=value)

    @property
    def fuse_weight_gradient(self) -> bool:
        """Whether the weight's gradient is added to ``weight.main_grad``; writable."""
        return self.plan.fuse

    @fuse_weight_gradient.setter
    def fuse_weight_gradient(self, value: bool) -> None:
        self.plan = replace(self.plan, fuse=value)

    @property
    def _products(self) -> Products:
        return self.plan.products

    def _make_parameters(
        self,
        weight: ParamLayout | None,
        bias: ParamLayout | None,
        init_method: InitMethod | None,
        bias_replicas: Replicas | None = None,
    ) -> None:
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        self._make_parameter("weight", weight, init_method or as_linear)
        zeros_or_uniform = init.zeros_ if init_method else functools.partial(init.uniform_, a=-bound, b=bound)
        self._make_parameter("bias", bias, zeros_or_uniform, bias_replicas)

    @property
    def is_one_product(self) -> bool:
        """True if the layer computes only one product with its weight and adds its bias."""
        return not isinstance(self.weight, QuantizedTensor)

    def _wrong_width(self, input_: Tensor, width: int) -> ShardingError:
        return ShardingError(
            f"the input has shape {list(input_.shape)}; rank {self.group.rank()} of {self.group.size()} needs "
            f"{width} features in the last dimension"
        )

    def _multiply(
        self,
        input_: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sequence: SequenceView | None = None,
        parallelism: LinearParallelism | None = None,
    ) -> Tensor:
        """Compute ``input_ @ weight.T + bias`` with the given communication, or the layer's if None."""
        plan = self.plan if parallelism is None else replace(self.plan, parallelism=parallelism)
        if self.align_rows:
            plan = plan.aligned(input_, weight)
        weight_gradient: WeightGradient | None = None
        if (plan.fuse or plan.queues) and weight.requires_grad:
            weight_gradient = WeightGradient(weight, fuse=plan.fuse, queues=plan.queues)
        return planned_linear(input_, weight, bias, plan, sequence, weight_gradient)

    def _compute_delayed(self) -> Callable[[], None]:
        gather_group = self.group if self.parallelism is LinearParallelism.COLUMN_SEQUENCE else None
        assert self._delayed is not None
        return self._delayed.take(fuse=self.fuse_weight_gradient, gather_group=gather_group, products=self._products)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"local={self.local_features}, tp={self.group.rank()}/{self.group.size()}, "
            f"{self.input_layout} -> {self.output_layout}"
        )
