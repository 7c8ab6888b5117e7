"""Megatron's transformer layer and its specs, which are converted to the engine's layer spec.

A program's own attention, MLP or norm in a spec is built as in Megatron and called with Megatron's arguments.
"""

import functools
from dataclasses import dataclass, field, fields, replace
from typing import Any

from shardwise.core.errors import ConfigError
from shardwise.megatron.absent import absent_names
from shardwise.megatron.core import parallel_state
from shardwise.megatron.core.process_groups_config import ProcessGroupCollection, _groups_of
from shardwise.megatron.core.tensor_parallel.module import adopt_marks_, mark_replicas
from shardwise.megatron.core.transformer import layer_parts, module, moe, program_parts
from shardwise.megatron.core.transformer.transformer_config import TransformerConfig
from shardwise.megatron.surface import given, offer
from shardwise.models.transformer import attention as engine_attention, layer as engine_layer, mlp as engine_mlp
from shardwise.models.transformer.layer import TransformerLayerSpec
from shardwise.models.transformer.masks import AttnMaskType

__getattr__ = absent_names("transformer.transformer_layer", "models.gpt.gpt_layer_specs")


@dataclass
class TransformerLayerSubmodules:
    """Parts of ``TransformerLayer``, each a class or a ``ModuleSpec``.

    Attributes:
        input_layernorm, pre_mlp_layernorm: the same class, ``FusedLayerNorm`` or a class that is called with
            ``config``, ``hidden_size`` and ``eps``; the model's final norm uses it too.
        self_attention, mlp: ``SelfAttention``, and ``MLP`` or ``MoELayer``, or the program's own classes.
        self_attn_bda, mlp_bda: ``get_bias_dropout_add``.
        sharded_state_dict_keys_map: no effect; checkpoints use the parameters' names.
    """

    input_layernorm: Any = module.IdentityOp
    self_attention_hyper_connection: Any = module.IdentityOp
    self_attention: Any = module.IdentityOp
    self_attn_bda: Any = module.IdentityFuncOp
    pre_cross_attn_layernorm: Any = module.IdentityOp
    cross_attention_hyper_connection: Any = module.IdentityOp
    cross_attention: Any = module.IdentityOp
    cross_attn_bda: Any = module.IdentityFuncOp
    pre_mlp_layernorm: Any = module.IdentityOp
    mlp_hyper_connection: Any = module.IdentityOp
    mlp: Any = module.IdentityOp
    mlp_bda: Any = module.IdentityFuncOp
    sharded_state_dict_keys_map: dict[str, str] = field(default_factory=dict)


@dataclass
class TransformerBlockSubmodules:
    """Parts of a model's layers.

    Attributes:
        layer_specs: a spec of each layer, all equal; the config says which of them have experts.
        layer_norm: the norm after the last layer, which is of the layers' class; or None.
    """

    layer_specs: list[Any] | None = None
    layer_norm: Any = None


@dataclass(frozen=True)
class _Spec(TransformerLayerSpec):
    """An engine's layer spec.

    Attributes:
        has_fused_qkv, has_fused_fc1: whether the parameters of the norm before the attention, or before a dense MLP,
            are in the linear layer after it, as in Transformer Engine.
    """

    has_fused_qkv: bool = False
    has_fused_fc1: bool = False


def _move_norms_(layer: engine_layer.TransformerLayer, spec: TransformerLayerSpec, config: TransformerConfig) -> None:
    """Move parameters of a layer's norms into the linear layers, as the spec says, and give these Megatron's classes.

    May be called again.
    """
    parts: Any = layer
    if getattr(spec, "has_fused_qkv", False) and parts.input_layernorm is not None:
        layer_parts._move_norm_(parts.input_layernorm, parts.self_attention.linear_qkv)
    if (
        getattr(spec, "has_fused_fc1", False)
        and parts.pre_mlp_layernorm is not None
        and hasattr(parts.mlp, "linear_fc1")
    ):
        layer_parts._move_norm_(parts.pre_mlp_layernorm, parts.mlp.linear_fc1)
    for part in (parts.self_attention, parts.mlp):
        if isinstance(part, (engine_attention.SelfAttention, engine_mlp.MLP)):
            layer_parts._offer_linears_(part, config)


_NEEDED = ("input_layernorm", "self_attention", "mlp")
# Key in the ``metainfo`` of experts that only the layers of the config's ``moe_layer_freq`` have.
_BY_LAYER = "moe_layer_freq"


def get_transformer_layer_offset(
    config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> int:
    """Number of layers of the model before a stage, or before its chunk ``vp_stage``.

    Args:
        config: config with the distribution of layers over stages.
        vp_stage: index of the chunk, with interleaving.
        pp_rank: index of the stage; None means this rank's stage.

    Raises:
        ConfigError: there is no such stage or chunk.
    """
    return _chunk_of_layers(config, vp_stage, pp_rank).start


def _chunk_of_layers(config: TransformerConfig, vp_stage: int | None, pp_rank: int | None) -> range:
    """Return the layers of a stage's chunk, counted from 0 in the model; see ``get_transformer_layer_offset``."""
    stages = config.stage_layers()
    if len(stages) == 1 and len(stages[0]) == 1:
        return stages[0][0]
    stage = parallel_state.get_pipeline_model_parallel_rank() if pp_rank is None else pp_rank
    if not 0 <= stage < len(stages) or (vp_stage is None and len(stages[0]) > 1):
        raise ConfigError(
            f"pp_rank is {stage} and vp_stage {vp_stage}, of {len(stages)} stages with {len(stages[0])} chunks each; "
            "give a stage, and with several chunks a chunk"
        )
    chunks = stages[stage]
    if not 0 <= (vp_stage or 0) < len(chunks):
        raise ConfigError(f"vp_stage is {vp_stage}; it must be from 0 to {len(chunks) - 1}")
    return chunks[vp_stage or 0]


class BaseTransformerLayer:
    """Base class of transformer layers, for ``isinstance``."""


class TransformerLayer(  # type: ignore[misc]  # Megatron's layers return pairs.
    layer_parts._CalledAsMegatrons, engine_layer.TransformerLayer, module.MegatronModule, BaseTransformerLayer
):
    """The engine's ``TransformerLayer`` with Megatron's arguments.

    Args:
        config: sizes of the model.
        submodules: parts of the layer.
        layer_number: number of the layer within this stage, from 1.
        hidden_dropout: dropout probability; None means the config's.
        pg_collection: collection with the group ``tp``; None means the ambient topology's.
        vp_stage: index of this stage's chunk, with interleaving.
        add_layer_offset: whether to add the number of layers of earlier stages to ``layer_number``.
        pp_layer_offset: number of these layers; computed from ``config`` if None.
        is_mtp_layer: False.
        name: no effect.

    Raises:
        ConfigError: parts that layers do not support here.
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
        layer_parts._refuse(is_mtp_layer=is_mtp_layer or None)
        config.check_complete()
        if add_layer_offset:
            offset = get_transformer_layer_offset(config, vp_stage) if pp_layer_offset is None else pp_layer_offset
            layer_number += offset
        groups = _groups_of(pg_collection)
        self.tp_group = groups.tp
        spec = _of_submodules(submodules, config)
        super().__init__(config, spec, layer_number, self.tp_group, groups)
        _move_norms_(self, spec, config)
        adopt_marks_(self)
        mark_replicas(self)
        self.config = config
        config.note_read()
        if hidden_dropout is not None:
            self.dropout.p = hidden_dropout


def layer_spec_of(spec: Any, config: TransformerConfig) -> TransformerLayerSpec:
    """Convert Megatron's ``ModuleSpec`` to the engine's layer spec; an engine spec is returned unchanged.

    Raises:
        ConfigError: the spec is not of a ``TransformerLayer``, or has parts that layers do not support here.
    """
    if isinstance(spec, TransformerLayerSpec):
        return spec
    spec = _of_one_layer(spec)
    if not isinstance(spec, module.ModuleSpec) or module.get_module(spec) is not TransformerLayer:
        raise ConfigError(
            f"transformer_layer_spec is {spec!r}; give a ModuleSpec of TransformerLayer, whose norms, attention and "
            "MLP may be a program's own, or a shardwise.models.transformer.layer.TransformerLayerSpec"
        )
    return _of_submodules(spec.submodules, config)


def _of_one_layer(spec: Any) -> Any:
    """Return the spec of each layer, of the spec of a block."""
    parts = getattr(spec, "submodules", spec)
    if not isinstance(parts, TransformerBlockSubmodules):
        return spec
    first, *others = parts.layer_specs or [None]
    if any(other != first for other in others):
        raise ConfigError(
            "the layer_specs of a TransformerBlockSubmodules differ; all layers have one spec here, and the config's "
            "moe_layer_freq says which have experts"
        )
    norm = parts.layer_norm
    if norm is not None and norm not in (layer_parts.FusedLayerNorm, first and first.submodules.input_layernorm):
        raise ConfigError(f"layer_norm of a TransformerBlockSubmodules is {norm!r}; it is of the layers' class here")
    return first


def _norm_before(parts: TransformerLayerSubmodules, norm: str, part: Any, linear: str) -> tuple[Any, bool]:
    """Return the norm ``norm`` of a layer, and whether it is in the linear layer after it, in ``part``."""
    fused = getattr(getattr(part, "submodules", None), linear, None)
    if module.get_module(fused) is not layer_parts.TELayerNormColumnParallelLinear:
        return getattr(parts, norm), False
    if module.get_module(getattr(parts, norm)) is not module.IdentityOp:
        raise ConfigError(f"{norm} is given, and {linear} has a norm already; leave one of them out")
    return layer_parts.FusedLayerNorm, True


def _of_submodules(parts: TransformerLayerSubmodules, config: TransformerConfig) -> TransformerLayerSpec:
    if not isinstance(parts, TransformerLayerSubmodules):
        raise ConfigError(f"a layer's submodules are {parts!r}; give TransformerLayerSubmodules")
    for part in fields(parts):
        if part.default is module.IdentityOp and part.name not in ("pre_mlp_layernorm", *_NEEDED):
            layer_parts._check_part(parts, part.name, module.IdentityOp)
    for name in ("self_attn_bda", "mlp_bda"):
        layer_parts._check_part(parts, name, layer_parts.get_bias_dropout_add)
    before_attention, fuses_qkv = _norm_before(parts, "input_layernorm", parts.self_attention, "linear_qkv")
    before_mlp, fuses_fc1 = _norm_before(parts, "pre_mlp_layernorm", parts.mlp, "linear_fc1")
    # The dense layers of a model in which others have experts.
    fuses_fc1 = fuses_fc1 or (fuses_qkv and bool(getattr(parts.mlp, "metainfo", {}).get(_BY_LAYER)))
    parts = replace(parts, input_layernorm=before_attention, pre_mlp_layernorm=before_mlp)
    for name in _NEEDED:
        if module.get_module(getattr(parts, name)) in (module.IdentityOp, None):
            raise ConfigError(f"{name} of a layer's submodules is not given; a layer has norms, attention and an MLP")
    norm, attention, mlp = parts.input_layernorm, parts.self_attention, parts.mlp
    if parts.pre_mlp_layernorm != norm:
        raise ConfigError(
            f"input_layernorm is {norm!r} and pre_mlp_layernorm {parts.pre_mlp_layernorm!r}; all norms of a layer are "
            "of one kind here"
        )
    own: dict[str, Any] = {"has_fused_qkv": fuses_qkv, "has_fused_fc1": fuses_fc1}
    if norm is not layer_parts.FusedLayerNorm:
        own["norm"] = functools.partial(program_parts.own_norm, norm)
    if module.get_module(attention) is layer_parts.SelfAttention:
        params = attention.params if isinstance(attention, module.ModuleSpec) else {}
        (getattr(attention, "submodules", None) or layer_parts.SelfAttentionSubmodules()).check(config)
        if params.keys() - {"attn_mask_type", "cp_comm_type"}:
            raise ConfigError(f"SelfAttention of a spec has params {sorted(params)}; it takes attn_mask_type alone")
        mask = params.get("attn_mask_type", AttnMaskType.padding)
        own["attention"] = functools.partial(engine_attention.SelfAttention, attn_mask_type=mask)
    else:
        own["attention"] = functools.partial(program_parts.own_attention, attention)
    if (
        isinstance(mlp, functools.partial)
        and mlp.func == layer_parts.MLP.as_mlp_submodule
        and mlp.keywords.keys() <= {"submodules"}
    ):
        mlp = module.ModuleSpec(layer_parts.MLP, submodules=mlp.keywords.get("submodules"))
    if module.get_module(mlp) is layer_parts.MLP and not getattr(mlp, "params", {}):
        (getattr(mlp, "submodules", None) or layer_parts.MLPSubmodules()).check()
        if config.num_moe_experts is not None:
            own["moe"] = lambda config, groups: engine_mlp.MLP(config, groups.tp)
    elif module.get_module(mlp) is moe.MoELayer:
        _check_layers_with_experts(mlp, config)
        own["moe"] = functools.partial(program_parts.own_experts, mlp)
    else:
        own["mlp"] = functools.partial(program_parts.own_mlp, mlp)
        own["moe"] = lambda config, groups: program_parts.own_mlp(mlp, config, groups.tp)
    return _Spec(**own)


def _check_layers_with_experts(part: Any, config: TransformerConfig) -> None:
    if config.num_moe_experts is None:
        raise ConfigError("a layer's mlp is MoELayer, and num_moe_experts of the config is None; set it")
    assert config.experts is not None
    if config.experts.layers is not None and not getattr(part, "metainfo", {}).get(_BY_LAYER):
        raise ConfigError(
            f"moe_layer_freq is {config.moe_layer_freq}, and the spec is of a layer with experts; "
            "get_gpt_decoder_block_spec describes a model in which only some layers have experts"
        )


def get_gpt_layer_local_spec(
    num_experts: int | None = None,
    moe_grouped_gemm: bool | None = False,
    qk_layernorm: bool | None = False,
    multi_latent_attention: bool | None = False,
    fp8: str | None = None,
    normalization: str | None = None,
    qk_l2_norm: bool | None = False,
    use_kitchen: bool = False,
    use_kitchen_attention: bool = False,
    kitchen_attention_backend: str = "sdpa",
) -> module.ModuleSpec:
    """Return the spec of a layer of attention and MLP, or of attention and experts.

    Args:
        num_experts: not None for a layer of experts, whose number is the config's ``num_moe_experts``.
        moe_grouped_gemm: whether the experts are ``GroupedMLP`` instead of ``SequentialMLP``.
        qk_layernorm, normalization: no effect; the config's fields of these names apply.
        multi_latent_attention, fp8, qk_l2_norm, use_kitchen, use_kitchen_attention, kitchen_attention_backend: only the
            defaults are supported.

    Raises:
        ConfigError: a layer that is not offered.
    """
    refused = {
        "multi_latent_attention": (multi_latent_attention, "attention is softmax attention of one kind"),
        "qk_l2_norm": (qk_l2_norm, "attention is softmax attention of one kind"),
        "fp8": (fp8, "matrices are multiplied in params_dtype"),
        "use_kitchen": (use_kitchen, "matrices are multiplied in params_dtype"),
        "use_kitchen_attention": (use_kitchen_attention, "attention is PyTorch's scaled_dot_product_attention"),
    }
    for name, (value, why) in refused.items():
        if value:
            raise ConfigError(f"{name} is {value!r}, which is not offered here: {why}; leave it out")
    causal = {"attn_mask_type": AttnMaskType.causal}
    mlp = module.ModuleSpec(layer_parts.MLP, submodules=layer_parts.MLPSubmodules())
    if num_experts is not None:
        experts = module.ModuleSpec(moe.SequentialMLP, submodules=layer_parts.MLPSubmodules())
        if moe_grouped_gemm:
            experts = module.ModuleSpec(moe.GroupedMLP)
        mlp = module.ModuleSpec(moe.MoELayer, submodules=moe.MoESubmodules(experts))
    return module.ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=layer_parts.FusedLayerNorm,
            self_attention=module.ModuleSpec(layer_parts.SelfAttention, causal, layer_parts.SelfAttentionSubmodules()),
            self_attn_bda=layer_parts.get_bias_dropout_add,
            pre_mlp_layernorm=layer_parts.FusedLayerNorm,
            mlp=mlp,
            mlp_bda=layer_parts.get_bias_dropout_add,
        ),
    )


def get_gpt_layer_with_transformer_engine_spec(
    num_experts: int | None = None,
    moe_grouped_gemm: bool | None = False,
    qk_layernorm: bool | None = False,
    multi_latent_attention: bool | None = False,
    fp8: str | None = None,
    qk_l2_norm: bool | None = False,
    use_te_op_fuser: bool | None = False,
    use_kitchen: bool = False,
    use_te_activation_func: bool = False,
    use_kitchen_attention: bool = False,
    kitchen_attention_backend: str = "sdpa",
) -> module.ModuleSpec:
    """Return a spec of the same layer, whose parameters have the names of Transformer Engine's layers.

    The norm before the attention, or a dense MLP, is in its first linear layer (``TELayerNormColumnParallelLinear``),
    and with ``moe_grouped_gemm`` experts are a ``TEGroupedMLP``.

    Args:
        use_te_op_fuser, use_te_activation_func: no effect.
        num_experts, moe_grouped_gemm, qk_layernorm, qk_l2_norm, fp8: as in ``get_gpt_layer_local_spec``.
        multi_latent_attention: as in ``get_gpt_layer_local_spec``.
        use_kitchen, use_kitchen_attention, kitchen_attention_backend: as in ``get_gpt_layer_local_spec``.

    Raises:
        ConfigError: a layer that is not offered.
    """
    spec = get_gpt_layer_local_spec(**given(locals(), but=("use_te_op_fuser", "use_te_activation_func")))
    parts, fused = spec.submodules, layer_parts.TELayerNormColumnParallelLinear
    parts.input_layernorm, parts.self_attention.submodules.linear_qkv = module.IdentityOp, fused
    if num_experts is None:
        parts.pre_mlp_layernorm, parts.mlp.submodules.linear_fc1 = module.IdentityOp, fused
    elif moe_grouped_gemm:
        parts.mlp.submodules.experts = module.ModuleSpec(moe.TEGroupedMLP, submodules=layer_parts.MLPSubmodules())
    return spec


def get_gpt_decoder_block_spec(
    config: TransformerConfig,
    use_transformer_engine: bool,
    normalization: str | None = None,
    qk_l2_norm: bool | None = False,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> module.ModuleSpec:
    """Return one spec for all layers; the model knows the layers of this stage, and those with experts.

    Raises:
        ConfigError: a layer that is not offered.
    """
    make = get_gpt_layer_with_transformer_engine_spec if use_transformer_engine else get_gpt_layer_local_spec
    spec = make(config.num_moe_experts, config.moe_grouped_gemm, qk_l2_norm=qk_l2_norm)
    spec.submodules.mlp.metainfo[_BY_LAYER] = True
    return spec


def get_gpt_decoder_layer_specs(
    config: TransformerConfig,
    use_transformer_engine: bool,
    normalization: str | None = None,
    qk_l2_norm: bool | None = False,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> list[module.ModuleSpec]:
    """Return the spec of ``get_gpt_decoder_block_spec`` once for each layer of the model."""
    return [get_gpt_decoder_block_spec(**given(locals()))] * config.num_layers


def get_gpt_layer_local_submodules(*args: Any, **kwargs: Any) -> TransformerLayerSubmodules:
    """Return the submodules of ``get_gpt_layer_local_spec``, with its arguments."""
    parts: TransformerLayerSubmodules = get_gpt_layer_local_spec(*args, **kwargs).submodules
    return parts


def get_gpt_layer_with_transformer_engine_submodules(*args: Any, **kwargs: Any) -> TransformerLayerSubmodules:
    """Return the submodules of ``get_gpt_layer_with_transformer_engine_spec``, with its arguments."""
    parts: TransformerLayerSubmodules = get_gpt_layer_with_transformer_engine_spec(*args, **kwargs).submodules
    return parts


def get_mlp_module_spec(
    use_te: bool | None = True,
    num_experts: int | None = None,
    moe_grouped_gemm: bool | None = False,
    fp8: str | None = None,
    moe_use_legacy_grouped_gemm: bool | None = False,
    use_te_op_fuser: bool | None = False,
) -> module.ModuleSpec:
    """Return the MLP or experts of the spec of a layer; ``fp8`` and the last two arguments have no effect."""
    make = get_gpt_layer_with_transformer_engine_spec if use_te else get_gpt_layer_local_spec
    spec: module.ModuleSpec = make(num_experts, moe_grouped_gemm).submodules.mlp
    return spec


def get_gpt_mtp_block_spec(
    config: TransformerConfig,
    spec: Any,
    use_transformer_engine: bool,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> None:
    """Return None, the value of ``GPTModel(mtp_block_spec=)``: a config with ``mtp_num_layers`` is refused."""


def get_bert_layer_with_transformer_engine_spec() -> module.ModuleSpec:
    """Return the spec of a layer whose tokens see all others but padding."""
    return _of_bert(get_gpt_layer_with_transformer_engine_spec())


def _of_bert(spec: module.ModuleSpec) -> module.ModuleSpec:
    spec.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.padding
    return spec


bert_layer_local_spec = _of_bert(get_gpt_layer_local_spec())
bert_layer_with_transformer_engine_spec = get_bert_layer_with_transformer_engine_spec()


offer(globals())
