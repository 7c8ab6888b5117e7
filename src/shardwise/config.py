"""What a model is and how it is split: dataclasses, validated when made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.initialization import InitMethod, init_method_normal, scaled_init_method_normal

Normalization = Literal["LayerNorm", "RMSNorm"]


@dataclass
class ModelParallelConfig:
    """How a model is split, and in which dtype.

    Attributes:
        tensor_model_parallel_size: ranks that split each layer.
        sequence_parallel: keep what lies between tensor-parallel regions split along the sequence (Korthikanti et al.
            2022); the activations there take 1/t of the memory.
        perform_initialization: give weights their initial values when made.
        params_dtype: dtype of the parameters.

    Raises:
        ConfigError: a value that cannot be.
    """

    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    perform_initialization: bool = True
    params_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.tensor_model_parallel_size < 1:
            raise ConfigError(f"tensor_model_parallel_size is {self.tensor_model_parallel_size}; it must be at least 1")


@dataclass
class TransformerConfig(ModelParallelConfig):
    """One transformer: its sizes, what its layers are made of, how it starts.

    Attributes:
        num_layers: number of transformer layers.
        hidden_size: width of the residual stream.
        num_attention_heads: number of query heads.
        num_query_groups: number of key-value heads; ``num_attention_heads`` if None (multi-head attention).
        kv_channels: width of a head; ``hidden_size / num_attention_heads`` if None.
        ffn_hidden_size: width of the MLP; ``4 * hidden_size`` if None.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        layernorm_epsilon: added to the variance.
        gated_linear_unit: multiply the activation by a second projection (SwiGLU with ``activation_func=F.silu``).
        activation_func: elementwise function of the MLP.
        add_bias_linear: whether linear layers have biases.
        add_qkv_bias: bias of the query-key-value projection; ``add_bias_linear`` if None.
        hidden_dropout: dropout probability on the residual branches and the embedding.
        attention_dropout: dropout probability on the attention weights.
        init_method: initial values of weights; normal with ``init_method_std`` if None.
        output_layer_init_method: initial values of the weights that write to the residual stream; normal with
            ``init_method_std / sqrt(2 * num_layers)`` if None.
        init_method_std: standard deviation of the normal.
    """

    num_layers: int = 0
    hidden_size: int = 0
    num_attention_heads: int = 0
    num_query_groups: int | None = None
    kv_channels: int | None = None
    ffn_hidden_size: int | None = None
    normalization: Normalization = "LayerNorm"
    layernorm_epsilon: float = 1e-5
    gated_linear_unit: bool = False
    activation_func: Callable[[Tensor], Tensor] = F.gelu
    add_bias_linear: bool = True
    add_qkv_bias: bool | None = None
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    init_method: InitMethod | None = None
    output_layer_init_method: InitMethod | None = None
    init_method_std: float = 0.02

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
        if self.add_qkv_bias is None:
            self.add_qkv_bias = self.add_bias_linear
        if self.init_method is None:
            self.init_method = init_method_normal(self.init_method_std)
        if self.output_layer_init_method is None:
            self.output_layer_init_method = scaled_init_method_normal(self.init_method_std, self.num_layers)

    @property
    def heads(self) -> tuple[int, int, int]:
        """``(query heads, key-value heads, width of a head)``, all known once the config is made."""
        assert self.num_query_groups is not None
        assert self.kv_channels is not None
        return self.num_attention_heads, self.num_query_groups, self.kv_channels
