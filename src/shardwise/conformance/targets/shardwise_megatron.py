"""Target ``shardwise.megatron``: Megatron's names on the library, used as a program written for Megatron uses them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from shardwise.conformance.dense import Batch, Sizes, num_labels
from shardwise.conformance.dense_comparison import Synchronised
from shardwise.conformance.targets import shardwise_engine as engine, shardwise_models as models
from shardwise.conformance.targets.megatron_names import config_fields, make_layer
from shardwise.core.communication.collectives import all_reduce
from shardwise.core.initialization import init_method_normal
from shardwise.core.topology import Groups
from shardwise.megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from shardwise.megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from shardwise.megatron.core.models.transformer_models import GPTModel
from shardwise.megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from shardwise.megatron.core.process_groups_config import ProcessGroupCollection
from shardwise.megatron.core.tensor_parallel import mappings
from shardwise.megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from shardwise.megatron.core.transformer.transformer_config import ModelParallelConfig, TransformerConfig
from shardwise.megatron.core.transformer.transformer_layer import get_gpt_layer_local_spec
from shardwise.training.optimizer.adamw import AdamW
from shardwise.training.optimizer.grad_norm import global_grad_norm
from shardwise.training.optimizer.optimizer import optimizer_state

versions = engine.versions
uneven = uneven_sequence = few_kv_heads = ignored_labels = padded_vocabulary = one_draw = True

grad_norm, clip = engine.grad_norm, engine.clip


def start(groups: Groups) -> None:
    pp = 1 if groups.pp is None else groups.pp.size()
    parallel_state.initialize_model_parallel(groups.tp.size(), pp)


def stop() -> None:
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()


def _collection(groups: Groups) -> ProcessGroupCollection:
    found = ProcessGroupCollection(tp=groups.tp)
    found.pp, found.dp_cp, found.embd, found.cp = groups.pp, groups.dp, groups.embd, None
    return found


def _layer_config(weight: Tensor, groups: Groups, sequence_length: int | None) -> ModelParallelConfig:
    return ModelParallelConfig(
        tensor_model_parallel_size=groups.tp.size(),
        sequence_parallel=sequence_length is not None,
        params_dtype=weight.dtype,
    )


class _Wrapped(nn.Module):
    """A module in Megatron's data-parallel wrapper, called through a function."""

    def __init__(self, inner: nn.Module, config: Any, groups: Groups, call: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.ddp = DistributedDataParallel(
            config, DistributedDataParallelConfig(), inner, pg_collection=_collection(groups)
        )
        self._call = call

    def forward(self, *inputs: Tensor) -> Any:
        return self.ddp(*inputs) if self._call is None else self._call(*inputs)


def _inner(module: Any) -> Any:
    return module.ddp.module


def _layer(kind: str, shape: Sequence[int], config: ModelParallelConfig, groups: Groups, **options: Any) -> Any:
    options |= {"config": config, "init_method": init_method_normal(1.0), "tp_group": groups.tp}
    return make_layer(tensor_parallel, kind, shape, **options)


def column_linear(
    weight: Tensor,
    bias: Tensor | None,
    groups: Groups,
    *,
    gather_output: bool = False,
    skip_bias_add: bool = False,
    sequence_length: int | None = None,
) -> nn.Module:
    config = _layer_config(weight, groups, sequence_length)
    options: dict[str, Any] = {"bias": bias is not None, "skip_bias_add": skip_bias_add}
    layer = _layer("column", weight.shape, config, groups, gather_output=gather_output, **options)
    models.set_whole_(layer, {"weight": weight, "bias": bias}, groups)

    def call(x: Tensor) -> Any:
        output, returned = layer(x, sequence_length=sequence_length)
        return (output, returned) if skip_bias_add else output

    return _Wrapped(layer, config, groups, call)


def row_linear(
    weight: Tensor,
    bias: Tensor | None,
    groups: Groups,
    *,
    input_is_parallel: bool = True,
    skip_bias_add: bool = False,
    sequence_length: int | None = None,
) -> nn.Module:
    config = _layer_config(weight, groups, sequence_length)
    options: dict[str, Any] = {"bias": bias is not None, "skip_bias_add": skip_bias_add}
    layer = _layer("row", weight.shape, config, groups, input_is_parallel=input_is_parallel, **options)
    models.set_whole_(layer, {"weight": weight, "bias": bias}, groups)
    return _Wrapped(layer, config, groups, lambda x: layer(x) if skip_bias_add else layer(x)[0])


def norm(weight: Tensor, bias: Tensor, groups: Groups) -> nn.Module:
    layer: Any = nn.LayerNorm(weight.numel(), dtype=weight.dtype)
    for param, value in ((layer.weight, weight), (layer.bias, bias)):
        param.data.copy_(value)
        param.sequence_parallel = True
    return _Wrapped(layer, _layer_config(weight, groups, 1), groups)


def embedding(weight: Tensor, groups: Groups, *, sequence_length: int | None = None) -> nn.Module:
    config = _layer_config(weight, groups, sequence_length)
    reduces = sequence_length is not None
    layer = _layer("embedding", weight.shape, config, groups, reduce_scatter_embeddings=reduces)
    models.set_whole_(layer, {"weight": weight}, groups)
    return _Wrapped(layer, config, groups)


def cross_entropy(
    logits: Tensor, labels: Tensor, groups: Groups, *, vocab: int, label_smoothing: float = 0.0
) -> Tensor:
    width = int(all_reduce(torch.tensor(float(logits.size(-1))), group=groups.tp))
    result: Tensor = tensor_parallel.vocab_parallel_cross_entropy(
        logits,
        labels,
        label_smoothing,
        vocab_size=vocab,
        padded_vocab_size=None if width == vocab else width,
        tp_group=groups.tp,
    )
    return result


def copy(tensor: Tensor, groups: Groups) -> Tensor:
    return mappings.copy_to_tensor_model_parallel_region(tensor, groups.tp)


def reduce(tensor: Tensor, groups: Groups) -> Tensor:
    return mappings.reduce_from_tensor_model_parallel_region(tensor, groups.tp)


def gather_sequence(tensor: Tensor, groups: Groups) -> Tensor:
    return mappings.gather_from_sequence_parallel_region(tensor, group=groups.tp)


def scatter_sequence(tensor: Tensor, groups: Groups) -> Tensor:
    return mappings.scatter_to_sequence_parallel_region(tensor, groups.tp)


def reduce_scatter_sequence(tensor: Tensor, groups: Groups) -> Tensor:
    return mappings.reduce_scatter_to_sequence_parallel_region(tensor, groups.tp)


def finalize_gradients(module: nn.Module, groups: Groups) -> None:
    wrapped: Any = module
    finalize_model_grads([wrapped.ddp], pg_collection=_collection(groups))


def _whole_of(module: Any, groups: Groups, tensor_of: Callable[[Parameter], Tensor]) -> dict[str, Tensor]:
    return engine.whole_of(_inner(module), groups, tensor_of)


def whole_gradients(module: nn.Module, groups: Groups) -> dict[str, Tensor]:
    return _whole_of(module, groups, engine.gradient)


def whole_parameters(module: nn.Module, groups: Groups) -> dict[str, Tensor]:
    return _whole_of(module, groups, lambda param: param.detach())


def data_parallel(module: nn.Module, groups: Groups) -> Synchronised:
    settings = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=8)
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    ddp = DistributedDataParallel(config, settings, module, pg_collection=_collection(groups))
    return Synchronised(ddp, ddp.no_sync, ddp.finish_grad_sync)


class _Optimizer:
    def __init__(self, model: Any) -> None:
        self._model = model
        self.optimizer = AdamW(_inner(model), learning_rate=1e-2, weight_decay=0.0, betas=(0.9, 0.95), epsilon=1e-8)

    def step(self) -> None:
        self.optimizer.step()
        self._model.ddp.zero_grad_buffer()


def optimizer(model: nn.Module, groups: Groups) -> _Optimizer:
    return _Optimizer(model)


def _gpt(sizes: Sizes, weights: dict[str, Tensor], groups: Groups, config: Any, **options: Any) -> GPTModel:
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=sizes.qk_norm),
        sizes.vocab,
        64,
        position_embedding_type="rope",
        rotary_base=int(sizes.base),
        share_embeddings_and_output_weights=sizes.tied,
        pg_collection=_collection(groups),
        **options,
    )
    models.set_model_(model, sizes, weights, groups)
    return model


def _config(sizes: Sizes, groups: Groups, **changes: Any) -> TransformerConfig:
    return TransformerConfig(**config_fields(sizes), tensor_model_parallel_size=groups.tp.size(), **changes)


def language_model(
    sizes: Sizes, weights: dict[str, Tensor], groups: Groups, *, sequence_parallel: bool = False
) -> nn.Module:
    config = _config(sizes, groups, sequence_parallel=sequence_parallel)
    model = _gpt(sizes, weights, groups, config)
    wrapped = _Wrapped(model, config, groups)
    wrapped._call = lambda ids, labels: wrapped.ddp(ids, None, None, labels=labels)
    return wrapped


def accumulate(model: nn.Module, batches: Sequence[Batch], groups: Groups) -> Tensor:
    assert groups.dp is not None
    wrapped: Any = model
    count, total = num_labels(batches, groups), torch.zeros((), dtype=torch.float64)
    own = torch.tensor(float(sum(int((labels >= 0).sum()) for _, labels in batches)), dtype=torch.float64)
    for number, (ids, labels) in enumerate(batches, 1):
        with nullcontext() if number == len(batches) else wrapped.ddp.no_sync():
            loss = model(ids, labels).sum()
            # Gradients become means over the ranks, and are then divided by all ranks' labels.
            (loss * groups.dp.size()).backward()
        total += loss.detach()
    finalize_model_grads([wrapped.ddp], own, pg_collection=_collection(groups))
    return all_reduce(total, group=groups.dp) / count


def train_pipeline(
    sizes: Sizes,
    weights: dict[str, Tensor],
    batches: Sequence[Batch],
    groups: Groups,
    *,
    chunks: int = 1,
    with_norm: bool = False,
) -> tuple[Tensor | None, dict[str, Tensor], float]:
    assert groups.pp is not None
    stage, last = groups.pp.rank(), groups.pp.size() - 1
    config = _config(
        sizes,
        groups,
        pipeline_model_parallel_size=last + 1,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_dtype=torch.float64,
    )
    wrapped = [
        _Wrapped(
            _gpt(
                sizes,
                weights,
                groups,
                config,
                pre_process=(stage, chunk) == (0, 0),
                post_process=(stage, chunk) == (last, chunks - 1),
                vp_stage=chunk if chunks > 1 else None,
            ),
            config,
            groups,
        )
        for chunk in range(chunks)
    ]
    models = [each.ddp for each in wrapped]
    config.finalize_model_grads_func = finalize_model_grads
    no_sync: Any = [each.no_sync for each in models] if chunks > 1 else models[0].no_sync
    config.no_sync_func = no_sync

    def forward(data: Iterator[Batch], model: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
        ids, labels = next(data)

        def loss_of(losses: Tensor) -> tuple[Tensor, Tensor]:
            # The schedule divides by the number of micro-batches.
            return losses.sum() * len(batches), losses.sum().detach()

        return model(ids, None, None, labels=labels), loss_of

    b, s = batches[0][0].shape
    iterators = [iter(batches) for _ in models]
    losses = get_forward_backward_func(last + 1, chunks if chunks > 1 else None)(
        forward_step_func=forward,
        data_iterator=iterators if chunks > 1 else iterators[0],
        model=models if chunks > 1 else models[0],
        num_microbatches=len(batches),
        seq_length=s,
        micro_batch_size=b,
        pg_collection=_collection(groups),
    )
    gradients = {name: grad for each in wrapped for name, grad in whole_gradients(each, groups).items()}
    if sizes.tied and "head.weight" in gradients:
        gradients["embedding.weight"] = gradients.pop("head.weight")
    found = 0.0
    if with_norm:
        found = float(global_grad_norm(nn.ModuleList(models), tp_group=groups.tp, pp_group=groups.pp))
    return (torch.stack(losses).sum() if stage == last else None), gradients, found


def lora(
    weight: Tensor, a: Tensor, b: Tensor, scaling: float, groups: Groups, *, kind: str, sequence_length: int | None
) -> nn.Module:
    config = _layer_config(weight, groups, sequence_length)
    layer = _layer(kind, weight.shape, config, groups)
    adapted = models.add_lora_(layer, weight, a, b, scaling, groups)
    return _Wrapped(adapted, config, groups, lambda x: adapted(x)[0])


def merge(module: nn.Module) -> None:
    _inner(module).merge_()


def seed(seed: int, groups: Groups) -> None:
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def dropout(tensor: Tensor, p: float, groups: Groups, *, split: bool) -> Tensor:
    with tensor_parallel.get_cuda_rng_tracker().fork() if split else nullcontext():
        return F.dropout(tensor, p)


def recompute(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    result: Tensor = tensor_parallel.checkpoint(function, False, *args)
    return result


def initial(kind: str, rows: int, columns: int, groups: Groups) -> Tensor:
    config = ModelParallelConfig(tensor_model_parallel_size=groups.tp.size())
    layer = _layer(kind, (rows, columns), config, groups)
    return engine.whole_of(layer, groups, lambda param: param.detach())["weight"]


def _checkpoint_state(model: Any, wrapped: _Optimizer) -> dict[str, Any]:
    weights = _inner(model).sharded_state_dict()
    return {"model": weights, "optimizer": optimizer_state(weights, wrapped.optimizer), "step": 2}


def save(model: nn.Module, optimizer: _Optimizer, folder: Path, groups: Groups) -> None:
    dist_checkpointing.save(_checkpoint_state(model, optimizer), str(folder))


def load(model: nn.Module, optimizer: _Optimizer, folder: Path, groups: Groups) -> None:
    state = _checkpoint_state(model, optimizer)
    loaded = dist_checkpointing.load(state, str(folder))
    _inner(model).load_state_dict(loaded["model"])
    with torch.no_grad():
        for name, shard in state["optimizer"].items():
            shard.data.copy_(loaded["optimizer"][name])
    optimizer.optimizer.set_step_(loaded["step"])
