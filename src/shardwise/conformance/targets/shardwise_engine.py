"""Target ``shardwise``: the layers, models and training of the library itself."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

import shardwise
from shardwise.conformance.dense import IGNORED, Batch, Sizes
from shardwise.conformance.dense_experts import ExpertSizes
from shardwise.conformance.targets.expert_names import from_engine, to_engine
from shardwise.conformance.targets.megatron_names import from_megatron, to_megatron
from shardwise.core.communication import moves
from shardwise.core.communication.collectives import all_reduce
from shardwise.core.initialization import Normal
from shardwise.core.random import seed_streams
from shardwise.core.sequence_view import ContextShard, SequenceView
from shardwise.core.sharded_state import gather_parameter, sharded_state_dict
from shardwise.core.sharding import ParamShard, Replicas
from shardwise.core.topology import Groups
from shardwise.models import GPT, ModelConfig
from shardwise.models.adapters import LoraConfig, LoraLinear
from shardwise.models.adapters.lora_experts import LoraExperts, LoraRouter
from shardwise.models.description import ModelChunks
from shardwise.models.experts import ClampedGate, Experts
from shardwise.models.transformer.heads import LatentAttention
from shardwise.models.transformer.moe import MoELayer
from shardwise.models.transformer.rotary import RotaryScaling
from shardwise.nn import ColumnLinear, RowLinear, VocabEmbedding
from shardwise.nn.dropout import sharded_dropout
from shardwise.nn.loss import vocab_parallel_cross_entropy
from shardwise.nn.recompute import recomputed
from shardwise.nn.replicated import set_replicas_
from shardwise.storage import checkpoint
from shardwise.training.gradients import GradientBuffers
from shardwise.training.optimizer.adamw import AdamW
from shardwise.training.optimizer.gradients import (
    clip_grad_norm_,
    finalize_gradients_,
    global_grad_norm,
    gradient_of,
    summed_over_other_groups,
)
from shardwise.training.optimizer.optimizer import ZeroOptimizer, optimizer_state, stored_weights
from shardwise.training.pipeline import Pipeline, make_schedule
from shardwise.training.pipeline.stage import hidden_shape

versions = {"shardwise": shardwise.__version__}
uneven = uneven_sequence = few_kv_heads = ignored_labels = padded_vocabulary = one_draw = True
windows = sinks = latent_attention = length_scaling = True


class _Called(nn.Module):
    """A module that is called through a function of it and the input, such as with a gather after the layer."""

    def __init__(self, inner: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = inner
        self._call = call

    def forward(self, *inputs: Tensor) -> Any:
        return self._call(*inputs)


def set_whole_(module: nn.Module, wholes: dict[str, Tensor], groups: Groups) -> None:
    """Set this rank's parts of the parameters of a layer or a model from whole tensors, by name."""
    with torch.no_grad():
        for name, shard in state_of(module, groups).items():
            shard.data.copy_(shard.layout.take(wholes[name], shard.rank))


def state_of(module: nn.Module, groups: Groups) -> dict[str, ParamShard]:
    """Return this rank's part of every parameter, by its name in the whole model."""
    state = sharded_state_dict(module, group=groups.tp)
    return {name: shard for name, shard in state.items() if isinstance(shard.data, Parameter)}


def column_linear(
    weight: Tensor,
    bias: Tensor | None,
    groups: Groups,
    *,
    gather_output: bool = False,
    skip_bias_add: bool = False,
    sequence_length: int | None = None,
) -> nn.Module:
    layer = ColumnLinear(
        weight.size(1),
        weight.size(0),
        bias is not None,
        group=groups.tp,
        sequence_parallel=sequence_length is not None,
        dtype=weight.dtype,
    )
    set_whole_(layer, {"weight": weight} | ({} if bias is None else {"bias": bias}), groups)
    layer.skip_bias_add = skip_bias_add
    view = None if sequence_length is None else SequenceView(sequence_length, groups.tp)

    def call(x: Tensor) -> Any:
        output = layer(x, sequence=view)
        if skip_bias_add:
            return output, layer.bias
        return layer.gather(output) if gather_output else output

    return _Called(layer, call)


def row_linear(
    weight: Tensor,
    bias: Tensor | None,
    groups: Groups,
    *,
    input_is_parallel: bool = True,
    skip_bias_add: bool = False,
    sequence_length: int | None = None,
) -> nn.Module:
    layer = RowLinear(
        weight.size(1),
        weight.size(0),
        bias is not None,
        group=groups.tp,
        sequence_parallel=sequence_length is not None,
        dtype=weight.dtype,
    )
    set_whole_(layer, {"weight": weight} | ({} if bias is None else {"bias": bias}), groups)

    def call(x: Tensor) -> Any:
        given = x if input_is_parallel else layer.scatter(x)
        # The engine's way to leave the bias to the caller is the product alone.
        return (layer._apply_linear(given, None), layer.bias) if skip_bias_add else layer(given)

    return _Called(layer, call)


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
        module,
        tp_group=groups.tp,
        dp_group=groups.dp,
        embd_group=groups.embd,
        expert_dp_group=groups.expert_dp,
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
    model = module.inner if isinstance(module, _Called) else module
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


class _DataParallel:
    def __init__(self, module: nn.Module, groups: Groups) -> None:
        assert groups.dp is not None
        self._module = module
        self._gradients = GradientBuffers(module, group=groups.dp, average=True, bucket_size=8)

    def __call__(self, *inputs: Tensor) -> Any:
        return self._module(*inputs)

    def no_sync(self) -> AbstractContextManager[Any]:
        return self._gradients.no_sync()

    def finish(self) -> None:
        self._gradients.finish()


def data_parallel(module: nn.Module, groups: Groups) -> _DataParallel:
    return _DataParallel(module, groups)


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


def config_of(sizes: Sizes, **changes: Any) -> ModelConfig:
    """Return the config of the cases' model."""
    fields = config_fields(sizes) | {"attention_sinks": sizes.sinks}
    if sizes.window is not None:
        fields["window_size"] = (sizes.window - 1, 0)
        fields["windowed_layers"] = [number % 2 == 0 for number in range(sizes.layers)]
    if sizes.latent is not None:
        latent = LatentAttention(
            sizes.latent.rank, sizes.head_dim, sizes.latent.rotated, sizes.latent.value, sizes.latent.query_rank
        )
        fields |= {"latent": latent, "kv_channels": None, "num_query_groups": None}
        scaling = _scaling(sizes)
        if scaling is not None:
            fields["softmax_scale"] = scaling.score_factor / math.sqrt(latent.head_width)
    return ModelConfig(**fields, **changes)


def _scaling(sizes: Sizes) -> RotaryScaling | None:
    if sizes.yarn is not None:
        yarn = sizes.yarn
        return RotaryScaling(
            "yarn", yarn.factor, yarn.trained_length, mscale=yarn.mscale, mscale_all_dim=yarn.mscale_all_dim
        )
    return None if sizes.trained_length is None else RotaryScaling("dynamic", 2.0, sizes.trained_length)


def config_fields(sizes: Sizes) -> dict[str, Any]:
    """Return the fields of a config of the cases' model, which Megatron's has too."""
    return {
        "num_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "num_attention_heads": sizes.heads,
        "num_query_groups": sizes.kv_heads,
        "kv_channels": sizes.head_dim,
        "ffn_hidden_size": sizes.ffn,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "layernorm_epsilon": sizes.epsilon,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "qk_layernorm": sizes.qk_norm,
        "params_dtype": torch.float64,
    }


def _gpt(sizes: Sizes, weights: dict[str, Tensor], groups: Groups, config: ModelConfig, **options: Any) -> GPT:
    model = GPT(
        config,
        sizes.vocab,
        64,
        groups=groups,
        position_embedding_type="rope",
        rotary_base=int(sizes.base),
        rope_scaling=_scaling(sizes),
        share_embeddings_and_output_weights=sizes.tied,
        **options,
    )
    wholes = to_megatron(weights, sizes)
    if sizes.tied:
        wholes["output_layer.weight"] = wholes["embedding.word_embeddings.weight"]
    set_whole_(model, wholes, groups)
    model.case_sizes = sizes  # type: ignore[assignment]
    return model


def language_model(
    sizes: Sizes, weights: dict[str, Tensor], groups: Groups, *, sequence_parallel: bool = False
) -> nn.Module:
    return _called(_gpt(sizes, weights, groups, config_of(sizes, sequence_parallel=sequence_parallel)))


def context_model(
    sizes: Sizes, weights: dict[str, Tensor], groups: Groups, *, sequence_parallel: bool = False
) -> nn.Module:
    model = _gpt(sizes, weights, groups, config_of(sizes, sequence_parallel=sequence_parallel))

    def call(ids: Tensor, labels: Tensor, documents: Tensor | None = None, tokens: Tensor | None = None) -> Any:
        shard = model.view_of(ids.size(1)).context
        assert shard is not None
        losses = model(ids, attention_mask=tokens, labels=labels, document_ids=documents)
        return losses, shard.positions(ids.device)

    return _Called(model, call)


def expert_layer(
    sizes: ExpertSizes,
    weights: dict[str, Tensor],
    groups: Groups,
    *,
    sequence_length: int | None = None,
    context_length: int | None = None,
    micro_batches: int = 1,
) -> nn.Module:
    spec = Experts(
        sizes.num,
        sizes.per_token,
        sizes.ffn,
        scores="sigmoid" if sizes.scores == "sigmoid" else "softmax",
        softmax_after_choice=sizes.scores == "chosen",
        normalizes_weights=sizes.normalizes,
        weight_scale=sizes.scale,
        num_groups=sizes.groups,
        groups_per_token=sizes.groups_per_token,
        shared_ffn_hidden_size=sizes.shared,
        shared_gate=sizes.shared is not None,
        biases=sizes.biases,
        gate=None if sizes.limit is None else ClampedGate(sizes.limit),
        selection_bias=sizes.choice_bias,
        weighs_input=sizes.weighs_input,
        aux_loss=sizes.aux_loss,
        z_loss=sizes.z_loss,
    )
    changes = {
        "hidden_size": sizes.hidden,
        "params_dtype": weights["router"].dtype,
        "sequence_parallel": sequence_length is not None,
        "experts": spec,
    }
    layer = MoELayer(ModelConfig(**config_fields(Sizes()) | changes), groups)
    layer.begin(1.0 / (groups.samples[1] * micro_batches))
    if layer.router.selection_bias is not None:
        layer.router.selection_bias.copy_(weights["choice_bias"])
    if sizes.lora is not None:
        layer.requires_grad_(False)
        config = LoraConfig(r=sizes.lora, lora_alpha=2 * sizes.lora)
        LoraExperts.add(layer.experts, {"up": config, "down": config})
        LoraRouter.add(layer.router, config)
    set_whole_(layer, to_engine(weights), groups)
    view = None if sequence_length is None else SequenceView(sequence_length, groups.tp)
    if context_length is not None:
        assert groups.cp is not None
        context = ContextShard(context_length, groups.cp)
        view = SequenceView(context.size, context=context)
    return _Called(layer, lambda x: layer(x, sequence=view))


def other_models(groups: Groups) -> dict[str, tuple[nn.Module, nn.Module]]:
    """Return a model with norms over all heads together (OLMo 2), and one with LayerNorm and sequence parallelism."""
    assert groups.dp is not None
    result: dict[str, tuple[nn.Module, nn.Module]] = {}
    kinds: dict[str, dict[str, Any]] = {
        "norms over all heads": {"qk_layernorm": True, "qk_layernorm_over_heads": True, "norm_position": "branch"},
        "norms of each head": {"qk_layernorm": True, "normalization": "LayerNorm", "sequence_parallel": True},
    }
    for name, changes in kinds.items():
        config = ModelConfig(**config_fields(Sizes()) | changes)
        whole, split = (GPT(config, 32, 64, groups=each) for each in (Groups(tp=groups.dp), groups))
        set_whole_(split, {key: param.detach() for key, param in whole.named_parameters()}, groups)
        split.case_sizes = None  # type: ignore[assignment]
        result[name] = (_called(whole), _called(split))
    return result


def _called(model: GPT) -> nn.Module:
    return _Called(model, lambda ids, labels: model(ids, labels=labels))


def num_labels(batches: Sequence[Batch], groups: Groups) -> Tensor:
    """Return the number of labels of all data-parallel ranks; context-parallel ranks have the same batches."""
    assert groups.dp is not None
    own = sum(int((labels != IGNORED).sum()) for _, labels in batches)
    _, num_ranks = groups.samples
    return all_reduce(torch.tensor(float(own), dtype=torch.float64), group=groups.dp) * (num_ranks / groups.dp.size())


def accumulate(model: nn.Module, batches: Sequence[Batch], groups: Groups) -> Tensor:
    assert groups.dp is not None
    count, total = num_labels(batches, groups), torch.zeros((), dtype=torch.float64)
    buffers: GradientBuffers | None = getattr(model, "case_buffers", None)
    for ids, labels in batches:
        output = model(ids, labels)
        losses = output[0] if isinstance(output, tuple) else output
        loss = losses.sum() / count
        loss.backward()
        total += loss.detach()
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
        _gpt(
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
    layer: Any = outer.inner
    adapted = LoraLinear.add(layer, LoraConfig(r=a.size(0), lora_alpha=scaling * a.size(0)), {"only": None})
    for name, param in adapted.named_parameters():
        param.requires_grad_("lora" in name)
    wholes = {"weight": weight, "lora.only.lora_A": a, "lora.only.lora_B": b}
    set_whole_(adapted, wholes, groups)
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
