"""Model configs: dataclasses that validate their values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

import torch

from shardwise.core.errors import ConfigError
from shardwise.core.initialization import CounterNormal, InitMethod, scaled_init_method_normal
from shardwise.core.sharding import stage_layers
from shardwise.models.model_fields import NormPosition, TransformerFields
from shardwise.models.recomputation import Recomputation

ContextWay = Literal["auto", "all_gather", "a2a", "p2p"]
ExpertWay = Literal["auto", "all_gather", "a2a"]
"""How context-parallel ranks attend to the positions of all ranks."""

ATTENTION_BACKENDS = ("auto", "flash", "fused", "unfused", "local")


@dataclass
class LayerConfig:
    """Construction, computation and pipeline split of a model's layers.

    Attributes:
        params_dtype: dtype of the parameters.
        sequence_parallel: whether activations between tensor-parallel regions are split along the sequence (Korthikanti
            et al. 2022), so that they take 1/t of the memory. No effect on one rank.
        tp_comm_overlap: with ``sequence_parallel``, whether to overlap communication and products: multiply gathered
            rows as they arrive, and send products to be summed as they are computed. Results are the same
            (``core.communication.overlap``).
        perform_initialization: whether to initialize the weights in the constructor.
        use_cpu_initialization: whether to draw initial values on the CPU, so that they do not depend on the device.
        deterministic_mode: whether to use only operations whose result does not depend on the order of threads.
        gradient_accumulation_fusion: whether to add weight gradients directly to ``weight.main_grad``.
        delay_wgrad_compute: whether ``backward_dw`` computes the weight gradients of linear layers and experts, instead
            of the backward. A zero-bubble pipeline schedule needs this, and calls it.
        defer_embedding_wgrad_compute: whether to keep the output layer's inputs and output gradients, and compute its
            weight gradient after the last micro-batch.
        wgrad_deferral_limit: maximum number of micro-batches to keep for this; 0 means no limit.
        pipeline_model_parallel_size: number of pipeline stages.
        exact_parts: number of parts, a power of two, into which exact arithmetic splits each sum. Results then have
            the same bits at every number of tensor-parallel ranks and stages, and of data-parallel ranks with
            ``training.gradients.GradientTrees``. Applies to the model's tensor-parallel group
            (``core.communication.trees``). None means plain arithmetic.
        virtual_pipeline_model_parallel_size: number of interleaved chunks of the model on each stage; needs
            ``pipeline_model_parallel_size`` over 1.

    Raises:
        ConfigError: a value is out of range, or two values contradict each other.
    """

    params_dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    tp_comm_overlap: bool = False
    perform_initialization: bool = True
    use_cpu_initialization: bool = False
    deterministic_mode: bool = False
    gradient_accumulation_fusion: bool = False
    delay_wgrad_compute: bool = False
    defer_embedding_wgrad_compute: bool = False
    wgrad_deferral_limit: int = 0
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    exact_parts: int | None = None

    def __post_init__(self) -> None:
        for spec in fields(self):
            # Annotations are strings in some modules, and types in others.
            is_integer = spec.type in ("int", "int | None", int, int | None)
            # A float would fail later in a layer, or not at all (8.0 == 8).
            if is_integer and isinstance(getattr(self, spec.name), float):
                raise ConfigError(f"{spec.name} is {getattr(self, spec.name)!r}; it must be an integer")
            if spec.name.endswith("_parallel_size"):
                size = getattr(self, spec.name)
                if size is not None and size < 1:
                    raise ConfigError(f"{spec.name} is {size}; it must be at least 1")
        if self.virtual_pipeline_model_parallel_size is not None and self.pipeline_model_parallel_size == 1:
            raise ConfigError(
                f"virtual_pipeline_model_parallel_size is {self.virtual_pipeline_model_parallel_size} and "
                "pipeline_model_parallel_size is 1; interleaving needs at least 2 stages"
            )
        if self.wgrad_deferral_limit < 0:
            raise ConfigError(f"wgrad_deferral_limit is {self.wgrad_deferral_limit}; it must be at least 0 (no limit)")


@dataclass
class ModelConfig(LayerConfig, TransformerFields):
    """A model, the construction of its layers, and its initial values.

    Attributes:
        num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage: number of layers of that stage, over all
            its chunks; None means the same rule as for other stages.
        account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split: whether the embedding, or the
            output layer with the loss, counts as a layer in the split of layers into stages.
        attention_backend: ``"auto"`` lets PyTorch choose the kernel; ``"flash"``, ``"fused"`` (memory-efficient or
            cuDNN) and ``"unfused"`` select that kernel; ``"local"`` writes out the attention in PyTorch operations. An
            enum with these names is also accepted.
        cp_comm_type: with context parallelism, ``"all_gather"`` gathers keys and values of all positions, and ``"a2a"``
            exchanges positions for heads (Ulysses); ``"auto"`` chooses one of them by heads and mask
            (``models.transformer.context_attention``). ``"p2p"`` takes keys and values one rank after the other.
        ep_comm_type: how tokens reach the ranks of their experts: ``"a2a"`` sends each choice of a token to the ranks
            that hold the expert, ``"all_gather"`` all tokens to all ranks; ``"auto"`` chooses by the bytes to send
            (``models.experts.token_dispatch``).
        init_method: initial values of weights; ``CounterNormal`` with ``init_method_std`` if None.
        output_layer_init_method: initial values of the weights that write to the residual stream; ``CounterNormal``
            with ``init_method_std / sqrt(2 * num_layers)`` if None.
        fuse_output_layer_and_loss: whether to fuse the output layer and the loss, without the logits of all ranks.
        recompute: parts of the model that the backward recomputes.

    The fields of ``TransformerFields`` and ``LayerConfig`` are included.

    Raises:
        ConfigError: a value is out of range, or two values contradict each other.
    """

    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    attention_backend: Any = "auto"
    cp_comm_type: ContextWay = "auto"
    ep_comm_type: ExpertWay = "auto"
    init_method: InitMethod | None = None
    output_layer_init_method: InitMethod | None = None
    fuse_output_layer_and_loss: bool = False
    recompute: Recomputation = field(default_factory=Recomputation)

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
        if not isinstance(self.recompute, Recomputation):
            raise ConfigError(f"recompute is {self.recompute!r}; give a Recomputation, such as Recomputation('full')")
        self._check_norm_position()
        self._check_attention()
        self._check_layers()
        self._check_experts()
        self._check_latent()
        self._check_exact()
        self._check_factors()
        self.stage_layers()
        self._derive_sizes()
        if self.attention_bias is None:
            self.attention_bias = self.add_bias_linear
        self.add_qkv_bias = self.add_qkv_bias or self.attention_bias
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
        is_kept = self.norm_position in ("post", "branch") or self.apply_residual_connection_post_layernorm
        if is_kept and self.recompute.recomputes("layernorm"):
            raise ConfigError(
                "recompute.modules has 'layernorm', and this model's norms write to the residual stream (norm_position "
                f"{self.norm_position!r}, apply_residual_connection_post_layernorm "
                f"{self.apply_residual_connection_post_layernorm}), which is kept anyway; leave it out"
            )

    def _check_attention(self) -> None:
        # Megatron's value is an enum.
        self.attention_backend = getattr(self.attention_backend, "name", self.attention_backend)
        if self.attention_backend not in ATTENTION_BACKENDS:
            raise ConfigError(
                f"attention_backend is {self.attention_backend!r}; it must be one of {', '.join(ATTENTION_BACKENDS)}"
            )
        for name, ways in (("cp_comm_type", get_args(ContextWay)), ("ep_comm_type", get_args(ExpertWay))):
            if getattr(self, name) not in ways:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(ways)}")
        if self.cp_comm_type == "p2p":
            for name, usual in (("attention_logit_softcap", None), ("attention_dropout", 0.0)):
                if getattr(self, name) != usual:
                    raise ConfigError(
                        f"{name} is {getattr(self, name)}, which cp_comm_type 'p2p' does not offer; "
                        "use 'all_gather' or 'a2a'"
                    )
            if self.attention_backend not in ("auto", "flash"):
                raise ConfigError(
                    f"attention_backend is {self.attention_backend!r}, and cp_comm_type 'p2p' chooses kernels by "
                    "the device; use 'auto', or another cp_comm_type"
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
        if self.value_layernorm and self.normalization != "RMSNorm":
            raise ConfigError(f"value_layernorm is for normalization 'RMSNorm', and it is {self.normalization!r}")
        if (heads := self.global_heads) is not None and self.num_attention_heads % heads.groups:
            raise ConfigError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of global_heads.groups, "
                f"{heads.groups}"
            )
        if self.qk_layernorm_over_heads and not (self.qk_layernorm and self.normalization == "RMSNorm"):
            raise ConfigError(
                "qk_layernorm_over_heads is about the norms of qk_layernorm with RMSNorm; qk_layernorm is "
                f"{self.qk_layernorm}, and normalization {self.normalization!r}"
            )

    def _check_experts(self) -> None:
        if self.experts is None:
            return
        self.experts.check_layers(self.num_layers)
        if self.experts.gate is not None and not self.gated_linear_unit:
            raise ConfigError("experts.gate is about gated_linear_unit, which is False; set both")
        if self.add_bias_linear:
            raise ConfigError("experts cannot be used with add_bias_linear")

    def _check_exact(self) -> None:
        if self.exact_parts is None:
            return
        refused = {"attention_sinks": self.attention_sinks, "latent": self.latent is not None}
        if (experts := self.experts) is not None:
            refused |= {
                "experts.capacity_factor": experts.capacity_factor is not None,
                "experts.balances 'global'": experts.balances == "global",
                "experts.pools_layers": experts.pools_layers,
                "experts.gate": experts.gate is not None,
                "experts.shared_gate": experts.shared_gate,
                # Its sums round by the number of ranks.
                "ep_comm_type 'all_gather'": self.ep_comm_type == "all_gather",
            }
            self.ep_comm_type = "a2a"
        for name, is_set in refused.items():
            if is_set:
                raise ConfigError(f"{name} cannot be used with exact_parts (--exact)")

    def _check_latent(self) -> None:
        if self.latent is None:
            return
        for name in ("qk_layernorm", "clip_qkv", "value_layernorm", "global_heads"):
            if getattr(self, name):
                raise ConfigError(f"latent cannot be used with {name}")
        for name, derived in (("kv_channels", self.latent.head_width), ("num_query_groups", self.num_attention_heads)):
            if getattr(self, name) not in (None, derived):
                raise ConfigError(f"{name} is {getattr(self, name)}, and latent makes it {derived}; leave it out")
            setattr(self, name, derived)

    def _check_factors(self) -> None:
        for name in ("residual_multiplier", "embedding_multiplier", "logits_scaling"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be over 0")
        for name in ("final_logit_softcap", "attention_logit_softcap", "clip_qkv"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}; it must be over 0, or None for none")
        for name in ("attention_logit_softcap", "attention_sinks"):
            if getattr(self, name) and self.attention_backend not in ("auto", "local"):
                raise ConfigError(
                    f"{name} is {getattr(self, name)}, which PyTorch's kernels do not have, and attention_backend "
                    f"{self.attention_backend!r} asks for one; use 'auto'"
                )

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
        """Return the layers of each chunk of each pipeline stage, ``[stage][chunk]``, counted from 0 over the model.

        Raises:
            ConfigError: there are too few layers, or the fields on stages contradict each other.
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
