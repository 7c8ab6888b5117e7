"""One transformer: its sizes, what its layers are made of, how it starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch.nn.functional as F
from torch import Tensor

from shardwise.core.errors import ConfigError
from shardwise.core.initialization import CounterNormal, InitMethod, scaled_init_method_normal
from shardwise.core.sharding import stage_layers
from shardwise.models.config.layer_config import LayerConfig
from shardwise.models.config.recompute_config import RecomputeConfig
from shardwise.nn.norm import Normalization

NormPosition = Literal["pre", "post", "sandwich", "branch"]

ATTENTION_BACKENDS = ("auto", "flash", "fused", "unfused", "local")


@dataclass
class ModelConfig(LayerConfig, RecomputeConfig):
    """One transformer: its sizes, what its layers are made of, how it starts.

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
        norm_position: ``"pre"``, a layer is ``x + f(norm(x))``; ``"post"``, ``norm(x + f(x))`` (BERT); ``"branch"``,
            ``x + norm(f(x))`` (OLMo 2); ``"sandwich"``, ``x + norm(f(norm(x)))`` (Gemma 2).
        parallel_residual: ``x + attention(norm(x)) + mlp(norm'(x))`` in one step (GPT-NeoX); with pre-norm.
        residual_multiplier: factor of what attention and MLP add to the residual stream (Granite).
        embedding_multiplier: factor of the word embedding, rounded to its dtype (Gemma, Granite).
        final_logit_softcap: ``c``, with which logits ``z`` are ``c * tanh(z / c)`` (Gemma 2); none if None.
        logits_scaling: what logits are divided by, after that (Granite).
        attention_logit_softcap: the same of attention scores, which are then computed in blocks of queries, and again
            in the backward.
        apply_residual_connection_post_layernorm: with pre-norm, ``norm(x) + f(norm(x))`` in place of ``x + f(norm(x))``
            (an option of BLOOM).
        embedding_layernorm: a norm after the embedding (BLOOM, BERT).
        final_layernorm: a norm after the last layer.
        layernorm_zero_centered_gamma: norms keep ``weight - 1``, which starts at 0, so that weight decay pulls towards
            1.
        qk_layernorm: norms of width ``kv_channels`` on each head's query and key, before rotation (Qwen 3).
        qk_layernorm_over_heads: these norms are one over all heads of a token together (OLMo 2); RMSNorm only.
        softmax_scale: factor of the attention scores; ``1 / sqrt(kv_channels)`` if None.
        window_size: ``(before, after)``: positions that a token sees on each side of itself; -1 is no bound. Mistral's
            window of ``w`` tokens is ``(w - 1, 0)``.
        windowed_layers: for each layer of the model, whether ``window_size`` bounds it; all are if None.
        rotary_layers: for each layer of the model, whether it rotates queries and keys; all do if None (SmolLM 3).
        attention_backend: ``"auto"`` leaves the kernel to PyTorch; ``"flash"``, ``"fused"`` (memory-efficient or cuDNN)
            and ``"unfused"`` ask for that one; ``"local"`` is attention written out. An enum with these names will do.
        rotary_interleaved: rotary pairs are elements ``2i`` and ``2i + 1``, not ``i`` and ``i + d/2``.
        add_bias_linear: whether linear layers have biases.
        add_qkv_bias: give the query-key-value projection a bias even where other linear layers have none; true once
            the config is made if ``add_bias_linear`` is.
        gated_linear_unit: multiply the activation by a second projection (SwiGLU with ``activation_func=F.silu``).
        activation_func: elementwise function of the MLP.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        init_method: initial values of weights; ``CounterNormal`` with ``init_method_std`` if None.
        output_layer_init_method: initial values of the weights that write to the residual stream; ``CounterNormal``
            with ``init_method_std / sqrt(2 * num_layers)`` if None.
        init_method_std: standard deviation of the normal.
        fuse_output_layer_and_loss: compute output layer and loss in one, without the logits of all ranks.

    Those of ``RecomputeConfig`` too.

    Raises:
        ConfigError: a value out of range, or two that contradict each other.
    """

    num_layers: int = 0
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    hidden_size: int = 0
    num_attention_heads: int = 0
    attention_backend: Any = "auto"
    softmax_scale: float | None = None
    num_query_groups: int | None = None
    ffn_hidden_size: int | None = None
    kv_channels: int | None = None
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    apply_residual_connection_post_layernorm: bool = False
    layernorm_epsilon: float = 1e-5
    layernorm_zero_centered_gamma: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    gated_linear_unit: bool = False
    activation_func: Callable[[Tensor], Tensor] = F.gelu
    rotary_interleaved: bool = False
    window_size: tuple[int, int] | None = None
    normalization: Normalization = "LayerNorm"
    qk_layernorm: bool = False
    init_method: InitMethod | None = None
    output_layer_init_method: InitMethod | None = None
    init_method_std: float = 0.02
    norm_position: NormPosition = "pre"
    embedding_layernorm: bool = False
    final_layernorm: bool = True
    fuse_output_layer_and_loss: bool = False
    parallel_residual: bool = False
    residual_multiplier: float = 1.0
    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0
    final_logit_softcap: float | None = None
    attention_logit_softcap: float | None = None
    qk_layernorm_over_heads: bool = False
    windowed_layers: Sequence[bool] | None = None
    rotary_layers: Sequence[bool] | None = None

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
                "shardwise.models.transformer.mlp.ACTIVATIONS)"
            )
        self._check_norm_position()
        self._check_recompute_()
        self._check_attention()
        self._check_layers()
        self._check_factors()
        self.stage_layers()
        self._derive_sizes()
        self.add_qkv_bias = self.add_qkv_bias or self.add_bias_linear
        if self.init_method is None:
            self.init_method = CounterNormal(self.init_method_std)
        if self.output_layer_init_method is None:
            scaled = scaled_init_method_normal(self.init_method_std, self.num_layers)
            self.output_layer_init_method = CounterNormal(scaled.std)

    def _check_norm_position(self) -> None:
        positions = get_args(NormPosition)
        if self.norm_position not in positions:
            raise ConfigError(f"norm_position is {self.norm_position!r}; it must be one of {', '.join(positions)}")
        for name in ("apply_residual_connection_post_layernorm", "parallel_residual"):
            if getattr(self, name) and self.norm_position != "pre":
                raise ConfigError(
                    f"{name} is about a layer with norms before attention and MLP alone, and norm_position is "
                    f"{self.norm_position!r}; leave it at False"
                )
        if self.apply_residual_connection_post_layernorm and self.parallel_residual:
            raise ConfigError(
                "apply_residual_connection_post_layernorm adds to what was normed, and with parallel_residual two "
                "norms are; leave one of them at False"
            )

    def _check_recompute_(self) -> None:
        self.check_recompute_()
        if self.recomputes("layernorm") and (
            self.norm_position in ("post", "branch") or self.apply_residual_connection_post_layernorm
        ):
            raise ConfigError(
                "recompute_modules has 'layernorm', and this model's norms write to the residual stream (norm_position "
                f"{self.norm_position!r}, apply_residual_connection_post_layernorm "
                f"{self.apply_residual_connection_post_layernorm}), which is kept anyway; leave it out"
            )

    def _check_attention(self) -> None:
        # Megatron's is an enum.
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

    def _check_layers(self) -> None:
        for name in ("windowed_layers", "rotary_layers"):
            value = getattr(self, name)
            if value is None:
                continue
            if len(value) != self.num_layers or not all(isinstance(each, bool) for each in value):
                raise ConfigError(
                    f"{name} is {value!r}; it must be a bool for each of the {self.num_layers} layers, or None for all"
                )
            setattr(self, name, tuple(value))
        if self.windowed_layers is not None and self.window_size is None:
            raise ConfigError("windowed_layers says which layers window_size bounds, and window_size is None; set both")
        if self.qk_layernorm_over_heads and not (self.qk_layernorm and self.normalization == "RMSNorm"):
            raise ConfigError(
                "qk_layernorm_over_heads is about the norms of qk_layernorm with RMSNorm; qk_layernorm is "
                f"{self.qk_layernorm}, and normalization {self.normalization!r}"
            )

    def _check_factors(self) -> None:
        for name in ("residual_multiplier", "embedding_multiplier", "logits_scaling"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be over 0")
        for name in ("final_logit_softcap", "attention_logit_softcap"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}; it must be over 0, or None for none")
        if self.attention_logit_softcap is not None and self.attention_backend not in ("auto", "local"):
            raise ConfigError(
                f"attention_logit_softcap is {self.attention_logit_softcap}, which PyTorch's kernels do not have, and "
                f"attention_backend {self.attention_backend!r} asks for one; use 'auto'"
            )

    def windows(self, layer_number: int) -> bool:
        """Whether ``window_size`` bounds the layer ``layer_number``, from 1."""
        if self.window_size is None:
            return False
        return self.windowed_layers is None or self.windowed_layers[layer_number - 1]

    def rotates(self, layer_number: int) -> bool:
        """Whether the layer ``layer_number``, from 1, rotates queries and keys, where there are rotary positions."""
        return self.rotary_layers is None or self.rotary_layers[layer_number - 1]

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
