"""Megatron's transformer layer, and what a spec of one makes of the engine's.

A program's own attention, MLP or norm in a spec is built as in Megatron, and called with Megatron's arguments.
"""

import functools
import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise.core.errors import ConfigError
from shardwise.megatron.absent import absent_names
from shardwise.megatron.core import parallel_state
from shardwise.megatron.core.process_groups_config import ProcessGroupCollection
from shardwise.megatron.core.tensor_parallel.attributes import adopt_marks_, mark_replicas
from shardwise.megatron.core.transformer.layer_arguments import check_part, engine_arguments, refuse, tp_group_of
from shardwise.megatron.core.transformer.layer_parts import (
    MLP,
    FusedLayerNorm,
    MLPSubmodules,
    SelfAttention,
    SelfAttentionSubmodules,
    get_bias_dropout_add,
)
from shardwise.megatron.core.transformer.module import MegatronModule
from shardwise.megatron.core.transformer.spec_utils import (
    IdentityFuncOp,
    IdentityOp,
    ModuleSpec,
    build_module,
    get_module,
)
from shardwise.megatron.core.transformer.transformer_config import TransformerConfig
from shardwise.models.config import ModelConfig
from shardwise.models.transformer import attention as engine_attention, layer as engine_layer
from shardwise.models.transformer.layer import TransformerLayerSpec
from shardwise.models.transformer.masks import AttentionMask, AttnMaskType

__all__ = [
    "BaseTransformerLayer",
    "TransformerLayer",
    "TransformerLayerSubmodules",
    "get_transformer_layer_offset",
    "layer_spec_of",
]

__getattr__ = absent_names("transformer.transformer_layer")


@dataclass
class TransformerLayerSubmodules:
    """Parts of ``TransformerLayer``, each a class or a ``ModuleSpec``.

    Attributes:
        input_layernorm, pre_mlp_layernorm: the same class, ``FusedLayerNorm`` or one that is called with ``config``,
            ``hidden_size`` and ``eps``; the model's last norm is of it too.
        self_attention, mlp: ``SelfAttention`` and ``MLP``, or a program's own.
        self_attn_bda, mlp_bda: ``get_bias_dropout_add``.
        sharded_state_dict_keys_map: accepted; names in checkpoints are those of the parameters.
    """

    input_layernorm: Any = IdentityOp
    self_attention_hyper_connection: Any = IdentityOp
    self_attention: Any = IdentityOp
    self_attn_bda: Any = IdentityFuncOp
    pre_cross_attn_layernorm: Any = IdentityOp
    cross_attention_hyper_connection: Any = IdentityOp
    cross_attention: Any = IdentityOp
    cross_attn_bda: Any = IdentityFuncOp
    pre_mlp_layernorm: Any = IdentityOp
    mlp_hyper_connection: Any = IdentityOp
    mlp: Any = IdentityOp
    mlp_bda: Any = IdentityFuncOp
    sharded_state_dict_keys_map: dict[str, str] = field(default_factory=dict)


def get_transformer_layer_offset(
    config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> int:
    """How many of the model's layers are before those of a stage, or of its chunk ``vp_stage``.

    Args:
        config: how layers are dealt out to stages.
        vp_stage: the chunk, with interleaving.
        pp_rank: the stage; this rank's if None.

    Raises:
        ConfigError: no such stage or chunk.
    """
    stages = config.stage_layers()
    if len(stages) == 1 and len(stages[0]) == 1:
        return 0
    stage = parallel_state.get_pipeline_model_parallel_rank() if pp_rank is None else pp_rank
    if not 0 <= stage < len(stages) or (vp_stage is None and len(stages[0]) > 1):
        raise ConfigError(
            f"pp_rank is {stage} and vp_stage {vp_stage}, of {len(stages)} stages with {len(stages[0])} chunks each; "
            "give a stage, and with several chunks a chunk"
        )
    chunks = stages[stage]
    if not 0 <= (vp_stage or 0) < len(chunks):
        raise ConfigError(f"vp_stage is {vp_stage}; it must be from 0 to {len(chunks) - 1}")
    return chunks[vp_stage or 0].start


class BaseTransformerLayer:
    """Base by which programs know a transformer layer."""


class TransformerLayer(engine_layer.TransformerLayer, MegatronModule, BaseTransformerLayer):
    """The engine's ``TransformerLayer`` with Megatron's arguments.

    Args:
        config: sizes of the model.
        submodules: what the layer is made of.
        layer_number: from 1, within this stage.
        hidden_dropout: the config's if None.
        pg_collection: group ``tp``; the ambient topology's if None.
        vp_stage: this stage's chunk, with interleaving.
        add_layer_offset: count the layers of the stages before this one too.
        pp_layer_offset: how many they are; found from ``config`` if None.
        is_mtp_layer: False.
        name: accepted; nothing depends on it.

    Raises:
        ConfigError: parts that a layer does not have here.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        hidden_dropout: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
        is_mtp_layer: bool = False,
        add_layer_offset: bool = True,
        pp_layer_offset: int | None = None,
        name: str | None = None,
    ) -> None:
        refuse(is_mtp_layer=is_mtp_layer or None)
        if add_layer_offset:
            layer_number += (
                get_transformer_layer_offset(config, vp_stage) if pp_layer_offset is None else pp_layer_offset
            )
        self.tp_group = tp_group_of(pg_collection)
        super().__init__(config, _of_submodules(submodules, config), layer_number, self.tp_group)
        adopt_marks_(self)
        mark_replicas(self)
        self.config = config
        if hidden_dropout is not None:
            self.dropout.p = hidden_dropout

    def forward(  # type: ignore[override]  # Megatron's layers return pairs.
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **arguments: Any
    ) -> tuple[Tensor, None]:
        """``[s, b, h]`` (``[s/t, b, h]`` with sequence parallelism) to the same; and None, for the context.

        The arguments are those of ``SelfAttention.forward``.

        Raises:
            ConfigError: an argument that must be None.
        """
        given = engine_arguments(self, hidden_states, attention_mask, **arguments)
        return super().forward(hidden_states, **given), None


def layer_spec_of(spec: Any, config: TransformerConfig) -> TransformerLayerSpec:
    """The engine's spec of a layer, of Megatron's ``ModuleSpec`` or of its own.

    Raises:
        ConfigError: a spec of something else than a ``TransformerLayer``, or of parts that it does not have here.
    """
    if isinstance(spec, TransformerLayerSpec):
        return spec
    if not isinstance(spec, ModuleSpec) or get_module(spec) is not TransformerLayer:
        raise ConfigError(
            f"transformer_layer_spec is {spec!r}; give a ModuleSpec of TransformerLayer, whose norms, attention and "
            "MLP may be a program's own, or a shardwise.models.transformer.layer.TransformerLayerSpec"
        )
    return _of_submodules(spec.submodules, config)


def _of_submodules(parts: TransformerLayerSubmodules, config: TransformerConfig) -> TransformerLayerSpec:
    if not isinstance(parts, TransformerLayerSubmodules):
        raise ConfigError(f"a layer's submodules are {parts!r}; give TransformerLayerSubmodules")
    for name in (
        "self_attention_hyper_connection",
        "pre_cross_attn_layernorm",
        "cross_attention_hyper_connection",
        "cross_attention",
        "mlp_hyper_connection",
    ):
        check_part(parts, name, IdentityOp)
    for name in ("self_attn_bda", "mlp_bda"):
        check_part(parts, name, get_bias_dropout_add)
    for name in ("input_layernorm", "self_attention", "mlp"):
        if get_module(getattr(parts, name)) in (IdentityOp, None):
            raise ConfigError(f"{name} of a layer's submodules is not given; a layer has norms, attention and an MLP")
    norm, attention, mlp = parts.input_layernorm, parts.self_attention, parts.mlp
    if parts.pre_mlp_layernorm != norm:
        raise ConfigError(
            f"input_layernorm is {norm!r} and pre_mlp_layernorm {parts.pre_mlp_layernorm!r}; all norms of a layer are "
            "of one kind here"
        )
    own: dict[str, Any] = {}
    if norm is not FusedLayerNorm:
        own["norm"] = functools.partial(_own_norm, norm)
    if get_module(attention) is SelfAttention:
        params = attention.params if isinstance(attention, ModuleSpec) else {}
        (getattr(attention, "submodules", None) or SelfAttentionSubmodules()).check(config)
        if params.keys() - {"attn_mask_type", "cp_comm_type"}:
            raise ConfigError(f"SelfAttention of a spec has params {sorted(params)}; it takes attn_mask_type alone")
        mask = params.get("attn_mask_type", AttnMaskType.padding)
        own["attention"] = functools.partial(engine_attention.SelfAttention, attn_mask_type=mask)
    else:
        own["attention"] = functools.partial(_own_attention, attention)
    if (
        isinstance(mlp, functools.partial)
        and mlp.func == MLP.as_mlp_submodule
        and mlp.keywords.keys() <= {"submodules"}
    ):
        mlp = ModuleSpec(MLP, submodules=mlp.keywords.get("submodules"))
    if get_module(mlp) is MLP and not getattr(mlp, "params", {}):
        (getattr(mlp, "submodules", None) or MLPSubmodules()).check()
    else:
        own["mlp"] = functools.partial(_own_mlp, mlp)
    return TransformerLayerSpec(**own)


def _own_norm(part: Any, config: ModelConfig) -> nn.Module:
    norm: nn.Module = build_module(part, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
    return norm


def _own_attention(part: Any, config: ModelConfig, layer_number: int, group: ProcessGroup) -> nn.Module:
    """A program's attention, which is called as Megatron's layer calls it, where the engine's layer calls its own."""
    options = _accepted(part, pg_collection=ProcessGroupCollection(tp=group))
    module: nn.Module = build_module(part, config=config, layer_number=layer_number, **options)
    before = functools.partial(_call_of_attention, interleaved=config.rotary_interleaved)
    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(_add_bias)
    return module


def _own_mlp(part: Any, config: ModelConfig, group: ProcessGroup) -> nn.Module:
    collection = ProcessGroupCollection(tp=group)
    options = _accepted(part, pg_collection=collection, is_mtp_layer=False)
    if "pg_collection" not in options:
        options |= _accepted(part, tp_group=group)
    module: nn.Module = build_module(part, config=config, **options)
    module.register_forward_pre_hook(_call_of_mlp, with_kwargs=True)
    module.register_forward_hook(_add_bias)
    return module


def _accepted(part: Any, **options: Any) -> dict[str, Any]:
    """Those of ``options`` that the class of a spec names, or all if it takes any."""
    parameters = inspect.signature(get_module(part)).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return {name: value for name, value in options.items() if takes_any or name in parameters}


def _call_of_mlp(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {}


def _call_of_attention(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, interleaved: bool
) -> tuple[Any, dict[str, Any]]:
    """Megatron's keyword arguments, of the engine's."""
    mask: AttentionMask = kwargs["attention_mask"]
    if mask.alibi_slopes is not None:
        raise ConfigError(
            f"{type(module).__name__} is an attention of the program, and the model has ALiBi, which only "
            "SelfAttention knows; use another position_embedding_type"
        )
    forbidden, ids = mask.forbidden, mask.document_ids
    if ids is not None:
        others = (ids[:, :, None] != ids[:, None, :]).unsqueeze(1)
        forbidden = others if forbidden is None else forbidden | others
    call: dict[str, Any] = {"attention_mask": forbidden}
    if kwargs.get("cache") is not None:
        call["inference_context"] = kwargs["cache"]
    if kwargs.get("rotary") is not None:
        cos, sin = kwargs["rotary"]
        wide = torch.promote_types(cos.dtype, torch.float32)
        angles = torch.atan2(sin.to(wide), cos.to(wide))
        call["rotary_pos_emb"] = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    return args, call


def _add_bias(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    if not isinstance(output, tuple):
        return output
    product, bias = output[:2]
    return product if bias is None else product + bias
