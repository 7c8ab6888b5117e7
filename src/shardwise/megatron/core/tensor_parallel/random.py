"""Megatron's random streams and recomputation, based on ``shardwise.core.random`` and ``shardwise.nn.recompute``.

Names contain "cuda", but mean the program's computing device. ``checkpoint`` recomputes the tensors that a function
saved for the backward. ``CheckpointWithoutOutput`` also recomputes the outputs, which the next operation would save.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from shardwise.core import random as engine
from shardwise.core.communication.context import default_device
from shardwise.core.errors import ConfigError
from shardwise.megatron.absent import absent_names
from shardwise.megatron.core import parallel_state
from shardwise.megatron.core.tensor_parallel.attributes import HAVE_TE  # noqa: F401
from shardwise.megatron.core.tensor_parallel.utils import gather_split_1d_tensor, split_tensor_into_1d_equal_chunks
from shardwise.megatron.errors import AssertedConfigError
from shardwise.megatron.surface import offer
from shardwise.nn import recompute

is_checkpointing = recompute.is_checkpointing
CudaRNGStatesTracker = engine.RandomStreams

# Programs import these despite the underscore.
_MODEL_PARALLEL_RNG_TRACKER_NAME = engine.TENSOR_PARALLEL_STREAM
_EXPERT_PARALLEL_RNG_TRACKER_NAME = engine.EXPERT_PARALLEL_STREAM
_DATA_PARALLEL_RNG_TRACKER_NAME = engine.DATA_PARALLEL_STREAM


def initialize_rng_tracker(
    use_te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    force_reset: bool = False,
) -> None:
    """Choose the kind of the ambient random streams; later calls have no effect unless forced.

    Args:
        use_te_rng_tracker: no effect but a warning, because Transformer Engine's streams are not used.
        inference_rng_tracker: whether streams do nothing, for programs that draw no random numbers.
        use_cudagraphable_rng: see ``CudaRNGStatesTracker``.
        force_reset: whether to discard the ambient streams and choose again.
    """
    if use_te_rng_tracker:
        warnings.warn("use_te_rng_tracker=True is ignored; this library's own random streams are used", stacklevel=2)
    engine.choose_streams(
        use_cudagraphable_rng=use_cudagraphable_rng,
        is_inference_rng_tracker=inference_rng_tracker,
        force_reset=force_reset,
    )


def get_cuda_rng_tracker(
    use_te_rng_tracker: bool = False, inference_rng_tracker: bool = False, use_cudagraphable_rng: bool = False
) -> engine.RandomStreams:
    """Return the ambient random streams, after ``initialize_rng_tracker`` with the same arguments."""
    initialize_rng_tracker(use_te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng)
    return engine.streams()


def _get_cuda_rng_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> Any:
    """Return the state of the default generator of ``device``, or of the CPU if CUDA is not in use.

    Args:
        device: the GPU.
        clone: whether to return a new generator in that state, with ``graph_safe``.
        graph_safe: whether to return a ``torch.Generator`` instead of a tensor.
    """
    state = engine.default_state(device, graphable=graph_safe)
    return state.clone_state() if graph_safe and clone and state.device.type == "cuda" else state


def _set_cuda_rng_state(new_state: Tensor | torch.Generator, device: Any = -1, graph_safe: bool = False) -> None:
    """Set the default generator of the device of ``new_state``.

    Args:
        new_state: state from ``_get_cuda_rng_state``.
        device: the GPU; -1 means the current one.
        graph_safe: no effect, because the type of ``new_state`` tells.

    Raises:
        ConfigError: ``new_state`` is neither a tensor nor a generator.
    """
    engine.set_default_state(new_state, "cuda" if device == -1 else device)


def _get_all_rng_states() -> tuple[Tensor, Any, dict[str, Any]]:
    """Return the states of the default generators of the CPU and the computing device, and of each ambient stream."""
    tracker = engine.streams()
    return torch.get_rng_state(), engine.default_state(graphable=tracker.use_cudagraphable_rng), tracker.get_states()


def _set_all_rng_states(cpu_rng_state: Tensor, cuda_rng_state: Any, cuda_rng_state_tracker: dict[str, Any]) -> None:
    """Restore states from ``_get_all_rng_states``; raise ConfigError if a stream is in use."""
    engine.streams().set_states(cuda_rng_state_tracker)
    engine.set_default_state(cuda_rng_state)
    torch.set_rng_state(cpu_rng_state)


@contextmanager
def _fork_rng() -> Iterator[None]:
    """Restore the streams and the generators after the block."""
    state = engine.streams().snapshot()
    try:
        yield
    finally:
        engine.streams().restore(state)


_absent = absent_names("tensor_parallel.random")


def __getattr__(name: str) -> Any:
    # A global of Megatron, which tests written for Megatron read.
    if name == "_CUDA_RNG_STATE_TRACKER":
        return engine.streams()
    return _absent(name)


def get_all_rng_states() -> dict[str, Any]:
    """Return the state of each ambient stream; see ``CudaRNGStatesTracker.get_states``.

    Raises:
        AssertedConfigError: there are no streams and no kind of streams was chosen.
    """
    if not engine.streams_are_chosen():
        raise AssertedConfigError(
            "there are no random streams yet; call model_parallel_cuda_manual_seed() or initialize_rng_tracker() first"
        )
    return engine.streams().get_states()


def convert_cuda_rng_state(state: Tensor | torch.Generator, to_graphable: bool = False) -> Tensor | torch.Generator:
    """Convert the state of a stream to a tensor, or to a generator if ``to_graphable``; ``set_states`` takes either.

    Raises:
        ConfigError: ``state`` is neither a tensor nor a generator.
    """
    if isinstance(state, torch.Generator):
        return state if to_graphable else state.get_state()
    if not isinstance(state, Tensor):
        raise ConfigError(f"the state of a random stream is a tensor or a torch.Generator, not {type(state).__name__}")
    return engine.generator_in(state) if to_graphable else state


def is_graph_safe_cuda_rng_tracker(cuda_rng_tracker: object) -> bool:
    """True if the states of these streams are generators, which programs that capture CUDA graphs need."""
    return bool(getattr(cuda_rng_tracker, "use_cudagraphable_rng", False))


def get_expert_parallel_rng_tracker_name() -> str:
    """Name of the stream for a rank's shard of its experts."""
    return engine.EXPERT_PARALLEL_STREAM


def get_data_parallel_rng_tracker_name() -> str:
    """Name of the stream that is the same on every rank of a tensor-parallel group."""
    return engine.DATA_PARALLEL_STREAM


_default_rng: engine.Rule = "per_rank"


def set_default_rng(rng: engine.Rule) -> None:
    """Set the default ``rng`` of ``model_parallel_cuda_manual_seed``, as ``shardwise.megatron.install`` does.

    Raises:
        ConfigError: ``rng`` is neither "global" nor "per_rank".
    """
    global _default_rng
    if rng not in ("per_rank", "global"):
        raise ConfigError(f"rng is {rng!r}; it must be 'per_rank' or 'global'")
    _default_rng = rng


def model_parallel_cuda_manual_seed(
    seed: int,
    te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    tp_rank: int | None = None,
    ep_rank: int | None = None,
    etp_rank: int | None = None,
    force_reset_rng: bool = False,
    *,
    rng: engine.Rule | None = None,
) -> None:
    """Recreate the random streams from ``seed``, and seed the default generator of the computing device.

    The seeds are ``seed`` for the data-parallel stream, ``seed + 2718 + tp_rank`` for the tensor-parallel stream, and
    ``seed + 1024 + 100 * ep_rank + etp_rank`` for the expert stream. If the last sum equals a tensor-parallel seed of
    another rank, the two streams still draw different numbers. The GPU's default generator gets ``seed``, now or when
    the program first uses CUDA. If the program computes on the CPU, so does the CPU's generator: ranks then start with
    the same parameters and shuffle alike, as on GPUs. Otherwise the CPU's generator is unchanged. Inside ``fork`` the
    rest of the block draws from the new stream of its name (in Megatron from the default generator, whose state, the
    same on every rank, then becomes the stream's).

    Args:
        seed: seed, the same on every rank.
        te_rng_tracker: see ``initialize_rng_tracker``, also for the next two.
        inference_rng_tracker: whether to make no streams.
        use_cudagraphable_rng: see ``CudaRNGStatesTracker``.
        tp_rank: rank in the tensor-parallel group; None means the ambient one.
        ep_rank: rank in the expert-parallel group; None means the ambient one, or 0 without a topology.
        etp_rank: rank in the expert-tensor group; None means the ambient one, or ``tp_rank`` without a topology.
        force_reset_rng: whether to choose the kind of streams again.
        rng: "global" draws the dropout masks of sharded tensors as slices of one mask, which is the same at every
            tensor-parallel size (``shardwise.nn.dropout``); "per_rank" draws each shard's mask from the rank's own
            stream; None means "per_rank", or the value of ``set_default_rng``.

    Raises:
        TopologyError: ``tp_rank`` is not given and no topology is initialised.
        ConfigError: ``rng`` has another value.
    """
    if tp_rank is None:
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
    if parallel_state.model_parallel_is_initialized():
        ep_rank = parallel_state.get_expert_model_parallel_rank() if ep_rank is None else ep_rank
        etp_rank = parallel_state.get_expert_tensor_parallel_rank() if etp_rank is None else etp_rank
    with engine.streams().outside():
        initialize_rng_tracker(te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng, force_reset_rng)
        rng = _default_rng if rng is None else rng
        engine.seed_streams(seed, tp_rank, ep_rank=ep_rank or 0, etp_rank=etp_rank, rng=rng)
        torch.cuda.manual_seed(seed)
        if _computes_on_the_cpu():
            # torch.manual_seed would initialize devices that the program may not use.
            torch.default_generator.manual_seed(seed)


def _computes_on_the_cpu() -> bool:
    """True if the machine has no accelerator, or the ambient groups use the CPU."""
    if not (torch.cuda.is_available() or torch.accelerator.is_available()):
        return True
    group = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
    return group is not None and default_device(group).type == "cpu"


class _Distribution:
    """Converts the first tensor of arguments between the whole and this rank's chunk, without a reference to it."""

    def __init__(self, args: tuple[Any, ...], tp_group: ProcessGroup | None) -> None:
        index = next((i for i, arg in enumerate(args) if isinstance(arg, Tensor)), None)
        if index is None:
            raise ConfigError("distribute_saved_activations=True needs a tensor among the positional arguments")
        tensor = args[index]
        if tensor._is_view():
            raise ConfigError(
                f"checkpoint(distribute_saved_activations=True): the first tensor, of shape {list(tensor.shape)}, is a "
                "view, so that splitting it frees nothing; pass a copy, such as x.clone()"
            )
        self.index, self.group = index, parallel_state.resolve_tensor_model_parallel_group(tp_group)
        self.shape, self.stride, self.numel = tensor.shape, tensor.stride(), tensor.numel()
        # If splitting saves nothing (one rank, one element), each rank keeps the whole tensor, flattened.
        self.is_split = -(-self.numel // self.group.size()) < self.numel

    def of_whole(self, function: Callable[..., Any], *, restores: bool) -> Callable[..., Any]:
        """Wrap ``function`` to get the whole tensor; with ``restores``, its backward restores the caller's tensor."""

        def run(*args: Any, **kwargs: Any) -> Any:
            first = args[self.index]
            self.restore_(first)
            # An alias, so that a returned argument is not split.
            restored = restores and first.requires_grad
            first = _RestoreInBackward.apply(first, self) if restored else first.view_as(first)
            return function(*args[: self.index], first, *args[self.index + 1 :], **kwargs)

        return run

    def split_(self, tensor: Tensor) -> None:
        data = tensor.data
        if self.is_split:
            data = split_tensor_into_1d_equal_chunks(data, new_buffer=True, tp_group=self.group)
        tensor.data = data.reshape(-1)

    def restore_(self, tensor: Tensor) -> None:
        """Make the tensor whole if it is this rank's chunk."""
        if tensor.shape == self.shape:
            return
        flat = tensor.data
        if tensor.numel() < self.numel:
            flat = gather_split_1d_tensor(flat, self.group, numel=self.numel)
        whole = flat.view(self.shape)
        if whole.stride() != self.stride:
            # Bit-equal results need the strides of the first forward.
            whole = torch.empty_strided(self.shape, self.stride, dtype=flat.dtype, device=flat.device).copy_(whole)
        tensor.data = whole


class _RestoreInBackward(Function):
    """Identity whose backward restores the caller's whole tensor."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, distribution: _Distribution) -> Tensor:
        ctx.tensor = input_
        ctx.distribution = distribution
        return input_.view_as(input_)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        # Restore once, then drop the reference, because the node lives as long as the function's output.
        tensor, ctx.tensor = ctx.tensor, None
        if tensor is not None:
            ctx.distribution.restore_(tensor)
        return grad_output, None


def checkpoint(
    function: Callable[..., Any],
    distribute_saved_activations: bool | None,
    *args: Any,
    tp_group: ProcessGroup | None = None,
    **kwargs: Any,
) -> Any:
    """Call ``function``, keep only its arguments, and call it again in backward.

    Arguments and outputs can be of any type, and ``torch.autograd.grad`` works. The recomputation draws the same random
    numbers as the first call; the random states are restored even if it raises.

    Args:
        function: function that computes the same both times.
        distribute_saved_activations: whether to keep only this rank's part of the first tensor in ``args``. **The
            caller's tensor is modified**: it becomes the flat chunk, and its full storage is freed. The backward
            gathers it (one all-gather of its size) and leaves it whole. The tensor must be the same on every rank.
        args: positional arguments of ``function``.
        tp_group: tensor-parallel group, for ``distribute_saved_activations``; the ambient one if None.
        kwargs: keyword arguments of ``function``.

    Returns:
        The result of ``function``.

    Raises:
        ConfigError: ``distribute_saved_activations`` without a tensor in ``args``, with a view as the first tensor, or
            under ``torch.compile``.
        TopologyError: ``distribute_saved_activations``, but no group is given and none is initialised.
    """
    if not distribute_saved_activations:
        return recompute.recomputed(function, *args, **kwargs)
    if torch.compiler.is_compiling():
        raise ConfigError("distribute_saved_activations=True cannot be compiled; pass False under torch.compile")
    distribution = _Distribution(args, tp_group)
    # Inside an outer checkpointed function, this tensor is dropped and recomputed as a new one.
    run = distribution.of_whole(function, restores=not recompute.is_checkpointing())
    outputs = recompute.recomputed(run, *args, **kwargs)
    distribution.split_(args[distribution.index])
    return outputs


class CheckpointFunction(Function):
    """Megatron's autograd function: ``checkpoint`` as one node, without support for ``torch.autograd.grad``.

    ``run_function`` returns a tensor or a tuple; gradients flow to tensors among its arguments.
    """

    @staticmethod
    def forward(
        ctx: Any, run_function: Callable[..., Any], distribute_saved_activations: bool | None, *args: Any
    ) -> Any:
        ctx.distribution = None
        if not distribute_saved_activations:
            return recompute.keep_arguments(ctx, run_function, args)
        ctx.distribution = _Distribution(args, None)
        outputs = recompute.keep_arguments(ctx, ctx.distribution.of_whole(run_function, restores=False), args)
        ctx.distribution.split_(args[ctx.distribution.index])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        if ctx.distribution is not None:
            ctx.distribution.restore_(ctx.saved_tensors[0])
        return None, None, *recompute.go_back(ctx, grad_outputs)


class CheckpointWithoutOutput(recompute.OutputRecomputation):
    """``OutputRecomputation`` under Megatron's name.

    ::

        checkpoint = CheckpointWithoutOutput()
        hidden = checkpoint.checkpoint(norm, x)
        y = linear(hidden)
        checkpoint.discard_output_and_register_recompute(y)   # hidden's storage is free from here to y's gradient

    Args:
        fp8: not offered.

    Attributes:
        ctx: node of the call in autograd's graph, from the call until its outputs are recomputed; otherwise None.
        outputs: outputs of the call as a tuple, for the same time.
        run_function: function of the call, for the same time.
        rng_states: random states at the start of the call and of its repetition, as in ``_get_all_rng_states``, for the
            same time; read-only.
        fwd_cpu_rng_state, fwd_cuda_rng_state, fwd_cuda_rng_state_tracker: each of ``rng_states``.

    Raises:
        ConfigError: ``fp8`` is set.
    """

    def __init__(self, fp8: bool = False) -> None:
        if fp8:
            raise ConfigError(f"CheckpointWithoutOutput(fp8={fp8!r}): fp8 recomputation is not offered; pass False")
        super().__init__()
        self.fp8 = False
        self.ctx: Any = None
        self.outputs: tuple[Any, ...] | None = None
        self._latest: Any = None
        self.run_function: Callable[..., Any] | None = None
        self._keep_states(None)

    def _keep_states(self, states: tuple[Any, ...] | None) -> None:
        self.rng_states = states
        self.fwd_cpu_rng_state, self.fwd_cuda_rng_state, self.fwd_cuda_rng_state_tracker = states or (None, None, None)

    def checkpoint(self, run_function: Callable[..., Any], *args: Any) -> Any:
        """See ``OutputRecomputation.run``."""
        self.run_function = run_function
        return self.run(run_function, *args)

    def discard_output_and_register_recompute(self, hook_tensor: Tensor) -> None:
        """See ``OutputRecomputation.discard_``."""
        self.discard_(hook_tensor)

    def _recompute(self, _: Any) -> None:
        """Recompute the outputs of the latest call, once, into their storages; hook on the hook tensor's gradient."""
        if self._latest is not None:
            self._latest.recompute(_)

    def _store(self, held: Any, outputs: Any, args: tuple[Any, ...]) -> None:
        super()._store(held, outputs, args)
        self._latest, self.ctx = held, held.node
        self._keep_states(held.first.parts())
        self.outputs = outputs if isinstance(outputs, tuple) else (outputs,)

    def _after_recomputation(self, held: Any) -> None:
        if held is self._latest:
            self._latest = self.ctx = self.outputs = self.run_function = None
            self._keep_states(None)


class CheckpointWithoutOutputFunction(Function):
    """Megatron's autograd function: ``CheckpointWithoutOutput.checkpoint`` as one node; see ``CheckpointFunction``."""

    @staticmethod
    def forward(
        ctx: Any, run_function: Callable[..., Any], checkpoint_without_output_obj: CheckpointWithoutOutput, *args: Any
    ) -> Any:
        return checkpoint_without_output_obj.run_in_function(ctx, run_function, *args)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return None, None, *recompute.go_back(ctx, grad_outputs)


def detach_variable(inputs: Any) -> tuple[Any, ...]:
    """Return the inputs, with tensors detached but ``requires_grad`` as before."""
    detached = (
        each.detach().requires_grad_(each.requires_grad) if isinstance(each, Tensor) else each for each in inputs
    )
    return tuple(detached)


offer(globals(), "CudaRNGStatesTracker", "is_checkpointing")
