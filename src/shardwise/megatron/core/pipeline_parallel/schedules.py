"""Training step over all micro-batches with Megatron's arguments, and messages for custom schedules."""

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise.core.communication.collectives import Transfer, exchange
from shardwise.core.communication.context import default_device, device_of_host_facts
from shardwise.core.communication.transports.transport import Pending
from shardwise.core.errors import ConfigError, DataError
from shardwise.megatron.absent import absent_names
from shardwise.megatron.core import parallel_state
from shardwise.megatron.core.models.language_module import _output_weight_of
from shardwise.megatron.core.process_groups_config import ProcessGroupCollection, _group_of
from shardwise.megatron.core.tensor_parallel.attributes import divide
from shardwise.megatron.core.tensor_parallel.layers import drain_embedding_wgrad_compute
from shardwise.megatron.core.transformer.transformer_config import ModelParallelConfig
from shardwise.megatron.surface import offer
from shardwise.models.experts.moe import MoELayer
from shardwise.training.pipeline import stage as engine
from shardwise.training.pipeline.schedules import forward_only as forward_only_schedule, make_schedule
from shardwise.training.pipeline.shapes import make_header, read_header

hidden_shape = engine.hidden_shape

_ForwardStepFunc = Callable[..., tuple[Tensor, Callable[..., Any]]]


__getattr__ = absent_names("pipeline_parallel.schedules")


def get_forward_backward_func(
    pp_size: int | None = None, vp_size: int | None = None, *, schedule: str | None = None
) -> Callable[..., list[Any]]:
    """Return ``forward_backward_func`` for the given numbers of stages and chunks.

    Args:
        pp_size: number of pipeline stages; None means that of the ambient topology, or 1 if there is none.
        vp_size: number of chunks on each stage; None means the ambient number.
        schedule: "gpipe", "1f1b", "interleaved" or "zero-bubble"; None means "interleaved" with several chunks, else
            "1f1b".

    Raises:
        ConfigError: an unknown schedule, or one that does not support the number of chunks.
    """
    if pp_size is None:
        initialized = parallel_state.model_parallel_is_initialized()
        pp_size = parallel_state.get_pipeline_model_parallel_world_size() if initialized else 1
    if vp_size is None:
        vp_size = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    num_chunks = vp_size or 1
    # A multiple of the stages is always valid, so this checks the other arguments.
    make_schedule(schedule or ("interleaved" if num_chunks > 1 else "1f1b"), pp_size, pp_size, num_chunks)
    if schedule is not None:
        return functools.partial(_forward_backward_func, schedule=schedule)
    if num_chunks > 1:
        return forward_backward_pipelining_with_interleaving
    return forward_backward_no_pipelining if pp_size == 1 else forward_backward_pipelining_without_interleaving


def _forward_backward_func(
    *,
    forward_step_func: _ForwardStepFunc,
    data_iterator: Iterator[Any] | Sequence[Iterator[Any] | None] | None,
    model: nn.Module | Sequence[nn.Module],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    schedule: str = "1f1b",
) -> list[Any]:
    """Run the forward and backward passes of all micro-batches through the pipeline. Collective over its stages.

    The model's ``config`` has more settings: ``sequence_parallel``, ``pipeline_dtype``, ``variable_seq_lengths`` (the
    shape of each micro-batch's hidden states travels ahead of them),
    ``microbatch_group_size_per_vp_stage``, ``grad_scale_func`` (applied to each loss before its backward),
    ``no_sync_func`` (context for all backward steps but the last of each chunk, or a list of contexts, one per chunk)
    and ``finalize_model_grads_func``, called at the end as ``f(chunks, num_tokens, pg_collection=...)``: None, or with
    ``calculate_per_token_loss`` a tensor with the number of tokens of this rank's losses, 0 before the last stage.

    Args:
        forward_step_func: ``(data_iterator, model) -> (output, loss_func)``, called once per micro-batch and chunk.
            On the last stage ``loss_func(output)`` returns ``(loss, data)``, where the scalar loss is divided by
            ``num_microbatches`` (for a mean over all tokens, multiply the sum over them by ``num_microbatches``), or
            ``(loss, num_tokens, data)``, where the loss is divided by both, or with ``calculate_per_token_loss`` by
            neither. The loss of a pair is multiplied by the number of context-parallel ranks: it is this rank's sum,
            divided by the tokens of all of them.
        data_iterator: argument for ``forward_step_func``; with several chunks a list, one per chunk.
        model: this stage's chunk, or a list of its chunks in order.
        num_microbatches: number of micro-batches in this step.
        seq_length: length of every sequence, over all ranks that share it; ignored with ``variable_seq_lengths``.
        micro_batch_size: number of sequences in each micro-batch; ignored with ``variable_seq_lengths``.
        decoder_seq_length: ``seq_length`` or None, because there is no encoder; ignored with ``variable_seq_lengths``.
            Without stages none of the three is read, but with losses of experts and ``calculate_per_token_loss``.
        forward_only: whether to compute no gradients.
        collect_non_loss_data: whether to return ``loss_func(output, non_loss_data=True)``, without a backward pass.
        first_val_step: no effect.
        pg_collection: groups ``pp``, and ``tp`` and ``cp`` if used; None means those of the ambient topology.
        schedule: name of the schedule.

    Returns:
        ``data`` of each micro-batch on the last stage, an empty list on other stages.

    Raises:
        ConfigError: the arguments contradict each other or the schedule.
        DataError: ``data_iterator`` has too few micro-batches, or a micro-batch has the wrong size or length.
        ShardwiseError: the error of any stage, on every stage.
    """
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    iterators = _one_per_chunk(data_iterator, chunks)
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["pp", "tp", "cp"])
    if groups.pp is None:
        raise ConfigError("pg_collection has no group pp, over whose ranks the stages are spread")
    tp_group, cp_group = getattr(groups, "tp", None), getattr(groups, "cp", None)
    config = _config_of(chunks[0])
    # The config of an engine model lacks these hooks.
    has_hooks, size = isinstance(config, ModelParallelConfig), config.pipeline_model_parallel_size
    hooks = config if has_hooks else ModelParallelConfig(pipeline_model_parallel_size=size)
    varies = hooks.variable_seq_lengths
    num_stages = groups.pp.size()
    # Without stages the model's inputs alone have sizes.
    has_sizes = num_stages * len(chunks) > 1 and not varies
    if has_sizes and decoder_seq_length not in (None, seq_length):
        raise ConfigError(f"decoder_seq_length is {decoder_seq_length} and seq_length {seq_length}; they must be equal")
    only_forward = forward_only or collect_non_loss_data
    if only_forward:
        table = forward_only_schedule(num_stages, num_microbatches, len(chunks))
    else:
        group_size = hooks.microbatch_group_size_per_vp_stage if num_stages > 1 else None
        table = make_schedule(schedule, num_stages, num_microbatches, len(chunks), group_size=group_size)
    loss_funcs: dict[int, Callable[..., Any]] = {}
    # A stage may have no parameters.
    first = next((param for chunk in chunks for param in chunk.parameters()), None)
    device = default_device(groups.pp) if first is None else first.device
    total = (
        torch.zeros([], dtype=torch.int, device=device) if getattr(config, "calculate_per_token_loss", False) else None
    )

    def forward(micro_batch: int, chunk: int) -> Tensor:
        try:
            output, loss_funcs[micro_batch] = forward_step_func(iterators[chunk], chunks[chunk])
        except StopIteration as error:
            raise DataError(
                f"the data ended at micro-batch {micro_batch} of {num_microbatches} (counted from 0); give "
                "data_iterator as many as num_microbatches"
            ) from error
        return output

    def loss(micro_batch: int, output: Tensor) -> tuple[Tensor | None, Any]:
        loss_func = loss_funcs.pop(micro_batch)
        if collect_non_loss_data:
            return None, loss_func(output, non_loss_data=True)
        scalar, *num_tokens, data = loss_func(output)
        if not num_tokens and cp_group is not None:
            scalar = scalar * cp_group.size()
        if num_tokens and total is not None:
            total.add_(torch.as_tensor(num_tokens[0], device=device).detach().to(total.dtype))
        else:
            for count in num_tokens:
                scalar = scalar / torch.clamp(torch.as_tensor(count, device=scalar.device), min=1)
            scalar = scalar / num_microbatches
        return scalar if hooks.grad_scale_func is None else hooks.grad_scale_func(scalar), data

    for layer in [] if only_forward else [each for chunk in chunks for each in chunk.modules()]:
        if isinstance(layer, MoELayer):
            # Losses that balance experts are scaled as the loss of a micro-batch, or as the sum of its tokens' losses.
            scale = 1.0 if hooks.grad_scale_func is None else float(hooks.grad_scale_func(torch.ones(())))
            layer.loss_scale = scale * layer.router.num_position_ranks / num_microbatches
            if total is not None and (layer.spec.aux_loss or layer.spec.z_loss):
                if varies:
                    raise ConfigError(
                        "calculate_per_token_loss and variable_seq_lengths are set, with losses that balance experts, "
                        "which count the tokens of a micro-batch; leave out one of the three"
                    )
                has_sizes, layer.loss_scale = True, scale * seq_length * micro_batch_size
    pipeline: engine.Pipeline[Any] = engine.Pipeline(chunks, group=groups.pp)
    length = seq_length
    shape: tuple[int | None, ...] = (None, None, getattr(config, "hidden_size", None))
    if has_sizes:
        length = seq_length if cp_group is None else divide(seq_length, cp_group.size())
        shape = hidden_shape(config, length, micro_batch_size, tp_group=tp_group)
    with _checked_tokens(chunks if has_sizes else [], micro_batch_size, length):
        results = pipeline.run(
            table,
            forward,
            loss,
            shape=shape,
            dtype=hooks.pipeline_dtype or config.params_dtype,
            input_dtype=config.params_dtype,
            device=device,
            forward_only=only_forward,
            no_sync=_all_of(hooks.no_sync_func),
        )
    if only_forward:
        return results
    for chunk in chunks:
        buffers = engine.deferred_buffers(chunk)
        if buffers is not None:
            drain_embedding_wgrad_compute(_config_of(chunk), *buffers, _output_weight_of(chunk), tp_group)
    if hooks.finalize_model_grads_func is not None:
        hooks.finalize_model_grads_func(chunks, total, pg_collection=groups)
    return results


def _all_of(no_sync_func: Any) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Combine the ``no_sync`` contexts of all chunks; a chunk's context affects only its own gradients."""
    if no_sync_func is None:
        return contextlib.nullcontext
    if callable(no_sync_func):
        return no_sync_func  # type: ignore[no-any-return] # the program says that it is one

    def all_of() -> contextlib.AbstractContextManager[Any]:
        stack = contextlib.ExitStack()
        for no_sync in no_sync_func:
            stack.enter_context(no_sync())
        return stack

    return all_of


@contextlib.contextmanager
def _checked_tokens(chunks: Sequence[nn.Module], batch: int, length: int) -> Iterator[None]:
    """Make models in the block raise DataError if the shape of ``input_ids`` is not ``[batch, length]``.

    The stage itself sees only hidden states. If tensor-parallel ranks share the sequence, the part on one rank may have
    the right length and the part on another the wrong one. Then the first rank would wait for the second, which failed.
    """

    def check(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = args[0] if args else kwargs.get("input_ids")
        if isinstance(tokens, Tensor) and tuple(tokens.shape) != (batch, length):
            raise DataError(
                f"input_ids have the shape {list(tokens.shape)}; every micro-batch must have that of micro_batch_size "
                f"and seq_length, {[batch, length]}"
            )

    models = [engine.wrapped(chunk, "set_input_tensor") for chunk in chunks]
    handles = [
        model.register_forward_pre_hook(check, with_kwargs=True)
        for model in models
        if next(iter(inspect.signature(model.forward).parameters), None) == "input_ids"
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _one_per_chunk(data_iterator: Any, chunks: Sequence[nn.Module]) -> list[Any]:
    if isinstance(data_iterator, (list, tuple)):
        if len(data_iterator) != len(chunks):
            raise ConfigError(f"{len(data_iterator)} data iterators for {len(chunks)} chunks; give one each")
        return list(data_iterator)
    if len(chunks) > 1 and data_iterator is not None:
        raise ConfigError(
            f"one data iterator for {len(chunks)} chunks of the model, which all read every micro-batch; give a "
            "list with one for each"
        )
    return [data_iterator] * len(chunks)


def _config_of(chunk: nn.Module) -> Any:
    model = engine.wrapped(chunk, "config")
    if model is None:
        raise ConfigError(f"a model of type {type(chunk).__name__} has no config, which says how its stages talk")
    return model.config


_FORWARD, _BACKWARD = 0, 1


def is_single_shape(x: Any) -> bool:
    """True if ``x`` is the shape of one tensor, not a list of shapes."""
    is_list = isinstance(x, list | tuple) and len(x) > 0
    return isinstance(x, torch.Size) or (is_list and all(isinstance(size, int) for size in x))


class P2PCommunicator:
    """Sends hidden states to the next stage and gradients to the previous stage, and receives both.

    The first stage follows the last one, as interleaved chunks need. With ``is_first_stage`` or ``is_last_stage``
    nothing is sent past that end, and None is received. For a list of tensors or shapes the result is a list.

    Args:
        pp_group: process group of the stages.
        config: config with the dtype of the messages: ``pipeline_dtype``, or ``params_dtype`` if it is None. With
            ``variable_seq_lengths`` the shape of each tensor is sent ahead of it, and only the number of sizes of a
            given shape is used.

    Attributes:
        next_rank, prev_rank: global ranks of the neighbours.
        total_stages, current_stage: number of stages, and index of this stage, from 0.
        is_pp_first_stage, is_pp_last_stage: whether this stage is the first or the last one.
    """

    def __init__(self, pp_group: ProcessGroup, config: ModelParallelConfig) -> None:
        self.pp_group, self.config = pp_group, config
        self.current_stage, self.total_stages = pp_group.rank(), pp_group.size()
        self.is_pp_first_stage = self.current_stage == 0
        self.is_pp_last_stage = self.current_stage == self.total_stages - 1
        self._next, self._prev = ((self.current_stage + step) % self.total_stages for step in (1, -1))
        self.next_rank = torch.distributed.get_global_rank(pp_group, self._next)
        self.prev_rank = torch.distributed.get_global_rank(pp_group, self._prev)
        self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size

    def recv_forward(self, tensor_shapes: Any, is_first_stage: bool) -> Any:
        """Receive hidden states from the previous stage."""
        return _each(lambda shape: self._exchange(from_prev=shape)[0], tensor_shapes, at_end=is_first_stage)

    def recv_backward(self, tensor_shapes: Any, is_last_stage: bool) -> Any:
        """Receive gradients from the next stage."""
        return _each(lambda shape: self._exchange(from_next=shape)[1], tensor_shapes, at_end=is_last_stage)

    def send_forward(self, output_tensors: Any, is_last_stage: bool) -> None:
        """Send hidden states to the next stage."""
        _each(lambda tensor: self._exchange(to_next=tensor), output_tensors, at_end=is_last_stage)

    def send_backward(self, input_tensor_grads: Any, is_first_stage: bool) -> None:
        """Send gradients to the previous stage."""
        _each(lambda tensor: self._exchange(to_prev=tensor), input_tensor_grads, at_end=is_first_stage)

    def send_forward_recv_backward(self, output_tensors: Any, tensor_shapes: Any, is_last_stage: bool) -> Any:
        """Send hidden states to the next stage, and receive from it the gradients of earlier hidden states."""

        def both(tensor: Tensor, shape: Any) -> Tensor | None:
            return self._exchange(to_next=tensor, from_next=shape)[1]

        return _each(both, output_tensors, tensor_shapes, at_end=is_last_stage)

    def send_backward_recv_forward(self, input_tensor_grads: Any, tensor_shapes: Any, is_first_stage: bool) -> Any:
        """Send gradients to the previous stage, and receive the next hidden states from it."""

        def both(tensor: Tensor, shape: Any) -> Tensor | None:
            return self._exchange(to_prev=tensor, from_prev=shape)[0]

        return _each(both, input_tensor_grads, tensor_shapes, at_end=is_first_stage)

    def send_forward_recv_forward(
        self, output_tensor: Tensor | None, recv_prev: bool, tensor_shape: Any, overlap_p2p_comm: bool = False
    ) -> Any:
        """Send hidden states to the next stage (unless None), and receive the previous stage's if ``recv_prev``.

        Returns:
            The received tensor or None; with ``overlap_p2p_comm`` also a list of objects whose ``wait()`` must be
            called before a tensor is used.
        """
        works: list[Pending] | None = [] if overlap_p2p_comm else None
        received = self._exchange(to_next=output_tensor, from_prev=tensor_shape if recv_prev else None, works=works)[0]
        return received if works is None else (received, works)

    def send_backward_recv_backward(
        self, input_tensor_grad: Tensor | None, recv_next: bool, tensor_shape: Any, overlap_p2p_comm: bool = False
    ) -> Any:
        """Send gradients to the previous stage (unless None), and receive the next stage's if ``recv_next``.

        Returns:
            See ``send_forward_recv_forward``.
        """
        works: list[Pending] | None = [] if overlap_p2p_comm else None
        shape = tensor_shape if recv_next else None
        received = self._exchange(to_prev=input_tensor_grad, from_next=shape, works=works)[1]
        return received if works is None else (received, works)

    def send_forward_backward_recv_forward_backward(
        self, output_tensor: Any, input_tensor_grad: Any, recv_prev: bool, recv_next: bool, tensor_shape: Any
    ) -> tuple[Tensor | None, Tensor | None]:
        """Exchange in both directions at once; return the received hidden states and gradients, or None for each."""
        shapes = tensor_shape if recv_prev else None, tensor_shape if recv_next else None
        return self._exchange(output_tensor, input_tensor_grad, *shapes)

    def _exchange(
        self,
        to_next: Tensor | None = None,
        to_prev: Tensor | None = None,
        from_prev: Any = None,
        from_next: Any = None,
        works: list[Pending] | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Send tensors and receive tensors of the shapes at once; wait, or append the pending messages to ``works``."""
        dtype = self.config.pipeline_dtype or self.config.params_dtype
        options: dict[str, Any] = {"dtype": dtype, "device": default_device(self.pp_group), "requires_grad": True}
        for tensor in (to_next, to_prev):
            if tensor is not None and tensor.dtype != dtype:
                raise ConfigError(f"a tensor of {tensor.dtype} is to be sent, and pipeline_dtype is {dtype}")
        if self.config.variable_seq_lengths:
            host = device_of_host_facts(self.pp_group, options["device"])
            headers = [None if tensor is None else make_header(tensor.shape, host) for tensor in (to_next, to_prev)]
            given = [None if shape is None else make_header([0] * len(shape), host) for shape in (from_prev, from_next)]
            for pending in itertools.chain(*self._start(headers, given)):
                pending.wait()
            from_prev, from_next = (
                None if header is None else read_header(header, (None,) * (len(header) - 1), dtype, whose="tensors")[0]
                for header in given
            )
        prev, after = (None if shape is None else torch.empty(*shape, **options) for shape in (from_prev, from_next))
        sent, received = self._start([to_next, to_prev], [prev, after])
        if works is not None:
            works += [*sent, *received]
            return prev, after
        for pending in (*sent, *received):
            pending.wait()
        return prev, after

    def _start(
        self, out: Sequence[Tensor | None], back: Sequence[Tensor | None]
    ) -> tuple[list[Pending], list[Pending]]:
        """Start to send tensors to the next and the previous stage, and to receive from the previous and the next."""
        # With two stages both neighbours are the same rank. Both sides send and receive in this order.
        sends = zip(out, (self._next, self._prev), (_FORWARD, _BACKWARD), strict=True)
        receives = zip(back, (self._prev, self._next), (_FORWARD, _BACKWARD), strict=True)
        transfers = (
            [Transfer(tensor.detach().contiguous(), rank, tag) for tensor, rank, tag in each if tensor is not None]
            for each in (sends, receives)
        )
        return exchange(*transfers, group=self.pp_group)


def _communicator(config: ModelParallelConfig) -> P2PCommunicator:
    return P2PCommunicator(_group_of(None, "pp"), config)


def recv_forward(tensor_shape: Any, config: ModelParallelConfig) -> Any:
    """Receive hidden states from the ambient previous stage; None on the first one."""
    each = _communicator(config)
    return each.recv_forward(tensor_shape, each.is_pp_first_stage)


def recv_backward(tensor_shape: Any, config: ModelParallelConfig) -> Any:
    """Receive gradients from the ambient next stage; None on the last one."""
    each = _communicator(config)
    return each.recv_backward(tensor_shape, each.is_pp_last_stage)


def send_forward(output_tensor: Any, config: ModelParallelConfig) -> None:
    """Send hidden states to the ambient next stage; nothing on the last one."""
    each = _communicator(config)
    each.send_forward(output_tensor, each.is_pp_last_stage)


def send_backward(input_tensor_grad: Any, config: ModelParallelConfig) -> None:
    """Send gradients to the ambient previous stage; nothing on the first one."""
    each = _communicator(config)
    each.send_backward(input_tensor_grad, each.is_pp_first_stage)


def send_forward_recv_backward(output_tensor: Any, tensor_shape: Any, config: ModelParallelConfig) -> Any:
    """Do ``send_forward`` and ``recv_backward`` at once."""
    each = _communicator(config)
    return each.send_forward_recv_backward(output_tensor, tensor_shape, each.is_pp_last_stage)


def send_backward_recv_forward(input_tensor_grad: Any, tensor_shape: Any, config: ModelParallelConfig) -> Any:
    """Do ``send_backward`` and ``recv_forward`` at once."""
    each = _communicator(config)
    return each.send_backward_recv_forward(input_tensor_grad, tensor_shape, each.is_pp_first_stage)


def get_schedule_table(
    num_microbatches: int, num_model_chunks: int, microbatch_group_size_per_vp_stage: int
) -> list[tuple[int, int]]:
    """Return micro-batch and chunk of each forward pass of interleaved stages, in order."""
    starts = range(0, num_microbatches, microbatch_group_size_per_vp_stage)
    groups = [range(start, min(start + starts.step, num_microbatches)) for start in starts]
    return [(number, chunk) for group in groups for chunk in range(num_model_chunks) for number in group]


def _each(function: Callable[..., Any], *arguments: Any, at_end: bool) -> Any:
    """Apply ``function`` to each item if the arguments are lists, otherwise once; ``at_end`` gives None instead."""
    lists = [each if isinstance(each, list | tuple) and not is_single_shape(each) else [each] for each in arguments]
    results = [None if at_end else function(*each) for each in zip(*lists, strict=True)]
    return results if lists[0] is arguments[0] else results[0]


def _named(name: str, schedule: str) -> Callable[..., list[Any]]:
    def run(
        *,
        adjust_tensor_shapes_fn: None = None,
        p2p_communicator: P2PCommunicator | None = None,
        force_all_reduce: bool = False,
        **arguments: Any,
    ) -> list[Any]:
        """Run one schedule, with the arguments of ``forward_backward_func``; ``p2p_communicator`` has no effect."""
        if adjust_tensor_shapes_fn is not None or force_all_reduce:
            raise ConfigError(
                "adjust_tensor_shapes_fn or force_all_reduce is given, which is not offered here: stages exchange the "
                "hidden state of the config's size, and gradients are summed once; leave it out"
            )
        return _forward_backward_func(schedule=schedule, **arguments)

    run.__name__ = name
    return run


forward_backward_no_pipelining = _named("forward_backward_no_pipelining", "1f1b")
forward_backward_pipelining_without_interleaving = _named("forward_backward_pipelining_without_interleaving", "1f1b")
forward_backward_pipelining_with_interleaving = _named("forward_backward_pipelining_with_interleaving", "interleaved")

offer(
    globals(),
    "forward_backward_no_pipelining forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
)
