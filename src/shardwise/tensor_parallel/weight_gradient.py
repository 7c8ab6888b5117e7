"""Where a weight's gradient goes when autograd does not keep it: into ``main_grad``, or into buffers for later."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.collectives.primitives import Pending, all_gather, all_gather_async
from shardwise.config import ModelParallelConfig
from shardwise.errors import AssertedShardingError
from shardwise.kernels.main_grad import add_product_, main_grad_of, placeholder
from shardwise.parallel_state import resolve_tensor_model_parallel_group
from shardwise.sharding import uneven_sizes


class WeightGradient:
    """What becomes of one linear's weight gradient.

    Args:
        weight: the parameter, as the caller knows it; its ``main_grad`` is added to.
        fuse: add the gradient to ``weight.main_grad`` in place of returning it.
        activation_buffer: receives the inputs of deferred gradients; None if the caller keeps them itself.
        grad_output_buffer: receives the output gradients of deferred gradients; None defers nothing to it.
        deferral_limit: how many are deferred to the buffers before the rest is computed at once; 0 is no limit.
        delayed: where all gradients wait that the buffers do not take; None lets none wait.
    """

    __slots__ = ("_activation_buffer", "_deferral_limit", "_delayed", "_grad_output_buffer", "fuse", "weight")

    def __init__(
        self,
        weight: Tensor,
        *,
        fuse: bool,
        activation_buffer: list[Tensor] | None = None,
        grad_output_buffer: list[Tensor] | None = None,
        deferral_limit: int = 0,
        delayed: DelayedWeightGradients | None = None,
    ) -> None:
        self.weight = weight
        self.fuse = fuse
        self._activation_buffer = activation_buffer
        self._grad_output_buffer = grad_output_buffer
        self._deferral_limit = deferral_limit
        self._delayed = delayed

    @property
    def may_defer(self) -> bool:
        """Whether some gradients are put off."""
        return self._grad_output_buffer is not None or self._delayed is not None

    def defer(self, input_: Tensor, grad_output: Tensor) -> bool:
        """Put one gradient off; False if it must be computed now.

        Input and output gradient enter the buffers together, so they match whatever order micro-batches come back in,
        and recomputation does not enter an input twice.
        """
        buffer = self._grad_output_buffer
        if buffer is None or (self._deferral_limit and len(buffer) >= self._deferral_limit):
            if self._delayed is None:
                return False
            self._delayed.add(self.weight, input_, grad_output)
            return True
        buffer.append(grad_output)
        if self._activation_buffer is not None:
            self._activation_buffer.append(input_)
        return True

    def placeholder(self) -> Tensor | None:
        """What autograd is given in place of a gradient that it need not keep (``kernels.main_grad``)."""
        return placeholder(self.weight)


class DelayedWeightGradients:
    """One linear's weight gradients that wait for a step of their own (``config.delay_wgrad_compute``).

    Args:
        fuse: add them to ``weight.main_grad`` in place of ``weight.grad``.
        gather_group: the ranks that share the sequence of the inputs; None if each input is whole.
    """

    __slots__ = ("_fuse", "_gather_group", "_waiting")

    def __init__(self, *, fuse: bool, gather_group: ProcessGroup | None) -> None:
        self._fuse = fuse
        self._gather_group = gather_group
        self._waiting: list[tuple[Tensor, Tensor, Tensor]] = []

    def __deepcopy__(self, memo: dict[int, object]) -> DelayedWeightGradients:
        """For the copy of a linear, whose gradients are its own: nothing waits."""
        return DelayedWeightGradients(fuse=self._fuse, gather_group=self._gather_group)

    def add(self, weight: Tensor, input_: Tensor, grad_output: Tensor) -> None:
        """Keep what ``weight``'s gradient is computed from: ``[s, b, i]`` (or its shard) and ``[s, b, o]``."""
        self._waiting.append((weight, input_, grad_output))

    def take(self) -> Callable[[], None]:
        """A function that computes what waits at this moment; here it no longer does."""
        taken, self._waiting = self._waiting, []
        return lambda: self._compute(taken)

    @torch.no_grad()
    def _compute(self, taken: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        while taken:
            weight, input_, grad_output = taken.pop(0)
            if self._gather_group is not None:
                sizes = uneven_sizes(grad_output.size(0), self._gather_group.size())
                input_ = all_gather(input_, group=self._gather_group, dim=0, sizes=sizes)
            _accumulate_(weight, grad_output.flatten(0, -2), input_.flatten(0, -2), fuse=self._fuse)


@torch.no_grad()
def _accumulate_(weight: Tensor, grad_output: Tensor, input_: Tensor, *, fuse: bool) -> None:
    """Add ``grad_output.T @ input_`` to ``weight.main_grad`` or, without ``fuse``, to ``weight.grad``."""
    if fuse:
        accumulate_main_grad_(weight, grad_output, input_)
        return
    gradient = grad_output.t().mm(input_).to(weight.dtype)
    weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)


@torch.no_grad()
def accumulate_main_grad_(weight: Tensor, grad_output: Tensor, input_: Tensor) -> None:
    """``weight.main_grad += grad_output.T @ input_``.

    Where ``main_grad`` is wider than the factors, products and sums are in its dtype too, so that summing many
    micro-batches loses nothing to the parameter's rounding; the factors are widened a bounded number of tokens at a
    time.

    Args:
        weight: a parameter with ``main_grad``, which is overwritten.
        grad_output: ``[n, o]``.
        input_: ``[n, i]``.

    Raises:
        ConfigError: ``weight`` has no ``main_grad``.
    """
    add_product_(main_grad_of(weight), grad_output, input_)


@torch.no_grad()
def drain_embedding_wgrad_compute(
    config: ModelParallelConfig,
    embedding_activation_buffer: list[Tensor],
    grad_output_buffer: list[Tensor],
    weight: Tensor,
    tp_group: ProcessGroup | None = None,
) -> None:
    """Compute the weight gradients that an output layer put off, and empty its buffers.

    With sequence parallelism each input is gathered while the gradient before it is computed.

    Args:
        config: says whether inputs are shards of the sequence (``sequence_parallel``) and where the gradient goes: into
            ``weight.main_grad`` with ``gradient_accumulation_fusion``, else into ``weight.grad``.
        embedding_activation_buffer: the inputs, ``[s, b, i]`` or ``[s/t, b, i]``; emptied.
        grad_output_buffer: the output gradients, ``[s, b, o/t]``, in the same order; emptied.
        weight: the output layer's weight.
        tp_group: tensor-parallel group; the ambient one if None. Not looked at without sequence parallelism.

    Raises:
        ShardingError: the buffers are not of the same length.
        ConfigError: ``weight.main_grad`` is needed and missing.
        TopologyError: a group is needed, and neither given nor initialised.
    """
    if len(embedding_activation_buffer) != len(grad_output_buffer):
        raise AssertedShardingError(
            f"{len(embedding_activation_buffer)} inputs and {len(grad_output_buffer)} output gradients were kept; they "
            "must be as many"
        )
    if not grad_output_buffer:
        return
    group = resolve_tensor_model_parallel_group(tp_group) if config.sequence_parallel else None

    def next_input() -> Pending | Tensor | None:
        if not embedding_activation_buffer:
            return None
        input_ = embedding_activation_buffer.pop(0)
        if group is None or group.size() == 1:
            return input_
        sizes = uneven_sizes(grad_output_buffer[0].size(0), group.size())
        return all_gather_async(input_, group=group, dim=0, sizes=sizes)

    following = next_input()
    while following is not None:
        input_ = following.wait() if isinstance(following, Pending) else following
        grad_output = grad_output_buffer.pop(0)
        following = next_input()
        grad_output, input_ = grad_output.flatten(0, -2), input_.flatten(0, -2)
        _accumulate_(weight, grad_output, input_, fuse=config.gradient_accumulation_fusion)
