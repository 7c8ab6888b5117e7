"""What the linear layers share: how they communicate, and where their weight gradients go."""

import functools
import math
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter, init
from torch.utils.hooks import RemovableHandle

from shardwise.core.initialization import InitMethod
from shardwise.core.layout import Layout
from shardwise.core.sequence_view import SequenceView
from shardwise.core.sharding import ParamLayout
from shardwise.kernels.products import Products
from shardwise.nn.arithmetic import arithmetic_of
from shardwise.nn.linear import LinearParallelism, tensor_parallel_linear
from shardwise.nn.module import ShardedModule
from shardwise.nn.quantization import QuantizedTensor
from shardwise.nn.weight_gradient import WeightGradient, WeightGradientQueue

# As torch.nn.Linear: uniform within 1 / sqrt(fan in).
as_linear = functools.partial(init.kaiming_uniform_, a=math.sqrt(5))


class ParallelLinear(ShardedModule):
    """Base of ``ColumnLinear`` and ``RowLinear``, with the options that both have.

    Args:
        in_features, out_features, group, sequence_parallel, sections, parallelism: as the layer's own.
        overlap: with ``sequence_parallel`` multiply the ranks' rows as they come, and sum them as they go
            (``core.communication.overlap``), in place of all at once.
        align_rows: where a gradient is recorded on CUDA, let rows of the output begin at multiples of 16 bytes: for
            outputs as wide as a vocabulary, which may be odd.
        fuse_weight_gradient: add the weight's gradient to ``weight.main_grad`` in place of ``weight.grad``.
        delay_weight_gradient: leave the weight's gradient out of the backward, for ``backward_dw``.
        weight_gradient_queue: where weight gradients wait, before those two.
        options: of ``ShardedModule``: ``device``, ``dtype``, ``initialize``, ``init_on_cpu``.

    Attributes:
        in_features, out_features: of the whole layer.
        local_features: those of this rank, of the dimension that is split.
        parallelism: what the layer communicates.
    """

    weight: Parameter | None
    bias: Parameter | None
    local_features: int
    # That of the factors if None.
    output_dtype: torch.dtype | None = None
    _products: Products
    # What the layer communicates on several ranks: without sequence parallelism, and with it.
    _usual_parallelism: tuple[LinearParallelism, LinearParallelism]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: ProcessGroup,
        sequence_parallel: bool,
        sections: int,
        parallelism: LinearParallelism | None,
        overlap: bool = False,
        align_rows: bool = False,
        fuse_weight_gradient: bool = False,
        delay_weight_gradient: bool = False,
        weight_gradient_queue: WeightGradientQueue | None = None,
        **options: Any,
    ) -> None:
        super().__init__(group, **options)
        self._arithmetic = arithmetic_of(group)
        self.in_features = in_features
        self.out_features = out_features
        self.sequence_parallel = sequence_parallel and group.size() > 1
        self.sections = sections
        usual = self._usual_parallelism[self.sequence_parallel]
        self.parallelism = LinearParallelism.LOCAL if group.size() == 1 else parallelism or usual
        self.overlap = overlap
        self.align_rows = align_rows
        self.fuse_weight_gradient = fuse_weight_gradient
        self._delayed = WeightGradientQueue(inputs=[]) if delay_weight_gradient else None
        self._weight_gradient_hooks: OrderedDict[int, Callable[[Tensor], None]] = OrderedDict()
        self._queues = tuple(queue for queue in (weight_gradient_queue, self._delayed) if queue is not None)

    @property
    @abstractmethod
    def input_layout(self) -> Layout:
        """Layout of the input over the layer's group."""

    @property
    @abstractmethod
    def output_layout(self) -> Layout:
        """Layout of the output over the layer's group."""

    def _make_parameters(
        self,
        weight: ParamLayout | None,
        bias: ParamLayout | None,
        init_method: InitMethod | None,
        *,
        partial_bias_gradient: bool = False,
    ) -> None:
        # As torch.nn.Linear: uniform within 1 / sqrt(fan in), weight and bias.
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        if weight is None:
            self.register_parameter("weight", None)
        else:
            self._make_parameter("weight", weight, init_method or as_linear)
        if bias is None:
            self.register_parameter("bias", None)
        else:
            zeros_or_uniform = init.zeros_ if init_method else functools.partial(init.uniform_, a=-bound, b=bound)
            self._make_parameter("bias", bias, zeros_or_uniform, partial_gradient=partial_bias_gradient)

    @property
    def is_one_product(self) -> bool:
        """Whether all that the layer computes is one product with its weight, and its bias."""
        return not isinstance(self.weight, QuantizedTensor)

    def _multiply(
        self,
        input_: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sequence: SequenceView | None = None,
        parallelism: LinearParallelism | None = None,
    ) -> Tensor:
        """``input_ @ weight.T + bias`` with the layer's communication, unless another is given."""
        weight_gradient: WeightGradient | None = None
        if (self.fuse_weight_gradient or self._queues) and weight.requires_grad:
            weight_gradient = WeightGradient(weight, fuse=self.fuse_weight_gradient, queues=self._queues)
        return tensor_parallel_linear(
            input_,
            weight,
            bias,
            parallelism=parallelism or self.parallelism,
            group=self.group,
            sequence=sequence,
            weight_gradient=weight_gradient,
            products=self._products.aligned(input_, weight) if self.align_rows else self._products,
            overlaps=self.overlap,
        )

    @property
    def delays_weight_gradients(self) -> bool:
        """Whether weight gradients wait for ``backward_dw``."""
        return self._delayed is not None

    @property
    def delayed_weight(self) -> Tensor | None:
        """The weight whose gradients wait for ``backward_dw``: its own, or what it is called with, once known."""
        return self.weight if self.weight is not None or self._delayed is None else self._delayed.weight

    def take_weight_gradients(self) -> Callable[[], None]:
        """A function that computes what waits for ``backward_dw`` at this moment; here it no longer waits."""
        if self._delayed is None:
            return lambda: None
        gathers = self.parallelism is LinearParallelism.COLUMN_SEQUENCE
        gather_group = self.group if gathers else None
        compute = self._delayed.take(fuse=self.fuse_weight_gradient, gather_group=gather_group, products=self._products)

        def compute_and_tell() -> None:
            compute()
            if self.delayed_weight is not None:
                for hook in tuple(self._weight_gradient_hooks.values()):
                    hook(self.delayed_weight)

        return compute_and_tell

    def register_weight_gradient_hook(self, hook: Callable[[Tensor], None]) -> RemovableHandle:
        """Call ``hook(weight)`` whenever weight gradients that waited for ``backward_dw`` have been computed."""
        handle = RemovableHandle(self._weight_gradient_hooks)
        self._weight_gradient_hooks[handle.id] = hook
        return handle

    def backward_dw(self) -> None:
        """Compute the weight gradients that the backward passes left, with ``delay_weight_gradient``.

        They are added to ``weight.grad``, or to ``weight.main_grad`` with ``fuse_weight_gradient``. Hooks on the weight
        do not run; those of ``register_weight_gradient_hook`` do. With sequence parallelism a column-parallel layer
        gathers its inputs: every rank of the group calls.
        """
        self.take_weight_gradients()()

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"local={self.local_features}, tp={self.group.rank()}/{self.group.size()}, "
            f"{self.input_layout} -> {self.output_layout}"
        )
