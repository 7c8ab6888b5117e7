"""``get_forward_backward_func``: a training step over all micro-batches, with Megatron's arguments."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise.core.communication.context import default_device
from shardwise.core.errors import ConfigError, DataError
from shardwise.megatron.core import parallel_state
from shardwise.megatron.core.process_groups_config import ProcessGroupCollection
from shardwise.megatron.core.tensor_parallel.layers import drain_embedding_wgrad_compute
from shardwise.megatron.core.transformer.transformer_config import ModelParallelConfig
from shardwise.megatron.errors import IndivisibleError, asserting
from shardwise.models.config import LayerConfig
from shardwise.training.pipeline.schedules import forward_only as forward_only_schedule, make_schedule
from shardwise.training.pipeline.stage import (
    Pipeline,
    deferred_buffers,
    hidden_shape,
    local_length as engine_local_length,
    wrapped,
)

__all__ = ["get_forward_backward_func"]

_local_length = asserting(IndivisibleError)(engine_local_length)

ForwardStepFunc = Callable[..., tuple[Tensor, Callable[..., Any]]]


def get_forward_backward_func(
    pp_size: int | None = None, vp_size: int | None = None, *, schedule: str | None = None
) -> Callable[..., list[Any]]:
    """``forward_backward_func`` for so many stages and chunks.

    Args:
        pp_size: pipeline-parallel ranks; those of the ambient topology if None, and 1 if there is none.
        vp_size: chunks on each of them; the ambient number if None.
        schedule: "gpipe", "1f1b", "interleaved" or "zero-bubble"; "interleaved" with several chunks and else "1f1b"
            if None.

    Raises:
        ConfigError: an unknown schedule, or one that the number of chunks does not fit.
    """
    if pp_size is None:
        initialized = parallel_state.model_parallel_is_initialized()
        pp_size = parallel_state.get_pipeline_model_parallel_world_size() if initialized else 1
    if vp_size is None:
        vp_size = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    num_chunks = vp_size or 1
    if schedule is None:
        schedule = "interleaved" if num_chunks > 1 else "1f1b"
    # Whatever the number of micro-batches, a multiple of the stages fits.
    make_schedule(schedule, pp_size, pp_size, num_chunks)
    return functools.partial(forward_backward_func, schedule=schedule)


def forward_backward_func(
    *,
    forward_step_func: ForwardStepFunc,
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
    """Run all micro-batches forward and back through the pipeline. Collective over its stages.

    The model's ``config`` says the rest: ``sequence_parallel``, ``pipeline_dtype``,
    ``microbatch_group_size_per_vp_stage``,
    ``grad_scale_func`` (applied to each loss before its backward), ``no_sync_func`` (a context for all backward steps
    but each chunk's last; or a list, with one for each chunk) and ``finalize_model_grads_func``, called at the end as
    ``f(chunks, None, pg_collection=...)``.

    Args:
        forward_step_func: ``(data_iterator, model) -> (output, loss_func)``, called once per micro-batch and chunk.
            On the last stage ``loss_func(output)`` gives ``(loss, data)``, where the loss is a scalar that is divided
            by ``num_microbatches`` (pass a sum times ``num_microbatches`` over all tokens for a mean over all), or
            ``(loss, num_tokens, data)``, where it is divided by both.
        data_iterator: handed to ``forward_step_func``; with several chunks a list with one for each.
        model: this stage's chunk, or a list of them in order.
        num_microbatches: of this step.
        seq_length: of every sequence, over all ranks that share it.
        micro_batch_size: sequences in each micro-batch.
        decoder_seq_length: ``seq_length`` or None; there is no encoder with another.
        forward_only: measure, without gradients.
        collect_non_loss_data: call ``loss_func(output, non_loss_data=True)`` and return what it gives; no backward.
        first_val_step: accepted; nothing depends on it.
        pg_collection: groups ``pp``, and ``tp`` and ``cp`` where there are any; the ambient topology's if None.
        schedule: by name.

    Returns:
        On the last stage ``data`` of each micro-batch; an empty list on the others.

    Raises:
        ConfigError: arguments that do not fit each other or the schedule.
        DataError: ``data_iterator`` has too few micro-batches, or one of another size or length.
        ShardwiseError: what went wrong on any stage, on every stage.
    """
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    iterators = _one_per_chunk(data_iterator, chunks)
    if decoder_seq_length not in (None, seq_length):
        raise ConfigError(f"decoder_seq_length is {decoder_seq_length} and seq_length {seq_length}; they must be equal")
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["pp", "tp", "cp"])
    if groups.pp is None:
        raise ConfigError("pg_collection has no group pp, over whose ranks the stages are spread")
    config = _config_of(chunks[0])
    # A model of the engine has a config without these.
    hooks = (
        config
        if isinstance(config, ModelParallelConfig)
        else ModelParallelConfig(pipeline_model_parallel_size=config.pipeline_model_parallel_size)
    )
    num_stages = groups.pp.size()
    if forward_only or collect_non_loss_data:
        table = forward_only_schedule(num_stages, num_microbatches, len(chunks))
    else:
        group_size = hooks.microbatch_group_size_per_vp_stage if num_stages > 1 else None
        table = make_schedule(schedule, num_stages, num_microbatches, len(chunks), group_size=group_size)
    loss_funcs: dict[int, Callable[..., Any]] = {}

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
        for count in num_tokens:
            scalar = scalar / torch.clamp(torch.as_tensor(count, device=scalar.device), min=1)
        scalar = scalar / num_microbatches
        return scalar if hooks.grad_scale_func is None else hooks.grad_scale_func(scalar), data

    # A stage may have no parameters at all.
    first = next((param for chunk in chunks for param in chunk.parameters()), None)
    pipeline: Pipeline[Any] = Pipeline(chunks, group=groups.pp)
    several_parts = num_stages * len(chunks) > 1
    with _checked_tokens(
        chunks if several_parts else [], micro_batch_size, _local_length(seq_length, getattr(groups, "cp", None))
    ):
        results = pipeline.run(
            table,
            forward,
            loss,
            shape=hidden_shape(
                config,
                seq_length,
                micro_batch_size,
                tp_group=getattr(groups, "tp", None),
                cp_group=getattr(groups, "cp", None),
            ),
            dtype=hooks.pipeline_dtype or config.params_dtype,
            input_dtype=config.params_dtype,
            device=default_device(groups.pp) if first is None else first.device,
            forward_only=forward_only or collect_non_loss_data,
            no_sync=_all_of(hooks.no_sync_func),
        )
    if not (forward_only or collect_non_loss_data):
        for chunk in chunks:
            _drain(chunk, config, getattr(groups, "tp", None))
    if hooks.finalize_model_grads_func is not None and not (forward_only or collect_non_loss_data):
        hooks.finalize_model_grads_func(chunks, None, pg_collection=groups)
    return results


def _all_of(no_sync_func: Any) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """One context for all chunks' ``no_sync``; what a chunk does alone concerns no other's gradients."""
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


def _drain(chunk: nn.Module, config: Any, tp_group: ProcessGroup | None) -> None:
    """Compute the output layer's weight gradient, if it waits (``config.defer_embedding_wgrad_compute``)."""
    buffers = deferred_buffers(chunk)
    if buffers is not None:
        model = wrapped(chunk, "shared_embedding_or_output_weight")
        shared = model.shared_embedding_or_output_weight()
        weight = model.output_layer.weight if shared is None else shared
        drain_embedding_wgrad_compute(config, *buffers, weight, tp_group)


@contextlib.contextmanager
def _checked_tokens(chunks: Sequence[nn.Module], batch: int, length: int) -> Iterator[None]:
    """Within it a model that is called with other ``input_ids`` than ``[batch, length]`` raises DataError.

    The stage itself sees hidden states alone. Where tensor-parallel ranks share the sequence, that of one rank may be
    as long as it should be and that of another not, and the first would wait for the second, which gave up.
    """

    def check(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = args[0] if args else kwargs.get("input_ids")
        if isinstance(tokens, Tensor) and tuple(tokens.shape) != (batch, length):
            raise DataError(
                f"input_ids have the shape {list(tokens.shape)}; every micro-batch must have that of micro_batch_size "
                f"and seq_length, {[batch, length]}"
            )

    models = [wrapped(chunk, "set_input_tensor") for chunk in chunks]
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
            raise ConfigError(
                f"{len(data_iterator)} data iterators for {len(chunks)} chunks of the model; give one each"
            )
        return list(data_iterator)
    if len(chunks) > 1 and data_iterator is not None:
        raise ConfigError(
            f"one data iterator for {len(chunks)} chunks of the model, each of which reads every micro-batch; give a "
            "list with one for each"
        )
    return [data_iterator] * len(chunks)


def _config_of(chunk: nn.Module) -> LayerConfig:
    model = wrapped(chunk, "config")
    if model is None:
        raise ConfigError(f"a model of type {type(chunk).__name__} has no config, which says how its stages talk")
    config: LayerConfig = model.config
    return config
