"""Layers and models of the target ``shardwise``, made from the whole weights of the cases."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from shardwise.conformance.dense import Sizes
from shardwise.conformance.dense_comparison import Called
from shardwise.conformance.dense_experts import ExpertSizes
from shardwise.conformance.targets.expert_names import to_engine
from shardwise.conformance.targets.megatron_names import config_fields, to_megatron
from shardwise.core.sequence_view import SequenceView
from shardwise.core.sharded_state import sharded_state_dict
from shardwise.core.sharding import ParamShard
from shardwise.core.topology import Groups
from shardwise.models import GPT, ModelConfig
from shardwise.models.adapters import LoraConfig, LoraLinear
from shardwise.models.adapters.lora_experts import LoraExperts, LoraRouter
from shardwise.models.experts import ClampedGate, Experts
from shardwise.models.experts.moe import MoELayer
from shardwise.models.transformer.heads import LatentAttention
from shardwise.models.transformer.rotary import RotaryScaling


def set_whole_(module: nn.Module, wholes: Mapping[str, Any], groups: Groups) -> None:
    """Set this rank's parts of the parameters of a layer or a model from whole tensors, by name."""
    with torch.no_grad():
        for name, shard in state_of(module, groups).items():
            shard.data.copy_(shard.layout.take(wholes[name], shard.rank))


def set_model_(model: Any, sizes: Sizes, weights: dict[str, Tensor], groups: Groups) -> None:
    """Set this rank's parts of the parameters of a language model or of a stage of it."""
    wholes = to_megatron(weights, sizes)
    if sizes.tied:
        wholes["output_layer.weight"] = wholes["embedding.word_embeddings.weight"]
    set_whole_(model, wholes, groups)
    model.case_sizes = sizes


def add_lora_(layer: Any, weight: Tensor, a: Tensor, b: Tensor, scaling: float, groups: Groups) -> Any:
    """Add an adapter with these whole factors to a layer with this whole weight; only the factors are trained."""
    adapted = LoraLinear.add(layer, LoraConfig(r=a.size(0), lora_alpha=scaling * a.size(0)), {"only": None})
    for name, param in adapted.named_parameters():
        param.requires_grad_("lora" in name)
    set_whole_(adapted, {"weight": weight, "lora.only.lora_A": a, "lora.only.lora_B": b}, groups)
    return adapted


def state_of(module: nn.Module, groups: Groups) -> dict[str, ParamShard]:
    """Return this rank's part of every parameter, by its name in the whole model."""
    state = sharded_state_dict(module, group=groups.tp)
    return {name: shard for name, shard in state.items() if isinstance(shard.data, Parameter)}


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


def gpt(sizes: Sizes, weights: dict[str, Tensor], groups: Groups, config: ModelConfig, **options: Any) -> GPT:
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
    set_model_(model, sizes, weights, groups)
    return model


def language_model(
    sizes: Sizes, weights: dict[str, Tensor], groups: Groups, *, sequence_parallel: bool = False
) -> nn.Module:
    return _called(gpt(sizes, weights, groups, config_of(sizes, sequence_parallel=sequence_parallel)))


def context_model(
    sizes: Sizes, weights: dict[str, Tensor], groups: Groups, *, sequence_parallel: bool = False, by_heads: bool = False
) -> nn.Module:
    way = "a2a" if by_heads else "all_gather"
    model = gpt(sizes, weights, groups, config_of(sizes, sequence_parallel=sequence_parallel, cp_comm_type=way))

    def call(ids: Tensor, labels: Tensor, documents: Tensor | None = None, tokens: Tensor | None = None) -> Any:
        shard = model.view_of(ids.size(1)).context
        assert shard is not None
        losses = model(ids, attention_mask=tokens, labels=labels, document_ids=documents)
        return losses, shard.positions(ids.device)

    return Called(model, call)


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
    layer.begin(1.0 / (groups.data.samples[1] * micro_batches))
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
        view = groups.data.view(context_length, None)
    return Called(layer, lambda x: layer(x, sequence=view))


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
    return Called(model, lambda ids, labels: model(ids, labels=labels))
