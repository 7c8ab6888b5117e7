"""One transformer: its sizes, what its layers are made of, how it starts."""

# ruff: noqa: RUF009 - `unused` and `refused` are dataclass fields

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor

from shardwise.config.fields import refused, unused
from shardwise.config.model_parallel import ModelParallelConfig
from shardwise.errors import ConfigError
from shardwise.initialization import InitMethod, init_method_normal, scaled_init_method_normal
from shardwise.sharding import stage_layers

Normalization = Literal["LayerNorm", "RMSNorm"]
NormPosition = Literal["pre", "post"]

ATTENTION_BACKENDS = ("auto", "flash", "fused", "unfused", "local")

_ONE_ATTENTION = "attention is PyTorch's scaled_dot_product_attention"
_ONE_NORM = "PyTorch's own norm kernel is used"
_NO_FUSION = "operations are fused by torch.compile, not by a flag"
_NO_RECOMPUTE = "the transformer block saves its activations; recompute with tensor_parallel.checkpoint"
_NO_EXPERTS = "every MLP of the transformer is dense"
_NO_MAMBA = "every layer is attention and an MLP"
_NO_VARIANTS = "every attention layer is softmax attention over all positions"
_NO_LOW_PRECISION = "matrices are multiplied in params_dtype"
_NO_GRAPHS = "capture a CUDA graph around the model instead"
_PLAIN_ATTENTION = "every attention layer is softmax attention of one kind"
_PLAIN_MLP = "the MLP is activation_func(x W1) W2, or activation_func(x W1) * (x W3) W2 if gated"


@dataclass
class TransformerConfig(ModelParallelConfig):
    """One transformer: its sizes, what its layers are made of, how it starts. Field names are those of the reference.

    Attributes:
        num_layers: number of transformer layers.
        num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage: layers of that stage, over all its
            chunks; dealt out like the others' if None.
        account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split: let the embedding, the output
            layer with the loss, weigh as much as a layer when layers are dealt out to stages.
        hidden_size: width of the residual stream.
        num_attention_heads: number of query heads.
        num_query_groups: number of key-value heads; ``num_attention_heads`` if None (multi-head attention).
        ffn_hidden_size: width of the MLP; ``4 * hidden_size`` if None.
        kv_channels: width of a head; ``hidden_size / num_attention_heads`` if None.
        hidden_dropout: dropout probability on the residual branches and the embedding.
        attention_dropout: dropout probability on the attention weights.
        layernorm_epsilon: added to the variance.
        norm_position: ``"pre"``, a layer is ``x + f(norm(x))``, or ``"post"``, it is ``norm(x + f(x))`` (BERT).
        apply_residual_connection_post_layernorm: with pre-norm, ``norm(x) + f(norm(x))`` in place of ``x + f(norm(x))``
            (an option of BLOOM).
        embedding_layernorm: a norm after the embedding (BLOOM, BERT).
        final_layernorm: a norm after the last layer.
        layernorm_zero_centered_gamma: norms keep ``weight - 1``, which starts at 0, so that weight decay pulls towards
            1.
        qk_layernorm: norms of width ``kv_channels`` on each head's query and key, before rotation (Qwen 3).
        softmax_scale: factor of the attention scores; ``1 / sqrt(kv_channels)`` if None.
        window_size: ``(before, after)``: positions that a token sees on each side of itself; -1 is no bound. Mistral's
            window of ``w`` tokens is ``(w - 1, 0)``.
        attention_backend: ``"auto"`` leaves the kernel to PyTorch; ``"flash"``, ``"fused"`` (memory-efficient or cuDNN)
            and ``"unfused"`` ask for that one; ``"local"`` is attention written out. An enum with these names will do.
        rotary_interleaved: rotary pairs are elements ``2i`` and ``2i + 1``, not ``i`` and ``i + d/2``.
        add_bias_linear: whether linear layers have biases.
        add_qkv_bias: give the query-key-value projection a bias even where other linear layers have none; true once
            the config is made if ``add_bias_linear`` is.
        gated_linear_unit: multiply the activation by a second projection (SwiGLU with ``activation_func=F.silu``).
        activation_func: elementwise function of the MLP.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        init_method: initial values of weights; normal with ``init_method_std`` if None.
        output_layer_init_method: initial values of the weights that write to the residual stream; normal with
            ``init_method_std / sqrt(2 * num_layers)`` if None.
        init_method_std: standard deviation of the normal.

    Other fields are accepted for programs that set them, as in ``ModelParallelConfig``: what changes nothing here warns
    once per process, and what would change numbers raises.

    Raises:
        ConfigError: a value that cannot be, two that contradict each other, or an option that is not offered.
    """

    num_layers: int = 0
    mtp_num_layers: int | None = refused(None, "each position predicts the next token only")
    mtp_loss_scaling_factor: float | None = unused(0.1, "each position predicts the next token only")
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    pipeline_model_parallel_layout: Any = refused(None, "layers are dealt out by the four fields beside it")
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    hidden_size: int = 0
    num_attention_heads: int = 0
    attention_backend: Any = "auto"
    softmax_scale: float | None = None
    softmax_type: str = refused("vanilla", _PLAIN_ATTENTION)
    num_query_groups: int | None = None
    ffn_hidden_size: int | None = None
    kv_channels: int | None = None
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    fp32_residual_connection: bool = refused(False, "the residual stream is in params_dtype")
    apply_residual_connection_post_layernorm: bool = False
    layernorm_epsilon: float = 1e-5
    layernorm_zero_centered_gamma: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    gated_linear_unit: bool = False
    activation_func: Callable[[Tensor], Tensor] = F.gelu
    activation_func_fp8_input_store: bool = refused(False, _NO_LOW_PRECISION)
    glu_linear_offset: float = refused(0.0, _PLAIN_MLP)
    activation_func_clamp_value: float | None = refused(None, _PLAIN_MLP)
    num_moe_experts: int | None = refused(None, _NO_EXPERTS)
    rotary_interleaved: bool = False
    window_size: tuple[int, int] | None = None
    window_attn_skip_freq: Any = refused(None, _PLAIN_ATTENTION)
    normalization: Normalization = "LayerNorm"
    qk_layernorm: bool = False
    qk_l2_norm: bool = refused(False, _PLAIN_ATTENTION)
    qk_clip: bool = refused(False, _PLAIN_ATTENTION)
    qk_clip_alpha: float = unused(0.5, _PLAIN_ATTENTION)
    qk_clip_threshold: float = unused(100, _PLAIN_ATTENTION)
    log_max_attention_logit: bool = unused(False, _ONE_ATTENTION)
    attention_output_gate: bool = refused(False, _PLAIN_ATTENTION)
    test_mode: bool = unused(False, "there are no run-time tests")
    calculate_per_token_loss: bool = refused(False, "losses are returned per token; average them as you wish")
    multi_latent_attention: bool = refused(False, _PLAIN_ATTENTION)
    no_rope_freq: Any = refused(None, "rotary positions are used in every layer or in none")
    experimental_attention_variant: str | None = refused(None, _PLAIN_ATTENTION)
    linear_attention_type: str | None = refused(None, _PLAIN_ATTENTION)
    dsa_indexer_n_heads: int | None = unused(None, _NO_VARIANTS)
    dsa_indexer_head_dim: int | None = unused(None, _NO_VARIANTS)
    dsa_indexer_topk: int | None = unused(None, _NO_VARIANTS)
    dsa_indexer_loss_coeff: float | None = unused(None, _NO_VARIANTS)
    dsa_indexer_use_sparse_loss: bool = unused(False, _NO_VARIANTS)
    linear_attention_freq: Any = unused(None, _NO_VARIANTS)
    linear_conv_kernel_dim: int | None = unused(4, _NO_VARIANTS)
    linear_key_head_dim: int | None = unused(128, _NO_VARIANTS)
    linear_value_head_dim: int | None = unused(128, _NO_VARIANTS)
    linear_num_key_heads: int | None = unused(16, _NO_VARIANTS)
    linear_num_value_heads: int | None = unused(32, _NO_VARIANTS)

    init_method: InitMethod | None = None
    output_layer_init_method: InitMethod | None = None
    init_method_std: float = 0.02
    embedding_init_method: InitMethod | None = refused(None, "the embedding starts from init_method")
    embedding_init_method_std: float | None = refused(None, "the embedding starts from init_method")
    init_model_with_meta_device: bool = unused(False, "make the model under torch.device('meta') instead")
    use_mup: bool = refused(False, "widths are not rescaled")

    apply_query_key_layer_scaling: bool = unused(False, _ONE_ATTENTION + ", which needs no scaling by layer")
    attention_softmax_in_fp32: bool = unused(True, _ONE_ATTENTION + ", whose softmax is in fp32 or wider")
    disable_bf16_reduced_precision_matmul: bool = unused(
        False, "set torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction instead"
    )

    bias_activation_fusion: bool = unused(False, _NO_FUSION)
    masked_softmax_fusion: bool = unused(False, _ONE_ATTENTION)
    persist_layer_norm: bool = unused(False, _ONE_NORM)
    memory_efficient_layer_norm: bool = unused(False, _ONE_NORM)
    bias_dropout_fusion: bool = unused(False, _NO_FUSION)
    apply_rope_fusion: bool = unused(False, _NO_FUSION)
    fused_single_qkv_rope: bool = unused(False, _NO_FUSION)
    use_fused_weighted_squared_relu: bool = unused(False, _NO_FUSION)
    use_te_activation_func: bool = unused(False, _NO_FUSION)

    recompute_granularity: str | None = unused(None, _NO_RECOMPUTE)
    recompute_method: str | None = unused(None, _NO_RECOMPUTE)
    recompute_num_layers: int | None = unused(None, _NO_RECOMPUTE)
    distribute_saved_activations: bool | None = unused(False, _NO_RECOMPUTE)
    recompute_modules: Sequence[str] | None = unused(None, _NO_RECOMPUTE)

    fp8: str | None = refused(None, _NO_LOW_PRECISION)
    fp8_recipe: str | None = unused("delayed", _NO_LOW_PRECISION)
    fp8_param: bool = refused(False, _NO_LOW_PRECISION)
    fp8_margin: int = unused(0, _NO_LOW_PRECISION)
    fp8_interval: int = unused(1, _NO_LOW_PRECISION)
    fp8_amax_history_len: int = unused(1, _NO_LOW_PRECISION)
    fp8_amax_compute_algo: str = unused("most_recent", _NO_LOW_PRECISION)
    fp8_wgrad: bool = unused(True, _NO_LOW_PRECISION)
    fp8_dot_product_attention: bool = refused(False, _NO_LOW_PRECISION)
    fp8_multi_head_attention: bool = refused(False, _NO_LOW_PRECISION)
    tp_only_amax_red: bool = unused(False, _NO_LOW_PRECISION)
    fp4: str | None = refused(None, _NO_LOW_PRECISION)
    fp8_quantizer_factory: str | None = unused(None, _NO_LOW_PRECISION)
    first_last_layers_bf16: bool = unused(False, _NO_LOW_PRECISION)
    num_layers_at_start_in_bf16: int = unused(1, _NO_LOW_PRECISION)
    num_layers_at_end_in_bf16: int = unused(1, _NO_LOW_PRECISION)
    fp4_recipe: str | None = unused("nvfp4", _NO_LOW_PRECISION)
    fp4_param: bool = refused(False, _NO_LOW_PRECISION)
    fp4_quantizer_factory: str | None = unused(None, _NO_LOW_PRECISION)
    use_kitchen: bool = refused(False, _NO_LOW_PRECISION)
    use_kitchen_attention: bool = refused(False, _NO_LOW_PRECISION)
    kitchen_attention_backend: str = unused("sdpa", _NO_LOW_PRECISION)
    quant_recipe: Any = refused(None, _NO_LOW_PRECISION)

    moe_shared_expert_intermediate_size: int | None = refused(None, _NO_EXPERTS)
    moe_shared_expert_overlap: bool = unused(False, _NO_EXPERTS)
    moe_layer_freq: Any = unused(1, _NO_EXPERTS)
    moe_ffn_hidden_size: int | None = unused(None, _NO_EXPERTS)
    moe_router_load_balancing_type: Any = unused("aux_loss", _NO_EXPERTS)
    moe_router_topk: int = unused(2, _NO_EXPERTS)
    moe_router_pre_softmax: bool = unused(False, _NO_EXPERTS)
    moe_router_score_function: str = unused("softmax", _NO_EXPERTS)
    moe_router_dtype: str | None = unused(None, _NO_EXPERTS)
    moe_grouped_gemm: bool = unused(False, _NO_EXPERTS)
    moe_aux_loss_coeff: Any = unused(0.0, _NO_EXPERTS)
    moe_z_loss_coeff: float | None = unused(None, _NO_EXPERTS)
    moe_input_jitter_eps: float | None = unused(None, _NO_EXPERTS)
    moe_token_dropping: bool = unused(False, _NO_EXPERTS)
    moe_token_dispatcher_type: str = unused("allgather", _NO_EXPERTS)
    moe_expert_capacity_factor: float | None = unused(None, _NO_EXPERTS)
    moe_pad_expert_input_to_capacity: bool = unused(False, _NO_EXPERTS)
    moe_permute_fusion: bool = unused(False, _NO_EXPERTS)
    moe_shared_expert_gate: bool = unused(False, _NO_EXPERTS)
    moe_enable_routing_replay: bool = unused(False, _NO_EXPERTS)
    moe_router_topk_limited_devices: int | None = unused(None, _NO_EXPERTS)
    moe_router_padding_for_quantization: bool = unused(False, _NO_EXPERTS)
    moe_router_padding_for_fp8: bool = unused(False, _NO_EXPERTS)
    moe_router_num_groups: int | None = unused(None, _NO_EXPERTS)
    moe_router_group_topk: int | None = unused(None, _NO_EXPERTS)
    moe_router_topk_scaling_factor: float | None = unused(None, _NO_EXPERTS)
    moe_router_enable_expert_bias: bool = unused(False, _NO_EXPERTS)
    moe_router_bias_update_rate: float = unused(1e-3, _NO_EXPERTS)
    moe_router_force_load_balancing: bool = unused(False, _NO_EXPERTS)
    moe_router_fusion: bool = unused(False, _NO_EXPERTS)
    moe_use_legacy_grouped_gemm: bool = unused(False, _NO_EXPERTS)
    moe_enable_deepep: bool = unused(False, _NO_EXPERTS)
    moe_flex_dispatcher_backend: str = unused("deepep", _NO_EXPERTS)
    moe_per_layer_logging: bool = unused(False, _NO_EXPERTS)
    moe_token_drop_policy: str = unused("probs", _NO_EXPERTS)
    moe_layer_recompute: bool = unused(False, _NO_EXPERTS)
    moe_apply_probs_on_input: bool = unused(False, _NO_EXPERTS)
    moe_latent_size: int | None = unused(None, _NO_EXPERTS)
    moe_deepep_num_sms: int = unused(20, _NO_EXPERTS)
    moe_hybridep_num_sms: int = unused(16, _NO_EXPERTS)

    mrope_section: Sequence[int] | None = refused(None, "rotary positions are of one dimension")
    is_hybrid_model: bool = unused(False, _NO_MAMBA)
    mamba_state_dim: int = unused(128, _NO_MAMBA)
    mamba_head_dim: int = unused(64, _NO_MAMBA)
    mamba_num_groups: int = unused(8, _NO_MAMBA)
    mamba_num_heads: int | None = unused(None, _NO_MAMBA)
    use_mamba_mem_eff_path: bool = unused(True, _NO_MAMBA)

    cp_comm_type: Any = unused(None, _ONE_ATTENTION)
    enable_cuda_graph: bool = unused(False, _NO_GRAPHS)
    external_cuda_graph: bool = unused(False, _NO_GRAPHS)
    cuda_graph_scope: Any = unused("full", _NO_GRAPHS)
    cuda_graph_impl: str = unused("none", _NO_GRAPHS)
    cuda_graph_use_single_mempool: bool = unused(False, _NO_GRAPHS)
    cuda_graph_retain_backward_graph: bool = unused(False, _NO_GRAPHS)
    cuda_graph_warmup_steps: int = unused(3, _NO_GRAPHS)
    fine_grained_activation_offloading: bool = unused(False, _NO_RECOMPUTE)
    offload_modules: Sequence[str] | None = unused(None, _NO_RECOMPUTE)
    min_offloaded_tensor_size: int = unused(1024 * 1024, _NO_RECOMPUTE)
    clone_scatter_output_in_embedding: bool = unused(True, "the embedding's shard never keeps the whole alive")
    disable_parameter_transpose_cache: bool = unused(False, "no transposed weights are kept")
    config_logger_dir: str = unused("", "configurations are not logged")
    flash_decode: bool = unused(False, _ONE_ATTENTION)
    inference_rng_tracker: bool = unused(False, "there is one tracker, in tensor_parallel.random")
    inference_sampling_seed: int = unused(42, "generation takes its own seed")
    batch_invariant_mode: bool = refused(False, "kernels are PyTorch's own, whose rounding depends on the batch")
    symmetric_ar_type: str | None = unused(None, "sums go through the collectives of the process group")
    use_inference_optimized_layers: bool = unused(False, "there is one implementation of each layer")
    inference_fuse_tp_communication: bool = unused(False, "there is one implementation of each layer")
    mlp_chunks_for_prefill: int = unused(1, "the MLP takes a prompt in one piece")
    hetereogenous_dist_checkpoint: bool = unused(False, "all layers are of one kind")
    heterogeneous_block_specs: bool = refused(False, "all layers are of one kind")
    transformer_impl: str = unused("transformer_engine", "there is one implementation, on PyTorch alone")

    # Not the reference's, so after all of its fields.
    norm_position: NormPosition = "pre"
    embedding_layernorm: bool = False
    final_layernorm: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_layers", "hidden_size", "num_attention_heads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 0 and under 1")
        if self.normalization not in ("LayerNorm", "RMSNorm"):
            raise ConfigError(f"normalization is {self.normalization!r}; it must be 'LayerNorm' or 'RMSNorm'")
        if not callable(self.activation_func):
            raise ConfigError(
                f"activation_func is {self.activation_func!r}; it must be a function (by name they are in "
                "shardwise.transformer.activations.ACTIVATIONS)"
            )
        self._check_norm_position()
        self._check_attention()
        self.stage_layers()
        self._derive_sizes()
        self.add_qkv_bias = self.add_qkv_bias or self.add_bias_linear
        if self.init_method is None:
            self.init_method = init_method_normal(self.init_method_std)
        if self.output_layer_init_method is None:
            self.output_layer_init_method = scaled_init_method_normal(self.init_method_std, self.num_layers)

    def _check_norm_position(self) -> None:
        if self.norm_position not in ("pre", "post"):
            raise ConfigError(f"norm_position is {self.norm_position!r}; it must be 'pre' or 'post'")
        if self.norm_position == "post" and self.apply_residual_connection_post_layernorm:
            raise ConfigError(
                "apply_residual_connection_post_layernorm is about the norm before attention and MLP, and with "
                "norm_position 'post' there is none; leave it at False"
            )

    def _check_attention(self) -> None:
        # The reference's is an enum.
        self.attention_backend = getattr(self.attention_backend, "name", self.attention_backend)
        if self.attention_backend not in ATTENTION_BACKENDS:
            raise ConfigError(
                f"attention_backend is {self.attention_backend!r}; it must be one of {', '.join(ATTENTION_BACKENDS)}"
            )
        if self.softmax_scale is not None and not 0 < self.softmax_scale < math.inf:
            raise ConfigError(
                f"softmax_scale is {self.softmax_scale}; it must be over 0, or None for 1/sqrt(kv_channels)"
            )
        if self.window_size is not None:
            window = tuple(self.window_size) if isinstance(self.window_size, Sequence) else ()
            if len(window) != 2 or not all(isinstance(side, int) and side >= -1 for side in window):
                raise ConfigError(
                    f"window_size is {self.window_size!r}; it must be a pair of numbers of positions before and after "
                    "a token, -1 for no bound"
                )
            self.window_size = (window[0], window[1])

    def _derive_sizes(self) -> None:
        if self.kv_channels is None:
            if self.hidden_size % self.num_attention_heads != 0:
                raise ConfigError(
                    f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads "
                    f"{self.num_attention_heads}; change one of them or set kv_channels"
                )
            self.kv_channels = self.hidden_size // self.num_attention_heads
        if self.num_query_groups is None:
            self.num_query_groups = self.num_attention_heads
        if self.num_query_groups < 1 or self.num_attention_heads % self.num_query_groups != 0:
            raise ConfigError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_query_groups "
                f"{self.num_query_groups}"
            )
        if self.ffn_hidden_size is None:
            self.ffn_hidden_size = 4 * self.hidden_size
        if self.ffn_hidden_size < 1 or self.kv_channels < 1:
            raise ConfigError(
                f"ffn_hidden_size {self.ffn_hidden_size} and kv_channels {self.kv_channels} must be at least 1"
            )

    def stage_layers(self) -> tuple[tuple[range, ...], ...]:
        """``[stage][chunk]``, the layers of the model, counted from 0, that each chunk of each pipeline stage holds.

        Raises:
            ConfigError: the layers do not suffice, or the fields on stages contradict each other.
        """
        return stage_layers(
            self.num_layers,
            self.pipeline_model_parallel_size,
            num_chunks=self.virtual_pipeline_model_parallel_size or 1,
            first=self.num_layers_in_first_pipeline_stage,
            last=self.num_layers_in_last_pipeline_stage,
            count_embedding=self.account_for_embedding_in_pipeline_split,
            count_loss=self.account_for_loss_in_pipeline_split,
        )

    @property
    def heads(self) -> tuple[int, int, int]:
        """``(query heads, key-value heads, width of a head)``, all known once the config is made."""
        assert self.num_query_groups is not None
        assert self.kv_channels is not None
        return self.num_attention_heads, self.num_query_groups, self.kv_channels
