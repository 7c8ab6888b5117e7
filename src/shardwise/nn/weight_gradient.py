"""Weight gradients of linear layers outside autograd: added to ``main_grad``, or delayed in a queue."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from shardwise.core.communication.collectives import all_gather_async
from shardwise.core.communication.transports.transport import Pending
from shardwise.core.errors import ShardingError
from shardwise.core.sharding import uneven_sizes
from shardwise.kernels.grouped import grouped_weight_gradient
from shardwise.kernels.products import Products, add_product_, main_grad_of, placeholder
from shardwise.nn.recompute import is_kept_briefly

_USUAL = Products()


class WeightGradientQueue:
    """Queue of one layer's inputs and output gradients, for weight gradients that are computed later.

    The first inputs belong to the output gradients, in the same order. Later inputs were announced by forwards whose
    backward has not run yet.

    Args:
        limit: maximum number of waiting gradients; 0 means no limit.
        inputs: list for the inputs, ``[s, b, i]`` or this rank's shards; None if the caller keeps them.
        grad_outputs: list for the output gradients, ``[s, b, o]``.
        from_forward: whether the forward adds the input; otherwise the backward adds it with the output gradient.

    Attributes:
        weight: the layer's weight, or the weight that the caller always passes; None until a gradient waits.
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
        """Return an empty queue, for a copied layer, which must not share gradients with the original."""
        inputs: list[Tensor] | None = None if self.inputs is None else []
        copied = WeightGradientQueue(limit=self.limit, inputs=inputs, from_forward=self.from_forward)
        if self.inputs is not None:
            memo[id(self.inputs)] = copied.inputs
        memo[id(self.grad_outputs)] = copied.grad_outputs
        return copied

    def announce(self, input_: Tensor) -> bool:
        """With ``from_forward``, add the input of a forward whose gradient will wait; return whether it was added."""
        if not self.from_forward or self.inputs is None or (self.limit and len(self.inputs) >= self.limit):
            return False
        self.inputs.append(input_)
        return True

    def add(self, weight: Tensor, input_: Tensor, grad_output: Tensor, announced: Tensor | None = None) -> bool:
        """Add a gradient of ``weight``, whose input may be announced; return False if the queue is full."""
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
        """Empty the queue, and return a function that computes its gradients (``compute_weight_gradients_``)."""
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
        weight: the caller's parameter, which has ``main_grad``.
        fuse: whether to add the gradient to ``weight.main_grad`` instead of returning it.
        queues: queues for a delayed gradient, which enters the first one that has room.
    """

    __slots__ = ("_announced", "_queues", "fuse", "weight")

    def __init__(self, weight: Tensor, *, fuse: bool, queues: tuple[WeightGradientQueue, ...] = ()) -> None:
        self.weight = weight
        self.fuse = fuse
        self._queues = queues
        self._announced: Tensor | None = None

    def announce(self, input_: Tensor) -> None:
        """Announce an input to the queues. In recomputed code the backward adds it instead."""
        if not is_kept_briefly() and any(queue.announce(input_) for queue in self._queues):
            self._announced = input_

    @property
    def may_wait(self) -> bool:
        """True if there is a queue."""
        return bool(self._queues)

    def defer(self, input_: Tensor, grad_output: Tensor) -> bool:
        """Queue the gradient; return False if it must be computed now."""
        announced, self._announced = self._announced, None
        return any(queue.add(self.weight, input_, grad_output, announced) for queue in self._queues)

    def placeholder(self) -> Tensor | None:
        return placeholder(self.weight)


class DelayedGradients:
    """Mixin for layers whose weight gradients may wait for ``backward_dw``."""

    weight: Tensor | None
    _delayed: WeightGradientQueue | None = None
    _weight_gradient_hooks: dict[int, Callable[[Tensor], None]] | None = None

    def _compute_delayed(self) -> Callable[[], None]:
        """Empty the queue, and return a function that computes its gradients."""
        raise NotImplementedError

    @property
    def delays_weight_gradients(self) -> bool:
        """True if weight gradients wait for ``backward_dw``."""
        return self._delayed is not None

    @property
    def delayed_weight(self) -> Tensor | None:
        """The weight whose gradients wait for ``backward_dw``: the layer's, or the caller's once it is known."""
        return self.weight if self.weight is not None or self._delayed is None else self._delayed.weight

    def take_weight_gradients(self) -> Callable[[], None]:
        """Empty the queue of ``backward_dw``, and return a function that computes its gradients and calls the hooks."""
        if not self.delays_weight_gradients:
            return lambda: None
        compute = self._compute_delayed()

        def compute_and_tell() -> None:
            compute()
            if self.delayed_weight is not None:
                for hook in tuple((self._weight_gradient_hooks or {}).values()):
                    hook(self.delayed_weight)

        return compute_and_tell

    def register_weight_gradient_hook(self, hook: Callable[[Tensor], None]) -> RemovableHandle:
        """Call ``hook(weight)`` after each computation of weight gradients that waited for ``backward_dw``."""
        if self._weight_gradient_hooks is None:
            self._weight_gradient_hooks = OrderedDict()
        handle = RemovableHandle(self._weight_gradient_hooks)
        self._weight_gradient_hooks[handle.id] = hook
        return handle

    def backward_dw(self) -> None:
        """Compute the weight gradients that ``delay_weight_gradient`` left out of the backward.

        They are added to ``weight.grad``, or to ``weight.main_grad`` with ``fuse_weight_gradient``. Hooks on the weight
        do not run, but hooks of ``register_weight_gradient_hook`` do. Collective for a column-parallel layer with
        sequence parallelism, which gathers its inputs.
        """
        self.take_weight_gradients()()


class DelayedRuns(DelayedGradients, nn.Module):
    """Gradients of a weight of ``grouped_linear`` that wait for ``backward_dw``.

    Args:
        owner: module that has the weight, ``[e * rows, h]``.
        name: name of the weight.
        transposed: whether rows are multiplied by the matrices ``[rows, h]``, and not by their transposes.
    """

    def __init__(self, owner: nn.Module, name: str, *, transposed: bool) -> None:
        super().__init__()
        # In a tuple, so that the owner is no submodule.
        self._owner, self._name, self._is_transposed = (owner,), name, transposed
        self._waiting: list[tuple[Tensor, Tensor, Tensor]] = []

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # The owner may replace it.
        """The owner's parameter of that name, which the owner may replace."""
        return self._owner[0].get_parameter(self._name)

    @property
    def delays_weight_gradients(self) -> bool:
        """True unless the weight is frozen."""
        return self.weight.requires_grad

    def add(self, input_: Tensor, grad_output: Tensor, counts: Tensor) -> None:
        """Add a gradient; see ``grouped_linear``."""
        self._waiting.append((input_.detach(), grad_output, counts))

    def _compute_delayed(self) -> Callable[[], None]:
        taken = self._waiting[:]
        self._waiting.clear()

        @torch.no_grad()
        def compute() -> None:
            weight = self.weight
            for input_, grad_output, counts in taken:
                factors = (input_, grad_output) if self._is_transposed else (grad_output, input_)
                gradient = grouped_weight_gradient(*factors, counts).flatten(0, 1)
                weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
            taken.clear()

        return compute


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

    With ``fuse`` they are added to ``weight.main_grad``, otherwise to ``weight.grad``. Inputs are ``[s, b, i]``, or
    shards ``[s/t, b, i]`` over ``gather_group`` by the balanced rule. The gather of each shard overlaps with the
    computation of the previous gradient.

    Raises:
        ShardingError: the lists have different lengths.
        ConfigError: ``fuse`` is set and ``weight.main_grad`` is missing.
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
