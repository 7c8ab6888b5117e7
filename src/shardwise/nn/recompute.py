"""Recomputation: what a function would keep for its backward is dropped, and computed again when backward needs it.

Built on PyTorch's non-reentrant checkpoint, so that ``torch.autograd.grad``, keyword arguments, nesting and outputs of
any kind work. What is ours: the random streams are part of the state that the recomputation starts from, and layers can
ask where they are (``is_checkpointing``, ``is_recomputing``).

Recomputation ends as soon as all that was saved is there again. A layer whose last act is a collective therefore does
it in a second autograd function, after the one that saves: then the recomputation never gets to it. What a layer
saves must be of the same shapes in both phases.

Source: Chen et al. 2016 (arXiv:1604.06174); Korthikanti et al. 2022 (arXiv:2205.05198), section 5.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shardwise.core.errors import ConfigError, ContradictionError
from shardwise.core.random import RandomState, streams


class _Phases(threading.local):
    """For each checkpointed function that a thread is inside of, outermost first: whether it is being recomputed."""

    def __init__(self) -> None:
        self.recomputing: list[bool] = []


_PHASES = _Phases()


def is_checkpointing() -> bool:
    """True inside the first forward of the thread's innermost checkpointed function; False under ``torch.compile``."""
    return is_kept_briefly() and not _PHASES.recomputing[-1]


def is_recomputing() -> bool:
    """True inside the recomputation of the thread's innermost checkpointed function; False under ``torch.compile``."""
    return is_kept_briefly() and _PHASES.recomputing[-1]


def is_kept_briefly() -> bool:
    """True inside either: tensors saved now are dropped and saved again before the backward, or used at once."""
    # Under torch.compile the compiler decides what is computed twice; a constant keeps the graph whole.
    return not torch.compiler.is_compiling() and bool(_PHASES.recomputing)


class _Recomputation(AbstractContextManager[None]):
    """The random state of the first forward, for as long as the block lasts. Entered once for each backward."""

    def __init__(self) -> None:
        self._streams = streams()
        self.first = self._streams.snapshot()
        self._outside: list[RandomState] = []

    def __enter__(self) -> None:
        self._outside.append(self._streams.snapshot())
        self._streams.restore(self.first)
        _PHASES.recomputing.append(True)

    def __exit__(self, *exception: object) -> None:
        _PHASES.recomputing.pop()
        self._streams.restore(self._outside.pop())


class _FirstForward(AbstractContextManager[None]):
    def __enter__(self) -> None:
        _PHASES.recomputing.append(False)

    def __exit__(self, *exception: object) -> None:
        _PHASES.recomputing.pop()


def _contexts() -> tuple[_FirstForward, _Recomputation]:
    return _FirstForward(), _Recomputation()


def recomputed(function: Callable[..., Any], *args: Any, early_stop: bool = True, **kwargs: Any) -> Any:
    """Call ``function`` now and keep its arguments only; call it again when backward wants what it would have saved.

    The second call draws the random numbers of the first, from the default generators and from every ambient stream;
    afterwards they are as they were before it, whether it ends or raises. Without gradients it is a plain call.

    Args:
        function: must compute the same both times.
        args: its positional arguments, tensors or not.
        early_stop: end the second call as soon as all that was saved is there again.
        kwargs: its keyword arguments.

    Returns:
        The result of ``function``.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    call = partial(function, **kwargs) if kwargs else function
    if torch.compiler.is_compiling():
        return torch.utils.checkpoint.checkpoint(call, *args, use_reentrant=False)
    return _recomputed(call, args, _contexts(), early_stop)


def _recomputed(
    call: Callable[..., Any], args: tuple[Any, ...], contexts: tuple[_FirstForward, _Recomputation], early_stop: bool
) -> Any:
    if not torch.is_grad_enabled():
        return call(*args)
    return torch.utils.checkpoint.checkpoint(
        call, *args, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: contexts, early_stop=early_stop
    )


class _Trigger(torch.autograd.Function):
    """Saves something, so that asking its node for it starts the recomputation."""

    @staticmethod
    def forward(ctx: Any, nothing: Tensor) -> Tensor:
        ctx.save_for_backward(nothing)
        return nothing.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return grad_output


def keep_arguments(ctx: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """``function(*args)`` in the forward of an autograd function, which keeps no more than the arguments.

    For functions that are one node of autograd's graph (``go_back``), as those of programs are; ``recomputed`` is not,
    and takes keywords, containers of tensors and ``torch.autograd.grad`` too.
    """
    first, ctx.again = _contexts()
    ctx.function, ctx.inputs, ctx.outputs = function, None, None
    # Autograd saves tensors alone.
    ctx.places = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
    ctx.args = [None if i in ctx.places else arg for i, arg in enumerate(args)]
    ctx.save_for_backward(*(args[i] for i in ctx.places))
    with first, torch.no_grad():
        return function(*args)


def run_again(ctx: Any) -> Any:
    """Call the function of ``keep_arguments`` again, with gradients."""
    inputs = list(ctx.args)
    for place, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
        inputs[place] = tensor.detach().requires_grad_(tensor.requires_grad)
    with ctx.again, torch.enable_grad():
        outputs = ctx.function(*inputs)
    ctx.inputs, ctx.outputs = inputs, outputs
    return outputs


def go_back(ctx: Any, grad_outputs: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
    """The gradients of the arguments of ``keep_arguments``; those of other leaves are added to their ``grad``.

    Raises:
        ContradictionError: inside ``torch.autograd.grad``, which does not want that.
    """
    # PyTorch's own checkpoint asks this too.
    if not torch.autograd._is_checkpoint_valid():
        raise ContradictionError(
            "a backward that recomputes a function as one node adds to .grad, which torch.autograd.grad() and "
            "backward(inputs=...) exclude; use backward(), or tensor_parallel.checkpoint()"
        )
    if ctx.outputs is None:
        run_again(ctx)
    inputs, outputs, ctx.inputs, ctx.outputs = ctx.inputs, ctx.outputs, None, None
    pairs = zip((outputs,) if isinstance(outputs, Tensor) else outputs, grad_outputs, strict=True)
    wanted = [(tensor, grad) for tensor, grad in pairs if isinstance(tensor, Tensor) and tensor.requires_grad]
    if wanted:
        torch.autograd.backward([tensor for tensor, _ in wanted], [grad for _, grad in wanted])
    return tuple(each.grad if isinstance(each, Tensor) else None for each in inputs)


def _run_by_reading(node: Any) -> None:
    node.saved_tensors  # noqa: B018 (reading is what starts it)


class _Outputs:
    """The outputs of one checkpointed call, from when they are there until they are there again."""

    def __init__(self, owner: OutputRecomputation) -> None:
        self.storages: list[torch.UntypedStorage] = []
        self.require_grad = False
        # The node in autograd's graph, and what makes it run the function again: either refills or returns the outputs.
        self.node: Any = None
        self.again: Callable[[], Any] | None = None
        self.first: RandomState | None = None
        self.owner = weakref.ref(owner)

    def hold(self, outputs: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        self.storages = [tensor.untyped_storage() for tensor in tensors]
        self.require_grad = any(tensor.requires_grad for tensor in tensors)

    def share_memory_with(self, tensors: Any) -> bool:
        theirs = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor)}
        return any(storage.data_ptr() in theirs for storage in self.storages if storage.nbytes())

    def discard_(self) -> None:
        for storage in self.storages:
            storage.resize_(0)

    def refill_(self, outputs: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        for storage, tensor in zip(self.storages, tensors, strict=True):
            again = tensor.untyped_storage()
            if storage.nbytes() == 0 and again.nbytes():
                storage.resize_(again.nbytes())
                storage.copy_(again)

    def recompute(self, _: Tensor) -> None:
        if self.again is None:
            return
        outputs = self.again()
        if outputs is not None:
            with torch.no_grad():
                self.refill_(outputs)
        # They stay filled as long as the graph wants them; holding on here would keep them as long as its last result.
        self.storages, self.node, self.again = [], None, None
        owner = self.owner()
        if owner is not None:
            owner._end(self)


class OutputRecomputation:
    """Recompute a function *and* free its outputs: what the next operations saved of them is recomputed in place.

    ::

        recomputation = OutputRecomputation()
        hidden = recomputation.run(norm, x)
        y = linear(hidden)
        recomputation.discard_(y)   # hidden's storage is free from here to y's gradient

    An object may be used again once its outputs are discarded. Under ``torch.compile`` no storage is freed here: the
    compiler decides what is kept of a function that may be recomputed.
    """

    def __init__(self) -> None:
        self._outputs: _Outputs | None = None

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function(*args)`` and keep its arguments only.

        Args:
            function: must compute the same both times, and return no argument or part of one.
            args: its arguments, tensors or not.

        Returns:
            The result of ``function``.

        Raises:
            ConfigError: an output shares its memory with an argument.
        """
        if torch.compiler.is_compiling():
            return recomputed(function, *args)
        held = _Outputs(self)
        # Weak, or the graph would keep the function, the function the outputs, and they their node in the graph.
        reference = weakref.ref(held)

        def run(*given: Any) -> Any:
            outputs = function(*given)
            # Both times, since both calls must save the same.
            node = _Trigger.apply(torch.empty(0, requires_grad=True)).grad_fn
            owner = reference()
            if owner is not None and is_recomputing():
                if owner.storages:
                    owner.refill_(outputs)
            elif owner is not None:
                # Reading what the node saved makes autograd run the function again, which refills the storages.
                owner.node, owner.again = node, node and partial(_run_by_reading, node)
            return outputs

        # Not stopped early: the outputs are wanted as well as what was saved.
        contexts = _contexts()
        held.first = contexts[1].first
        outputs = _recomputed(run, args, contexts, early_stop=False)
        self._begin(held, outputs, args)
        return outputs

    def run_in_function(self, ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
        """``run`` in the forward of an autograd function, whose backward is ``go_back``.

        Raises:
            ConfigError: an output shares its memory with an argument.
        """
        outputs = keep_arguments(ctx, function, args)
        held = _Outputs(self)
        held.node, held.again, held.first = ctx, partial(run_again, ctx), ctx.again.first
        self._begin(held, outputs, args)
        # Autograd has not seen them yet.
        held.require_grad = any(ctx.needs_input_grad)
        return outputs

    def _begin(self, held: _Outputs, outputs: Any, args: tuple[Any, ...]) -> None:
        """A call has ended; ``held`` has its outputs."""
        held.hold(outputs)
        if held.share_memory_with(args):
            raise ConfigError(
                "recomputation: an output shares its memory with an argument, which would be freed with it; "
                "return a clone"
            )
        self._outputs = held

    def _end(self, held: _Outputs) -> None:
        """The outputs of ``held`` are there again."""

    def discard_(self, hook_tensor: Tensor) -> None:
        """Free the outputs' storages until the gradient of ``hook_tensor`` is computed, which recomputes them.

        Args:
            hook_tensor: a result of the outputs, whose gradient is computed before anything saved of them is used. From
                here on the forward must not use the outputs any more.

        Raises:
            ConfigError: there is nothing to discard, or it was discarded already; ``hook_tensor`` has no gradient but
                the outputs have one, or shares its memory with an output; it has one, but the function ran without
                gradients. Nothing is freed then.
        """
        if torch.compiler.is_compiling():
            return
        held = self._outputs
        if held is None:
            raise ConfigError("no outputs of a recomputed function to discard; call it first, and discard only once")
        if held.share_memory_with(hook_tensor):
            raise ConfigError("hook_tensor shares its memory with an output; pass its result")
        if held.require_grad and not hook_tensor.requires_grad:
            raise ConfigError(
                f"hook_tensor of shape {list(hook_tensor.shape)} requires no gradient, so "
                "that nothing would recompute the outputs; pass a result of theirs, computed with gradients"
            )
        if hook_tensor.requires_grad and held.again is None:
            raise ConfigError(
                "hook_tensor requires a gradient, but the function ran under no_grad and kept "
                "nothing to recompute the outputs from; run both with gradients or both without"
            )
        self._outputs = None
        if is_recomputing():
            # An outer function is being recomputed, and backward is about to use the outputs.
            return
        held.discard_()
        # Inside an outer checkpointed function nothing is saved of them now; its recomputation makes new ones.
        if hook_tensor.requires_grad and not is_checkpointing():
            hook_tensor.register_hook(held.recompute)
