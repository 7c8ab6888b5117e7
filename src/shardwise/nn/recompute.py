"""Recomputation: drop the tensors that a function saves for its backward, and compute them again in the backward.

Built on PyTorch's non-reentrant checkpoint, so that ``torch.autograd.grad``, keyword arguments, nesting and outputs of
any kind work. This file adds two things: the recomputation restores the random streams, and layers can query the
current phase (``is_checkpointing``, ``is_recomputing``).

Recomputation stops as soon as all saved tensors exist again. A layer that ends with a collective therefore runs it in a
second autograd function, after the one that saves tensors, so that the recomputation never reaches it. The tensors that
a layer saves must have the same shapes in both phases.

Source: Chen et al. 2016 (arXiv:1604.06174); Korthikanti et al. 2022 (arXiv:2205.05198), section 5.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shardwise.core.errors import ConfigError, ContradictionError
from shardwise.core.random import RandomState, streams
from shardwise.core.typed import computed_locally


class _Phases(threading.local):
    """For each checkpointed function that the thread is in, outermost first, whether it is being recomputed."""

    def __init__(self) -> None:
        self.recomputing: list[bool] = []


_PHASES = _Phases()


def is_checkpointing() -> bool:
    """Return whether the thread's innermost checkpointed function is in its first forward; False when compiling."""
    return is_kept_briefly() and not _PHASES.recomputing[-1]


def is_recomputing() -> bool:
    """Return whether the thread's innermost checkpointed function is being recomputed; False when compiling."""
    return is_kept_briefly() and _PHASES.recomputing[-1]


def is_kept_briefly() -> bool:
    """Return whether either is True: tensors saved now are dropped and saved again later, or used immediately."""
    # Under torch.compile the compiler decides what to recompute. A constant avoids a graph break.
    return not torch.compiler.is_compiling() and bool(_PHASES.recomputing)


def in_backward() -> bool:
    """Return whether a backward runs, which recomputes."""
    return torch._C._current_graph_task_id() != -1


class _Recomputation(AbstractContextManager[None]):
    """Context that restores the random state of the first forward. Entered once for each backward."""

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


class _View(NamedTuple):
    """A view of a tensor that is made again."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _MadeAgain:
    def __init__(self, storage: int, again: Callable[[], Tensor]) -> None:
        self._storage, self._again = storage, again
        self._saved = self._left = 0
        self._made: Tensor | None = None

    def pack(self, tensor: Tensor) -> Tensor | _View:
        if tensor.untyped_storage()._cdata != self._storage:
            return tensor
        self._saved += 1
        return _View(tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, saved: Tensor | _View) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if self._made is None:
            self._made, self._left = self._again(), self._saved
        made, self._left = self._made, self._left - 1
        if self._left == 0:
            self._made = None
        return made.as_strided(saved.size, saved.stride, saved.offset)


def made_again(tensor: Tensor, again: Callable[[], Tensor]) -> AbstractContextManager[Any]:
    """Return a context in which a contiguous tensor is not saved for the backward, which makes it again, once.

    Unlike ``recomputed``, what is computed from the tensor is not computed again.

    Args:
        tensor: the tensor; operations inside the context may save itself or views.
        again: makes it again, without gradient.
    """
    # No object here refers to itself, so that nothing waits for Python's garbage collector.
    made = _MadeAgain(tensor.untyped_storage()._cdata, again)
    return torch.autograd.graph.saved_tensors_hooks(made.pack, made.unpack)


class _FirstForward(AbstractContextManager[None]):
    def __enter__(self) -> None:
        _PHASES.recomputing.append(False)

    def __exit__(self, *exception: object) -> None:
        _PHASES.recomputing.pop()


def _contexts() -> tuple[_FirstForward, _Recomputation]:
    return _FirstForward(), _Recomputation()


def recomputed(function: Callable[..., Any], *args: Any, early_stop: bool = True, **kwargs: Any) -> Any:
    """Call ``function`` and save only its arguments; call it again when the backward needs its saved tensors.

    The second call draws the same random numbers as the first, from the default generators and every ambient stream.
    Their states are restored after it, even if it raises. Without gradients it is a plain call.

    Args:
        function: function that computes the same in both calls.
        args: positional arguments, tensors or not.
        early_stop: whether to stop the second call as soon as all saved tensors exist again.
        kwargs: keyword arguments.

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
    """Saves a tensor, so that reading the saved tensor of its node starts the recomputation."""

    spmd_typecheck = computed_locally("nothing")

    @staticmethod
    def forward(ctx: Any, nothing: Tensor) -> Tensor:
        ctx.save_for_backward(nothing)
        return nothing.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return grad_output


def keep_arguments(ctx: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call ``function(*args)`` in the forward of an autograd function, and save only the arguments.

    For recomputed functions that are one node of autograd's graph (``go_back``), as in Megatron. ``recomputed`` is not
    one node, and also supports keyword arguments, containers of tensors and ``torch.autograd.grad``.
    """
    first, ctx.again = _contexts()
    ctx.function, ctx.inputs, ctx.outputs = function, None, None
    # Autograd can save only tensors.
    ctx.places = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
    ctx.args = [None if i in ctx.places else arg for i, arg in enumerate(args)]
    tensors = [args[i] for i in ctx.places]
    kinds = dict.fromkeys(("cpu", *(each.device.type for each in tensors)))
    ctx.autocast = [_autocast_of(kind) for kind in kinds if torch.amp.is_autocast_available(kind)]
    ctx.save_for_backward(*tensors)
    with first, torch.no_grad():
        return function(*args)


def _autocast_of(device_type: str) -> Callable[[], torch.autocast]:
    """Return a context with the present settings of autocast, which the backward is called without."""
    return partial(
        torch.autocast,
        device_type,
        dtype=torch.get_autocast_dtype(device_type),
        enabled=torch.is_autocast_enabled(device_type),
        cache_enabled=torch.is_autocast_cache_enabled(),
    )


def run_again(ctx: Any) -> Any:
    """Call the function of ``keep_arguments`` again, with gradients."""
    inputs = list(ctx.args)
    for place, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
        inputs[place] = tensor.detach().requires_grad_(tensor.requires_grad)
    with ExitStack() as stack:
        for autocast in ctx.autocast:
            stack.enter_context(autocast())
        stack.enter_context(ctx.again)
        stack.enter_context(torch.enable_grad())
        outputs = ctx.function(*inputs)
    ctx.inputs, ctx.outputs = inputs, outputs
    return outputs


def go_back(ctx: Any, grad_outputs: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
    """Return the gradients of the arguments of ``keep_arguments``; add those of other leaves to their ``grad``.

    Raises:
        ContradictionError: called within ``torch.autograd.grad``, which must not change ``grad``.
    """
    # PyTorch's own checkpoint makes this check, too.
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
    """The outputs of one checkpointed call, from the end of its forward to the end of its recomputation."""

    def __init__(self, owner: OutputRecomputation) -> None:
        self.storages: list[torch.UntypedStorage] = []
        self.require_grad = False
        # The node in autograd's graph, and a function that runs the recomputation and refills or returns the outputs.
        self.node: Any = None
        self.again: Callable[[], Any] | None = None
        self.first: RandomState | None = None
        self.owner = weakref.ref(owner)

    def hold(self, outputs: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        self.storages = [tensor.untyped_storage() for tensor in tensors]
        self.require_grad = any(tensor.requires_grad for tensor in tensors)

    def share_memory_with(self, tensors: Any) -> bool:
        theirs = {leaf.untyped_storage()._cdata for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor)}
        return any(storage._cdata in theirs for storage in self.storages if storage.nbytes())

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
        # The graph keeps the outputs as long as it needs them. References from here would keep them longer.
        self.storages, self.node, self.again = [], None, None
        owner = self.owner()
        if owner is not None:
            owner._after_recomputation(self)


class OutputRecomputation:
    """Recompute a function *and* free its outputs: the recomputation refills the storages that later operations saved.

    ::

        recomputation = OutputRecomputation()
        hidden = recomputation.run(norm, x)
        y = linear(hidden)
        recomputation.discard_(y)   # hidden's storage is free from here to y's gradient

    An object may be reused once its outputs are discarded. Under ``torch.compile`` no storage is freed here: the
    compiler decides which tensors of the function to keep.
    """

    def __init__(self) -> None:
        self._outputs: _Outputs | None = None

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function(*args)`` and save only its arguments.

        Args:
            function: function that computes the same in both calls, and returns no argument or view of one.
            args: arguments, tensors or not.

        Returns:
            The result of ``function``.

        Raises:
            ConfigError: an output shares its memory with an argument.
        """
        if torch.compiler.is_compiling():
            return recomputed(function, *args)
        held = _Outputs(self)
        # A strong reference would be a cycle: the graph keeps the function, the function ``held``, and ``held`` a node.
        reference = weakref.ref(held)

        def run(*given: Any) -> Any:
            outputs = function(*given)
            # In both calls, because both must save the same tensors.
            node = _Trigger.apply(torch.empty(0, requires_grad=True)).grad_fn
            owner = reference()
            if owner is not None and is_recomputing():
                if owner.storages:
                    owner.refill_(outputs)
            elif owner is not None:
                # Reading the node's saved tensor makes autograd run the function again, which refills the storages.
                owner.node, owner.again = node, node and partial(_run_by_reading, node)
            return outputs

        # No early stop, because the outputs are needed as well as the saved tensors.
        contexts = _contexts()
        held.first = contexts[1].first
        outputs = _recomputed(run, args, contexts, early_stop=False)
        self._store(held, outputs, args)
        return outputs

    def run_in_function(self, ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
        """Like ``run``, but in the forward of an autograd function, whose backward is ``go_back``.

        Raises:
            ConfigError: an output shares its memory with an argument.
        """
        outputs = keep_arguments(ctx, function, args)
        held = _Outputs(self)
        held.node, held.again, held.first = ctx, partial(run_again, ctx), ctx.again.first
        self._store(held, outputs, args)
        # The outputs do not require gradients yet, because autograd sets that after the forward.
        held.require_grad = any(ctx.needs_input_grad)
        return outputs

    def _store(self, held: _Outputs, outputs: Any, args: tuple[Any, ...]) -> None:
        """Store the outputs of a call in ``held``."""
        held.hold(outputs)
        if held.share_memory_with(args):
            raise ConfigError(
                "recomputation: an output shares its memory with an argument, which would be freed with it; "
                "return a clone"
            )
        self._outputs = held

    def _after_recomputation(self, held: _Outputs) -> None:
        """Hook for subclasses, called after the outputs of ``held`` were recomputed."""

    def discard_(self, hook_tensor: Tensor) -> None:
        """Free the outputs' storages, and recompute the outputs when the gradient of ``hook_tensor`` is computed.

        Args:
            hook_tensor: a tensor computed from the outputs. The backward must compute its gradient before it uses any
                saved output, and the forward must not use the outputs after this call.

        Raises:
            ConfigError: there are no outputs, or they were discarded already; ``hook_tensor`` shares its memory with an
                output; ``hook_tensor`` requires no gradient but an output does, or it requires one but the function ran
                without gradients. Nothing is freed in these cases.
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
            # An outer function is being recomputed, and the backward uses the outputs next.
            return
        held.discard_()
        # An outer checkpointed function saves nothing in its first forward, and its recomputation makes new outputs.
        if hook_tensor.requires_grad and not is_checkpointing():
            hook_tensor.register_hook(held.recompute)
