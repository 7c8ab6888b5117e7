"""Weight gradients of linear layers that autograd does not keep: added to ``main_grad``, or delayed in a queue."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from shardwise.core.communication.collectives import all_gather_async
from shardwise.core.communication.transports.transport import Pending
from shardwise.core.errors import ShardingError
from shardwise.core.sharding import uneven_sizes
from shardwise.kernels.products import Products, add_product_, main_grad_of, placeholder
from shardwise.nn.recompute import is_kept_briefly

_USUAL = Products()


class WeightGradientQueue:
    """Inputs and output gradients of one layer whose weight gradients are computed later.

    The first inputs are those of the output gradients, in the same order; the inputs after them were announced by
    forwards whose backward has not come yet.

    Args:
        limit: the most that may wait; 0 is no limit.
        inputs: list for the inputs, ``[s, b, i]`` or this rank's shards; None if the caller keeps them.
        grad_outputs: list for the output gradients, ``[s, b, o]``.
        from_forward: an input is there from its forward on; else it comes with its output gradient.

    Attributes:
        weight: the layer's one weight, its own or the one that it is always called with; None until a gradient waits.
    """

    def __init__(
        self,
        *,
        limit: int = 0,
        inputs: list[Tensor] | None = None,
        grad_outputs: list[Tensor] | None = None,
        from_forward: bool = False,
    ) -> None:
        self.limit = limit
        self.from_forward = from_forward
        self.inputs = inputs
        self.grad_outputs: list[Tensor] = [] if grad_outputs is None else grad_outputs
        self.weight: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> WeightGradientQueue:
        """For the copy of a layer, whose gradients are its own: nothing waits."""
        inputs: list[Tensor] | None = None if self.inputs is None else []
        copied = WeightGradientQueue(limit=self.limit, inputs=inputs, from_forward=self.from_forward)
        if self.inputs is not None:
            memo[id(self.inputs)] = copied.inputs
        memo[id(self.grad_outputs)] = copied.grad_outputs
        return copied

    def announce(self, input_: Tensor) -> bool:
        """Keep the input of a forward whose gradient is to wait, with ``from_forward``; whether it is kept."""
        if not self.from_forward or self.inputs is None or (self.limit and len(self.inputs) >= self.limit):
            return False
        self.inputs.append(input_)
        return True

    def add(self, weight: Tensor, input_: Tensor, grad_output: Tensor, announced: Tensor | None = None) -> bool:
        """Let one gradient of ``weight`` wait, whose input may be announced; False if as many wait as may."""
        inputs, num_waiting = self.inputs, len(self.grad_outputs)
        if inputs is not None:
            for place in range(num_waiting, len(inputs)):
                if inputs[place] is announced:
                    del inputs[place]
                    break
        if self.limit and num_waiting >= self.limit:
            return False
        self.weight = weight
        self.grad_outputs.append(grad_output)
        if inputs is not None:
            inputs.insert(num_waiting, input_)
        return True

    def take(self, *, fuse: bool, gather_group: ProcessGroup | None, products: Products = _USUAL) -> Callable[[], None]:
        """Empty the queue; the function that is returned computes what waited (``compute_weight_gradients_``)."""
        weight, inputs, grad_outputs = self.weight, self.inputs, self.grad_outputs
        if weight is None or inputs is None:
            return lambda: None
        taken = inputs[:], grad_outputs[:]
        inputs.clear()
        grad_outputs.clear()
        return lambda: compute_weight_gradients_(
            weight, *taken, fuse=fuse, gather_group=gather_group, products=products
        )


class WeightGradient:
    """Destination of the weight gradient of one call of a linear layer.

    Args:
        weight: the parameter, as the caller knows it; its ``main_grad`` is added to.
        fuse: add the gradient to ``weight.main_grad`` instead of returning it.
        queues: where it waits: in the first that has room.
    """

    __slots__ = ("_announced", "_queues", "fuse", "weight")

    def __init__(self, weight: Tensor, *, fuse: bool, queues: tuple[WeightGradientQueue, ...] = ()) -> None:
        self.weight = weight
        self.fuse = fuse
        self._queues = queues
        self._announced: Tensor | None = None

    def announce(self, input_: Tensor) -> None:
        """Announce an input to the queues; a recomputed forward's comes with the backward."""
        if not is_kept_briefly() and any(queue.announce(input_) for queue in self._queues):
            self._announced = input_

    @property
    def may_wait(self) -> bool:
        """Whether there is a queue."""
        return bool(self._queues)

    def defer(self, input_: Tensor, grad_output: Tensor) -> bool:
        """Let the gradient wait; False if it must be computed now."""
        announced, self._announced = self._announced, None
        return any(queue.add(self.weight, input_, grad_output, announced) for queue in self._queues)

    def placeholder(self) -> Tensor | None:
        return placeholder(self.weight)


class DelayedGradients:
    """A layer whose weight gradients may wait for ``backward_dw``."""

    weight: Tensor | None
    _delayed: WeightGradientQueue | None = None
    _weight_gradient_hooks: dict[int, Callable[[Tensor], None]] | None = None

    def _compute_delayed(self) -> Callable[[], None]:
        """Empty the queue; a function that computes what waited."""
        raise NotImplementedError

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
        compute = self._compute_delayed()

        def compute_and_tell() -> None:
            compute()
            if self.delayed_weight is not None:
                for hook in tuple((self._weight_gradient_hooks or {}).values()):
                    hook(self.delayed_weight)

        return compute_and_tell

    def register_weight_gradient_hook(self, hook: Callable[[Tensor], None]) -> RemovableHandle:
        """Call ``hook(weight)`` whenever weight gradients that waited for ``backward_dw`` have been computed."""
        if self._weight_gradient_hooks is None:
            self._weight_gradient_hooks = OrderedDict()
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


@torch.no_grad()
def compute_weight_gradients_(
    weight: Tensor,
    inputs: list[Tensor],
    grad_outputs: list[Tensor],
    *,
    fuse: bool,
    gather_group: ProcessGroup | None,
    products: Products = _USUAL,
) -> None:
    """Add the weight gradients of several calls of a linear layer, in order, and empty both lists.

    They are added to ``weight.main_grad`` with ``fuse``, else to ``weight.grad``. Inputs are ``[s, b, i]``, or shards
    ``[s/t, b, i]`` over ``gather_group`` by the balanced rule, which are gathered while the gradient before is
    computed.

    Raises:
        ShardingError: the lists are not of the same length.
        ConfigError: ``weight.main_grad`` is needed and missing.
    """
    if len(inputs) != len(grad_outputs):
        raise ShardingError(
            f"{len(inputs)} inputs and {len(grad_outputs)} output gradients were kept; they must be as many"
        )

    def next_input() -> Pending | Tensor | None:
        if not inputs:
            return None
        input_ = inputs.pop(0)
        if gather_group is None or gather_group.size() == 1:
            return input_
        sizes = uneven_sizes(grad_outputs[0].size(0), gather_group.size())
        return all_gather_async(input_, group=gather_group, dim=0, sizes=sizes)

    following = next_input()
    main_grad = main_grad_of(weight) if fuse and following is not None else None
    while following is not None:
        input_ = following.wait() if isinstance(following, Pending) else following
        grad_output = grad_outputs.pop(0)
        following = next_input()
        grad_output, input_ = grad_output.flatten(0, -2), input_.flatten(0, -2)
        if main_grad is not None:
            add_product_(main_grad, grad_output, input_)
            continue
        product = products.weight_gradient(grad_output, input_)
        gradient = product.to(weight.dtype)
        weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
