"""Megatron's specs of a GPT layer, whose norms, attention and MLP a program may replace; the config says the rest."""

from shardwise.core.errors import ConfigError
from shardwise.megatron.arguments import given
from shardwise.megatron.core.transformer.layer_parts import (
    MLP,
    FusedLayerNorm,
    MLPSubmodules,
    SelfAttention,
    SelfAttentionSubmodules,
    get_bias_dropout_add,
)
from shardwise.megatron.core.transformer.spec_utils import ModuleSpec
from shardwise.megatron.core.transformer.transformer_config import TransformerConfig
from shardwise.megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from shardwise.models.transformer.masks import AttnMaskType

__all__ = ["get_gpt_decoder_block_spec", "get_gpt_layer_local_spec", "get_gpt_layer_with_transformer_engine_spec"]


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
) -> ModuleSpec:
    """A layer of attention and MLP.

    Args:
        qk_layernorm, normalization: accepted for programs that pass them; the config's fields of these names decide.
        num_experts, moe_grouped_gemm, multi_latent_attention, fp8, qk_l2_norm, use_kitchen, use_kitchen_attention,
            kitchen_attention_backend: refused, unless left at their defaults.

    Raises:
        ConfigError: a layer that is not offered.
    """
    refused = {
        "num_experts": (num_experts, "every MLP is dense"),
        "moe_grouped_gemm": (moe_grouped_gemm, "every MLP is dense"),
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
    return ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=FusedLayerNorm,
            self_attention=ModuleSpec(SelfAttention, params=causal, submodules=SelfAttentionSubmodules()),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=FusedLayerNorm,
            mlp=ModuleSpec(MLP, submodules=MLPSubmodules()),
            mlp_bda=get_bias_dropout_add,
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
) -> ModuleSpec:
    """The same layer: there is one implementation, on PyTorch alone, and Transformer Engine is not needed.

    Args:
        use_te_op_fuser, use_te_activation_func: change nothing.
        num_experts, moe_grouped_gemm, qk_layernorm, multi_latent_attention, fp8, qk_l2_norm, use_kitchen,
            use_kitchen_attention, kitchen_attention_backend: as for ``get_gpt_layer_local_spec``.

    Raises:
        ConfigError: a layer that is not offered.
    """
    return get_gpt_layer_local_spec(**given(locals(), but=("use_te_op_fuser", "use_te_activation_func")))


def get_gpt_decoder_block_spec(
    config: TransformerConfig,
    use_transformer_engine: bool,
    normalization: str | None = None,
    qk_l2_norm: bool | None = False,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> ModuleSpec:
    """The spec of every layer: all are alike, and the model knows which are this stage's.

    Raises:
        ConfigError: a layer that is not offered.
    """
    return get_gpt_layer_local_spec(normalization=normalization, qk_l2_norm=qk_l2_norm)
