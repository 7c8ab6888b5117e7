"""Where a linear layer's weight gradient goes when autograd does not keep it: into ``main_grad``, or into a queue."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.communication.collectives import all_gather_async
from shardwise.communication.pending import Pending
from shardwise.errors import AssertedShardingError
from shardwise.kernels.main_grad import add_product_, main_grad_of, placeholder
from shardwise.sharding import uneven_sizes


class WeightGradientQueue:
    """One layer's weight gradients that wait for a step of their own: their inputs and output gradients.

    Both enter together, so they match whatever order micro-batches come back in, and recomputation does not enter an
    input twice.

    Args:
        limit: how many may wait; 0 is no limit.
        inputs: where the inputs are kept, ``[s, b, i]`` each, or this rank's shards of them; None if the caller keeps
            them itself.
        grad_outputs: where the output gradients are kept, ``[s, b, o]`` each.

    Attributes:
        weight: the layer's one weight, its own or the one that it is always called with; None until a gradient waits.
    """

    def __init__(
        self, *, limit: int = 0, inputs: list[Tensor] | None = None, grad_outputs: list[Tensor] | None = None
    ) -> None:
        self.limit = limit
        self.inputs = inputs
        self.grad_outputs: list[Tensor] = [] if grad_outputs is None else grad_outputs
        self.weight: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> WeightGradientQueue:
        """For the copy of a layer, whose gradients are its own: nothing waits."""
        copied = WeightGradientQueue(limit=self.limit, inputs=None if self.inputs is None else [])
        if self.inputs is not None:
            memo[id(self.inputs)] = copied.inputs
        memo[id(self.grad_outputs)] = copied.grad_outputs
        return copied

    def add(self, weight: Tensor, input_: Tensor, grad_output: Tensor) -> bool:
        """Let one gradient of ``weight`` wait; False if as many wait as may."""
        if self.limit and len(self.grad_outputs) >= self.limit:
            return False
        self.weight = weight
        self.grad_outputs.append(grad_output)
        if self.inputs is not None:
            self.inputs.append(input_)
        return True

    def take(self, *, fuse: bool, gather_group: ProcessGroup | None) -> Callable[[], None]:
        """Empty the queue; the function that is returned computes what waited (``compute_weight_gradients_``)."""
        weight, inputs, grad_outputs = self.weight, self.inputs, self.grad_outputs
        if weight is None or inputs is None:
            return lambda: None
        taken = inputs[:], grad_outputs[:]
        inputs.clear()
        grad_outputs.clear()
        return lambda: compute_weight_gradients_(weight, *taken, fuse=fuse, gather_group=gather_group)


class WeightGradient:
    """What becomes of the weight gradient of one call of a linear layer.

    Args:
        weight: the parameter, as the caller knows it; its ``main_grad`` is added to.
        fuse: add the gradient to ``weight.main_grad`` in place of returning it.
        queues: where it waits: in the first that has room.
    """

    __slots__ = ("_queues", "fuse", "weight")

    def __init__(self, weight: Tensor, *, fuse: bool, queues: tuple[WeightGradientQueue, ...] = ()) -> None:
        self.weight = weight
        self.fuse = fuse
        self._queues = queues

    @property
    def may_wait(self) -> bool:
        """Whether there is a queue."""
        return bool(self._queues)

    def defer(self, input_: Tensor, grad_output: Tensor) -> bool:
        """Let the gradient wait; False if it must be computed now."""
        return any(queue.add(self.weight, input_, grad_output) for queue in self._queues)

    def placeholder(self) -> Tensor | None:
        """What autograd is given in place of a gradient that it need not keep (``kernels.main_grad``)."""
        return placeholder(self.weight)


@torch.no_grad()
def compute_weight_gradients_(
    weight: Tensor,
    inputs: list[Tensor],
    grad_outputs: list[Tensor],
    *,
    fuse: bool,
    gather_group: ProcessGroup | None,
) -> None:
    """Add the weight gradients of several calls of a linear layer, in order, and empty both lists.

    An input that is a shard is gathered while the gradient before it is computed.

    Args:
        weight: the gradients are added to its ``main_grad`` with ``fuse``, else to its ``grad``.
        inputs: ``[s, b, i]``, or ``[s/t, b, i]`` with a ``gather_group``; emptied.
        grad_outputs: ``[s, b, o]``, in the same order; emptied.
        fuse: see ``weight``.
        gather_group: the ranks that hold the inputs' other shards, by the balanced rule; None if each input is whole.

    Raises:
        ShardingError: the lists are not of the same length.
        ConfigError: ``weight.main_grad`` is needed and missing.
    """
    if len(inputs) != len(grad_outputs):
        raise AssertedShardingError(
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
    while following is not None:
        input_ = following.wait() if isinstance(following, Pending) else following
        grad_output = grad_outputs.pop(0)
        following = next_input()
        accumulate_(weight, grad_output.flatten(0, -2), input_.flatten(0, -2), fuse=fuse)


@torch.no_grad()
def accumulate_(weight: Tensor, grad_output: Tensor, input_: Tensor, *, fuse: bool) -> None:
    """Add ``grad_output.T @ input_`` to ``weight.main_grad`` or, without ``fuse``, to ``weight.grad``.

    Where ``main_grad`` is wider than the factors, products and sums are in its dtype too, so that summing many
    micro-batches loses nothing to the parameter's rounding; the factors are widened a bounded number of tokens at a
    time.

    Args:
        weight: a parameter, whose gradient is overwritten.
        grad_output: ``[n, o]``.
        input_: ``[n, i]``.
        fuse: see above.

    Raises:
        ConfigError: with ``fuse``, ``weight`` has no ``main_grad``.
    """
    if fuse:
        add_product_(main_grad_of(weight), grad_output, input_)
        return
    gradient = grad_output.t().mm(input_).to(weight.dtype)
    weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
