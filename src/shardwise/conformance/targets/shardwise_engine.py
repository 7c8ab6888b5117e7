"""Target ``shardwise``: the layers, models and training of the library itself."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter

import shardwise
from shardwise.conformance.dense import Batch, Sizes, backward_of_mean, num_labels
from shardwise.conformance.dense_comparison import Called, Synchronised
from shardwise.conformance.targets.expert_names import from_engine
from shardwise.conformance.targets.megatron_names import from_megatron
from shardwise.conformance.targets.shardwise_models import (
    add_lora_,
    config_of,
    context_model as context_model,
    expert_layer as expert_layer,
    gpt,
    language_model as language_model,
    other_models as other_models,
    set_whole_,
    state_of,
)
from shardwise.core.communication import moves
from shardwise.core.communication.collectives import all_reduce
from shardwise.core.initialization import Normal
from shardwise.core.random import seed_streams
from shardwise.core.sequence_view import SequenceView
from shardwise.core.sharded_state import gather_parameter, sharded_state_dict
from shardwise.core.sharding import Replicas
from shardwise.core.topology import Groups
from shardwise.models import GPT
from shardwise.models.description import ModelChunks
from shardwise.models.experts.moe import MoELayer
from shardwise.nn import ColumnLinear, RowLinear, VocabEmbedding
from shardwise.nn.dropout import sharded_dropout
from shardwise.nn.loss import vocab_parallel_cross_entropy
from shardwise.nn.recompute import recomputed
from shardwise.nn.replicated import set_replicas_
from shardwise.storage import checkpoint
from shardwise.training.gradients import GradientBuffers
from shardwise.training.gradients.finalize import finalize_gradients_, gradient_of, summed_over_other_groups
from shardwise.training.optimizer.adamw import AdamW
from shardwise.training.optimizer.clipping import clip_grad_norm_
from shardwise.training.optimizer.grad_norm import global_grad_norm
from shardwise.training.optimizer.optimizer import ZeroOptimizer, optimizer_state, stored_weights
from shardwise.training.pipeline import Pipeline, make_schedule
from shardwise.training.pipeline.stage import hidden_shape

versions = {"shardwise": shardwise.__version__}
uneven = uneven_sequence = few_kv_heads = ignored_labels = padded_vocabulary = one_draw = True
windows = sinks = latent_attention = length_scaling = True


def _linear(kind: type[ColumnLinear | RowLinear], weight: Tensor, bias: Any, groups: Groups, *, splits: bool) -> Any:
    options: dict[str, Any] = {"sequence_parallel": splits, "dtype": weight.dtype}
    layer = kind(weight.size(1), weight.size(0), bias is not None, group=groups.tp, **options)
    set_whole_(layer, {"weight": weight, "bias": bias}, groups)
    return layer


def column_linear(
    weight: Tensor,
    bias: Tensor | None,
    groups: Groups,
    *,
    gather_output: bool = False,
    skip_bias_add: bool = False,
    sequence_length: int | None = None,
) -> nn.Module:
    layer = _linear(ColumnLinear, weight, bias, groups, splits=sequence_length is not None)
    layer.skip_bias_add = skip_bias_add
    view = None if sequence_length is None else SequenceView(sequence_length, groups.tp)

    def call(x: Tensor) -> Any:
        output = layer(x, sequence=view)
        if skip_bias_add:
            return output, layer.bias
        return layer.gather(output) if gather_output else output

    return Called(layer, call)


def row_linear(
    weight: Tensor,
    bias: Tensor | None,
    groups: Groups,
    *,
    input_is_parallel: bool = True,
    skip_bias_add: bool = False,
    sequence_length: int | None = None,
) -> nn.Module:
    layer = _linear(RowLinear, weight, bias, groups, splits=sequence_length is not None)

    def call(x: Tensor) -> Any:
        given = x if input_is_parallel else layer.scatter(x)
        # The engine's way to leave the bias to the caller is the product alone.
        return (layer._apply_linear(given, None), layer.bias) if skip_bias_add else layer(given)

    return Called(layer, call)


def norm(weight: Tensor, bias: Tensor, groups: Groups) -> nn.Module:
    layer = nn.LayerNorm(weight.numel(), dtype=weight.dtype)
    set_replicas_(layer, Replicas(summed_over=("tp",)))
    set_whole_(layer, {"weight": weight, "bias": bias}, groups)
    return layer


def embedding(weight: Tensor, groups: Groups, *, sequence_length: int | None = None) -> nn.Module:
    layer = VocabEmbedding(
        *weight.shape, group=groups.tp, sequence_parallel=sequence_length is not None, dtype=weight.dtype
    )
    set_whole_(layer, {"weight": weight}, groups)
    return layer


def cross_entropy(
    logits: Tensor, labels: Tensor, groups: Groups, *, vocab: int, label_smoothing: float = 0.0
) -> Tensor:
    widths = all_reduce(torch.tensor(float(logits.size(-1))), group=groups.tp)
    padded = None if int(widths) == vocab else int(widths)
    return vocab_parallel_cross_entropy(
        logits, labels, group=groups.tp, vocab_size=vocab, padded_vocab_size=padded, label_smoothing=label_smoothing
    )


def copy(tensor: Tensor, groups: Groups) -> Tensor:
    return moves.copy(tensor, group=groups.tp)


def reduce(tensor: Tensor, groups: Groups) -> Tensor:
    return moves.reduce(tensor, group=groups.tp)


def gather_sequence(tensor: Tensor, groups: Groups) -> Tensor:
    return moves.gather_for_parts(tensor, dim=0, group=groups.tp)


def scatter_sequence(tensor: Tensor, groups: Groups) -> Tensor:
    return moves.scatter(tensor, dim=0, group=groups.tp)


def reduce_scatter_sequence(tensor: Tensor, groups: Groups) -> Tensor:
    return moves.reduce_scatter(tensor, dim=0, group=groups.tp)


def finalize_gradients(module: nn.Module, groups: Groups) -> None:
    finalize_gradients_(
        module, tp_group=groups.tp, dp_group=groups.dp, embd_group=groups.embd, expert_dp_group=groups.expert_dp
    )


def _name_of(name: str) -> str:
    """Return the protocol's name of a layer's parameter."""
    if ".lora_" in name:
        return name[-1].lower()
    return name.removeprefix("inner.")


def whole_of(module: nn.Module, groups: Groups, tensor_of: Callable[[Parameter], Tensor]) -> dict[str, Tensor]:
    """Return a tensor of each parameter whole, and check that ranks with copies of a part hold the same."""
    wholes = {}
    for name, shard in state_of(module, groups).items():
        own = tensor_of(cast(Parameter, shard.data))
        group = groups.experts if shard.replicas.is_of_expert else groups.tp
        assert group is not None
        wholes[name] = gather_parameter(own, shard.layout, group=group)
        held = shard.layout.take(wholes[name], shard.rank)
        assert torch.equal(held, own), f"this rank's copy of a part of {name} differs from another rank's"
    model = module.inner if isinstance(module, Called) else module
    if isinstance(model, GPT) and model.case_sizes is not None:
        sizes = cast(Sizes, model.case_sizes)
        return from_megatron({name.removeprefix("inner."): value for name, value in wholes.items()}, sizes)
    if isinstance(model, MoELayer):
        return from_engine({name.removeprefix("inner."): value for name, value in wholes.items()}, model.spec.num)
    return {_name_of(name): value for name, value in wholes.items()}


def gradient(param: Parameter) -> Tensor:
    """Return a parameter's gradient, zeros if there is none."""
    found = gradient_of(param)
    return torch.zeros_like(param) if found is None else found


def whole_gradients(module: nn.Module, groups: Groups) -> dict[str, Tensor]:
    return whole_of(module, groups, gradient)


def whole_parameters(module: nn.Module, groups: Groups) -> dict[str, Tensor]:
    return whole_of(module, groups, lambda param: param.detach())


def grad_norm(module: nn.Module, groups: Groups) -> float:
    return float(global_grad_norm(module, tp_group=groups.tp, groups=groups))


def clip(module: nn.Module, max_norm: float, groups: Groups) -> float:
    return float(clip_grad_norm_(module, max_norm, tp_group=groups.tp, groups=groups))


def data_parallel(module: nn.Module, groups: Groups) -> Synchronised:
    assert groups.dp is not None
    gradients = GradientBuffers(module, group=groups.dp, average=True, bucket_size=8)
    return Synchronised(module, gradients.no_sync, gradients.finish)


class _Optimizer:
    """AdamW, or with ``split_state`` AdamW of this rank's elements; the gradients are then in buffers."""

    def __init__(self, model: nn.Module, groups: Groups, split_state: bool) -> None:
        self.optimizer: Any = AdamW(model, learning_rate=1e-2, weight_decay=0.0, betas=(0.9, 0.95), epsilon=1e-8)
        if split_state:
            assert groups.dp is not None
            whole = summed_over_other_groups(model, tp_group=groups.tp, embd_group=groups.embd)
            gradients = GradientBuffers(model, group=groups.dp, scatter=True, whole=whole, bucket_size=512)
            self.optimizer = ZeroOptimizer(self.optimizer, model, gradients, has_masters=False)
            model.case_buffers, model.case_zero = gradients, self.optimizer  # type: ignore[assignment]

    def step(self) -> None:
        self.optimizer.step()
        if isinstance(self.optimizer, ZeroOptimizer):
            self.optimizer.parameters.wait()
        self.optimizer.zero_grad()

    def num_state_elements(self) -> int:
        inner = getattr(self.optimizer, "innermost", self.optimizer)
        return sum(state[name].numel() for state in inner.state.values() for name in ("exp_avg", "exp_avg_sq"))


def optimizer(model: nn.Module, groups: Groups, *, split_state: bool = False) -> _Optimizer:
    return _Optimizer(model, groups, split_state)


def accumulate(model: nn.Module, batches: Sequence[Batch], groups: Groups) -> Tensor:
    assert groups.dp is not None
    buffers: GradientBuffers | None = getattr(model, "case_buffers", None)
    total = backward_of_mean(model, batches, num_labels(batches, groups))
    if buffers is not None:
        buffers.finish()
    dp_group = groups.dp if buffers is None else None
    finalize_gradients_(model, tp_group=groups.tp, dp_group=dp_group)
    return all_reduce(total, group=groups.dp)


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
    config = config_of(
        sizes,
        pipeline_model_parallel_size=groups.pp.size(),
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
    )
    models = [
        gpt(
            sizes,
            weights,
            groups,
            config,
            pre_process=(stage, chunk) == (0, 0),
            post_process=(stage, chunk) == (last, chunks - 1),
            vp_stage=chunk if chunks > 1 else None,
        )
        for chunk in range(chunks)
    ]
    pipeline: Pipeline[Tensor] = Pipeline(models, group=groups.pp)
    schedule = make_schedule("interleaved" if chunks > 1 else "1f1b", last + 1, len(batches), chunks)

    def forward(micro_batch: int, chunk: int) -> Tensor:
        ids, labels = batches[micro_batch]
        output: Tensor = models[chunk](ids, labels=labels)
        return output

    def loss(_: int, output: Tensor) -> tuple[Tensor, Tensor]:
        return output.sum(), output.sum().detach()

    b, s = batches[0][0].shape
    losses = pipeline.run(
        schedule,
        forward,
        loss,
        shape=hidden_shape(config, s, b, tp_group=groups.tp),
        dtype=config.params_dtype,
        device=torch.device("cpu"),
    )
    whole = models[0] if chunks == 1 else ModelChunks(models)
    finalize_gradients_(whole, tp_group=groups.tp, dp_group=groups.dp, embd_group=groups.embd)
    gradients = {name: grad for model in models for name, grad in whole_gradients(model, groups).items()}
    found = float(global_grad_norm(whole, tp_group=groups.tp, pp_group=groups.pp)) if with_norm else 0.0
    total = torch.stack(losses).sum() if stage == last else None
    if sizes.tied and "head.weight" in gradients:
        gradients["embedding.weight"] = gradients.pop("head.weight")
    return total, gradients, found


def lora(
    weight: Tensor, a: Tensor, b: Tensor, scaling: float, groups: Groups, *, kind: str, sequence_length: int | None
) -> nn.Module:
    make = column_linear if kind == "column" else row_linear
    outer = make(weight, None, groups, sequence_length=sequence_length)
    add_lora_(outer.inner, weight, a, b, scaling, groups)
    return outer


def merge(module: nn.Module) -> None:
    adapted: Any = module.inner
    adapted.merge_()


def seed(seed: int, groups: Groups) -> None:
    torch.manual_seed(seed)
    seed_streams(seed, groups.tp.rank())


def dropout(tensor: Tensor, p: float, groups: Groups, *, split: bool) -> Tensor:
    return sharded_dropout(tensor, p, dim=0 if split else None, group=groups.tp)


def recompute(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    result: Tensor = recomputed(function, *args)
    return result


def initial(kind: str, rows: int, columns: int, groups: Groups) -> Tensor:
    options: dict[str, Any] = {"group": groups.tp, "init": Normal(1.0)}
    layer: nn.Module
    if kind == "embedding":
        layer = VocabEmbedding(rows, columns, **options)
    else:
        layer = (ColumnLinear if kind == "column" else RowLinear)(columns, rows, False, **options)
    return whole_parameters(layer, groups)["weight"]


def _checkpoint_state(model: nn.Module, wrapped: _Optimizer, groups: Groups) -> dict[str, Any]:
    inner: Any = model.inner
    weights = sharded_state_dict(inner, group=groups.tp)
    return stored_weights(weights, wrapped.optimizer) | optimizer_state(weights, wrapped.optimizer)


def save(model: nn.Module, optimizer: _Optimizer, folder: Path, groups: Groups) -> None:
    world = torch.distributed.group.WORLD
    assert world is not None
    state = _checkpoint_state(model, optimizer, groups)
    checkpoint.save(folder, 2, state, {"step": 2}, group=world)


def load(model: nn.Module, optimizer: _Optimizer, folder: Path, groups: Groups) -> None:
    world, newest = torch.distributed.group.WORLD, checkpoint.latest(folder)
    assert world is not None
    assert newest is not None
    meta = checkpoint.load(newest, _checkpoint_state(model, optimizer, groups), group=world)
    optimizer.optimizer.set_step_(meta["step"])
