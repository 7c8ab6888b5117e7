"""Megatron's configs: the engine's settings, and inert settings from ``inert_settings.json`` with their reasons.

>>> from shardwise.megatron.config import TransformerConfig
>>> TransformerConfig.__dataclass_fields__["persist_layer_norm"].metadata["unused"]
"PyTorch's own norm kernel is used"
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, cast, get_type_hints

import torch

from shardwise.core.errors import ConfigError
from shardwise.megatron.absent import absent_names, check_inert, inert_settings_of, say_once
from shardwise.megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from shardwise.megatron.errors import AssertedConfigError
from shardwise.models.config import LayerConfig, ModelConfig
from shardwise.models.experts import Experts
from shardwise.models.model_fields import ModelFields
from shardwise.models.recomputation import Recomputation, RecomputedModule

__getattr__ = absent_names("transformer.transformer_config", "model_parallel_config")

__all__ = ["MLATransformerConfig", "ModelParallelConfig", "TransformerConfig"]


@dataclass
class _FirstArgument:
    tensor_model_parallel_size: int = 1


@dataclass
class ModelParallelConfig(LayerConfig, inert_settings_of("ModelParallelConfig"), _FirstArgument):  # type: ignore[misc]
    """Partition and dtypes of a model. Field names and defaults are Megatron's.

    Attributes:
        tensor_model_parallel_size: number of ranks that split each layer.
        context_parallel_size: number of ranks that split the sequence in attention.
        hierarchical_context_parallel_sizes: sizes of the levels of the context-parallel group, innermost first; their
            product is ``context_parallel_size``.
        expert_model_parallel_size: number of ranks that share the experts.
        expert_tensor_parallel_size: number of ranks that split each expert; ``tensor_model_parallel_size`` if None.
        fp16, bf16: dtype in which the program trains; at most one is True. Layers use ``params_dtype``.
        pipeline_dtype: dtype of messages between stages; ``params_dtype`` if None.
        autocast_dtype: dtype of autocast; ``params_dtype`` if None.
        finalize_model_grads_func, grad_scale_func, no_sync_func: hooks of ``get_forward_backward_func``'s function, at
            its end, on each loss, and around backward steps.
        cross_entropy_loss_fusion, cross_entropy_fusion_impl: True and ``"linear"`` fuse the output layer with the loss,
            so that the logits of all ranks are never in memory. The loss alone is always one fused operation.
        microbatch_group_size_per_vp_stage: group size of interleaving; ``pipeline_model_parallel_size`` if None.
        variable_seq_lengths: whether micro-batches differ in size or length; between stages the shape of hidden states
            then travels ahead of them.

    The config also has the fields of ``LayerConfig``. It accepts Megatron's other fields: one that differs from its
    default warns once per process if it has no effect here, and raises if it would change results.

    Raises:
        ConfigError: a value out of range, contradicting values, or an option that is not offered.
    """

    context_parallel_size: int = 1
    hierarchical_context_parallel_sizes: Sequence[int] | None = None
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    fp16: bool = False
    bf16: bool = False
    pipeline_dtype: torch.dtype | None = None
    autocast_dtype: torch.dtype | None = None
    finalize_model_grads_func: Callable[..., Any] | None = None
    grad_scale_func: Callable[..., Any] | None = None
    no_sync_func: Callable[..., Any] | None = None
    cross_entropy_loss_fusion: bool = False
    cross_entropy_fusion_impl: str = "native"
    microbatch_group_size_per_vp_stage: int | None = None
    variable_seq_lengths: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        check_inert(self)
        super().__post_init__()
        levels = self.hierarchical_context_parallel_sizes
        if levels is not None and math.prod(levels) != self.context_parallel_size:
            raise ConfigError(
                f"hierarchical_context_parallel_sizes {list(levels)} multiply to {math.prod(levels)}; they must "
                f"multiply to context_parallel_size {self.context_parallel_size}"
            )
        if self.fp16 and self.bf16:
            raise ConfigError("fp16 and bf16 are both set; choose one")
        for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
            if getattr(self, name) and self.params_dtype != dtype:
                say_once(name, "layers go by params_dtype; give it that dtype too")
        if self.cross_entropy_fusion_impl == "te":
            say_once("cross_entropy_fusion_impl='te'", "Transformer Engine is not used; the one loss is fused anyway")
        elif self.cross_entropy_fusion_impl not in ("native", "linear"):
            raise ConfigError(
                f"cross_entropy_fusion_impl is {self.cross_entropy_fusion_impl!r}; it must be 'native', "
                "'te' or 'linear'"
            )
        if self.expert_tensor_parallel_size is None:
            self.expert_tensor_parallel_size = self.tensor_model_parallel_size
        if self.autocast_dtype is None:
            self.autocast_dtype = self.params_dtype
        if self.microbatch_group_size_per_vp_stage is None:
            self.microbatch_group_size_per_vp_stage = self.pipeline_model_parallel_size


@dataclass
class TransformerConfig(ModelParallelConfig, ModelConfig, inert_settings_of("TransformerConfig")):  # type: ignore[misc]
    """A transformer and its partition: the fields of ``ModelConfig`` and of ``ModelParallelConfig``.

    Attributes:
        use_inference_optimized_layers: whether ``GPTModel`` in evaluation mode uses inference layers, which share its
            weights and have no gradient.
        inference_fuse_tp_communication: whether each half block of these layers makes one exchange.
        window_attn_skip_freq: layers that ``window_size`` limits: all but every n-th for an integer ``n``; for a list,
            the layers with a 1.
        recompute_granularity, recompute_method, recompute_num_layers, recompute_modules: as ``Recomputation``'s fields,
            with None for "none" and for fields that the granularity does not use.
        cp_comm_type: as ``ModelConfig``'s, and None for ``"auto"``; or a list of a value for each layer, all the same.
        no_rope_freq: layers without rotary positions: every n-th for an integer ``n``; for a list, those with a 1.
        pipeline_model_parallel_layout: the layers of each chunk of each stage, as a ``PipelineParallelLayerLayout`` or
            its argument; None for the engine's distribution.
        calculate_per_token_loss: whether ``DistributedDataParallel`` sums gradients, which ``finalize_model_grads``
            divides by the number of tokens that ``loss_func`` returned on all ranks.
        num_moe_experts: number of experts; None for a dense model, which ignores the fields ``moe_*``. ``experts`` is
            made of these fields.
        moe_layer_freq: layers with experts, for ``get_gpt_decoder_block_spec``: the first and then every n-th for an
            integer ``n``; for a list, those with a 1.
        moe_ffn_hidden_size: width of an expert; ``ffn_hidden_size`` if None.
        moe_router_topk: number of experts of a token.
        moe_router_score_function: ``"softmax"``, or ``"sigmoid"`` with weights divided by their sum.
        moe_router_pre_softmax: whether the softmax is over all experts instead of the chosen ones.
        moe_router_topk_scaling_factor: factor of the weights; 1 if None.
        moe_router_num_groups, moe_router_group_topk: number of groups of experts, and of those that a token considers.
        moe_router_enable_expert_bias, moe_router_bias_update_rate: whether a bias, with sigmoid scores, takes part in
            the choice of experts; ``finalize_model_grads`` moves it by the rate.
        moe_router_dtype: None or ``"fp32"``; routers compute in fp32 at least.
        moe_router_load_balancing_type: ``"aux_loss"`` over a micro-batch, ``"seq_aux_loss"`` over each sequence, or
            ``"none"``.
        moe_aux_loss_coeff, moe_z_loss_coeff: coefficients of the balance loss and of the loss of the logits.
        moe_shared_expert_intermediate_size, moe_shared_expert_gate: width of an MLP for all tokens, and whether it
            has a gate.
        moe_apply_probs_on_input: whether the weight multiplies an expert's input.
        moe_grouped_gemm: whether the experts are ``GroupedMLP``, not ``SequentialMLP``; both compute the same.
        moe_token_dispatcher_type: ``"allgather"`` sends all tokens to all ranks of the experts, ``"alltoall"`` and
            ``"flex"`` each choice of a token to the ranks of its expert.
        moe_enable_routing_replay: whether each router has a ``RouterReplay``.
        moe_router_force_load_balancing: whether experts take turns instead of a choice by scores, to measure speed
            (Megatron draws the scores).

    Other fields are accepted as in ``ModelParallelConfig``.

    Of the fields that Megatron reads at each forward, a program may change the settings of the loss,
    ``moe_aux_loss_coeff``, ``moe_z_loss_coeff``, ``moe_router_topk_scaling_factor``, ``moe_router_bias_update_rate``
    and ``moe_router_force_load_balancing`` after layers were made; the next forward reads them. A change of another
    such field raises, or warns if only memory depends on it.

    Raises:
        ConfigError: a value out of range, contradicting values, or an option that is not offered; or a field is changed
            that layers have read.
    """

    use_inference_optimized_layers: bool = field(default=False, kw_only=True)
    inference_fuse_tp_communication: bool = field(default=False, kw_only=True)

    recompute_granularity: Literal["full", "selective"] | None = field(default=None, kw_only=True)
    recompute_method: Literal["uniform", "block"] | None = field(default=None, kw_only=True)
    recompute_num_layers: int | None = field(default=None, kw_only=True)
    recompute_modules: Sequence[str] | None = field(default=None, kw_only=True)
    # A property, because programs set the four fields after they made the config.
    recompute: Recomputation = field(init=False, default=cast(Any, property(lambda self: self._recomputation())))
    window_attn_skip_freq: int | list[int] | None = field(default=None, kw_only=True)
    cp_comm_type: str | list[str] | None = field(default=None, kw_only=True)  # type: ignore[assignment]
    no_rope_freq: int | list[int] | None = field(default=None, kw_only=True)

    pipeline_model_parallel_layout: str | list[Any] | PipelineParallelLayerLayout | None = field(
        default=None, kw_only=True
    )
    calculate_per_token_loss: bool = field(default=False, kw_only=True)

    num_moe_experts: int | None = field(default=None, kw_only=True)
    moe_layer_freq: int | list[int] = field(default=1, kw_only=True)
    moe_ffn_hidden_size: int | None = field(default=None, kw_only=True)
    moe_router_topk: int = field(default=2, kw_only=True)
    moe_router_score_function: Literal["softmax", "sigmoid"] = field(default="softmax", kw_only=True)
    moe_router_pre_softmax: bool = field(default=False, kw_only=True)
    moe_router_topk_scaling_factor: float | None = field(default=None, kw_only=True)
    moe_router_num_groups: int | None = field(default=None, kw_only=True)
    moe_router_group_topk: int | None = field(default=None, kw_only=True)
    moe_router_enable_expert_bias: bool = field(default=False, kw_only=True)
    moe_router_bias_update_rate: float = field(default=1e-3, kw_only=True)
    moe_router_dtype: Literal["fp32"] | None = field(default=None, kw_only=True)
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "none"] = field(
        default="aux_loss", kw_only=True
    )
    moe_aux_loss_coeff: float = field(default=0.0, kw_only=True)
    moe_z_loss_coeff: float | None = field(default=None, kw_only=True)
    moe_shared_expert_intermediate_size: int | None = field(default=None, kw_only=True)
    moe_shared_expert_gate: bool = field(default=False, kw_only=True)
    moe_apply_probs_on_input: bool = field(default=False, kw_only=True)
    moe_grouped_gemm: bool = field(default=False, kw_only=True)
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = field(default="allgather", kw_only=True)

    moe_router_force_load_balancing: bool = field(default=False, kw_only=True)
    moe_enable_routing_replay: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        for spec in fields(ModelFields):
            if (value := getattr(self, spec.name)) != spec.default:
                raise ConfigError(f"{spec.name} is {value!r}, which no TransformerConfig has; give it to the model")
        if self.hidden_size == 0:
            # Megatron makes such a config. What follows from the sizes is set once this one is.
            check_inert(self)
            return
        self._recomputation()
        self._lay_out()
        self.cp_comm_type = self._context_way()
        if self.window_size is not None and self.window_attn_skip_freq is not None:
            skipped = _is_each(self, "window_attn_skip_freq")
            is_list = isinstance(self.window_attn_skip_freq, list)
            self.windowed_layers = tuple(each == is_list for each in skipped)
        if self.no_rope_freq:
            self.rotary_layers = tuple(not each for each in _is_each(self, "no_rope_freq"))
        if self.num_moe_experts is not None:
            self.experts = self._experts(self.num_moe_experts)
            self.ep_comm_type = "all_gather" if self.moe_token_dispatcher_type == "allgather" else "a2a"
        super().__post_init__()
        if self.inference_fuse_tp_communication and not self.use_inference_optimized_layers:
            raise ConfigError(
                "inference_fuse_tp_communication is set, and use_inference_optimized_layers is not; set both"
            )
        self._choose_loss()

    def _lay_out(self) -> None:
        if self.pipeline_model_parallel_layout is None:
            return
        for name in _OTHER_LAYOUTS:
            if getattr(self, name) not in (None, False):
                raise ConfigError(f"pipeline_model_parallel_layout and {name} are both set; choose one")
        layout = self.pipeline_model_parallel_layout
        if not isinstance(layout, PipelineParallelLayerLayout):
            layout = PipelineParallelLayerLayout(layout, self.pipeline_model_parallel_size)
        stages, chunks = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size
        given = self.pipeline_model_parallel_size, self.virtual_pipeline_model_parallel_size or chunks
        if given != (stages, chunks):
            raise AssertedConfigError(
                f"pipeline_model_parallel_layout {layout!r} has {stages} stages of {chunks} chunks, and the config "
                f"{given[0]} of {given[1]}; give both the same"
            )
        layout.validate_layer_layout(self.num_layers, self.mtp_num_layers)
        self.pipeline_model_parallel_layout = layout
        if chunks > 1:
            self.virtual_pipeline_model_parallel_size = chunks

    def stage_layers(self) -> tuple[tuple[range, ...], ...]:
        """Return the layers of ``pipeline_model_parallel_layout`` if it is set; see ``ModelConfig.stage_layers``."""
        layout = self.pipeline_model_parallel_layout
        return layout.stage_layers() if isinstance(layout, PipelineParallelLayerLayout) else super().stage_layers()

    def _choose_loss(self) -> None:
        self.fuse_output_layer_and_loss = self.cross_entropy_loss_fusion and self.cross_entropy_fusion_impl == "linear"

    def check_complete(self) -> None:
        """Raise ConfigError unless layers can be made from this config."""
        if self.hidden_size == 0:
            raise ConfigError("hidden_size is 0; set it before layers are made from the config")

    def note_read(self, *copies: "TransformerConfig") -> None:
        """Note that layers were made from this config, or from ``copies``, to which later changes then go too."""
        others = [each for each in copies if each is not self]
        for each in (self, *others):
            each.__dict__["_is_read"] = True
        self.__dict__.setdefault("_copies", []).extend(others)

    def __getstate__(self) -> dict[str, Any]:
        # No layer is made from a copy yet.
        return {name: value for name, value in self.__dict__.items() if name not in ("_is_read", "_copies")}

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if own.get("_is_read") and value != (before := getattr(self, name, None)):
            if name in _READ_ONCE:
                raise ConfigError(
                    f"{name} is set to {value!r} after layers were made with {before!r}, which they read once here; "
                    "make layers from a config with the new value"
                )
            if name in _ONLY_MEMORY:
                say_once(f"{name} of a config that layers were made from", "they read it once; results are the same")
        experts: Experts | None = own.get("experts")
        if name in _LIVE_OF_EXPERTS and experts is not None:
            # Before the change, so that a value out of range changes nothing.
            changed = copy.copy(self)
            changed.__dict__[name] = value
            super().__setattr__("experts", replace(experts, **changed._live_of_experts()))
        completes = name == "hidden_size" and own.get(name) == 0 and value != 0
        super().__setattr__(name, value)
        if completes:
            self.__post_init__()
        if name in ("cross_entropy_loss_fusion", "cross_entropy_fusion_impl") and own.get("_is_read"):
            self._choose_loss()
        for each in own.get("_copies", ()):
            setattr(each, name, value)

    def _context_way(self) -> Any:
        ways = self.cp_comm_type
        if not isinstance(ways, list):
            return "auto" if ways is None else ways
        if len(ways) != self.num_layers or len(set(ways)) != 1:
            raise ConfigError(
                f"cp_comm_type is {ways!r}; a list must have the same value for each of the {self.num_layers} layers"
            )
        return ways[0]

    def _experts(self, num: int) -> Experts:
        self._check_experts_of_megatron()
        if self.moe_ffn_hidden_size is None:
            self.moe_ffn_hidden_size = self.ffn_hidden_size or 4 * self.hidden_size
        layers, is_sigmoid = _is_each(self, "moe_layer_freq", first=0), self.moe_router_score_function == "sigmoid"
        considered = self.moe_router_group_topk
        return Experts(
            num=num,
            per_token=self.moe_router_topk,
            ffn_hidden_size=self.moe_ffn_hidden_size,
            layers=None if all(layers) else tuple(layers),
            scores=self.moe_router_score_function,
            softmax_after_choice=not is_sigmoid and not self.moe_router_pre_softmax,
            normalizes_weights=is_sigmoid,
            selection_bias=self.moe_router_enable_expert_bias,
            num_groups=(self.moe_router_num_groups or 1) if considered else 1,
            groups_per_token=considered or 1,
            weighs_input=self.moe_apply_probs_on_input,
            shared_ffn_hidden_size=self.moe_shared_expert_intermediate_size,
            shared_gate=self.moe_shared_expert_gate,
            balances="sequence" if self.moe_router_load_balancing_type == "seq_aux_loss" else "micro_batch",
            **self._live_of_experts(),
        )

    def _live_of_experts(self) -> dict[str, Any]:
        """Return the fields of ``Experts`` that a router reads at each forward, in Megatron too."""
        has_aux_loss = self.moe_router_load_balancing_type != "none"
        return {
            "aux_loss": self.moe_aux_loss_coeff if has_aux_loss else 0.0,
            "z_loss": self.moe_z_loss_coeff or 0.0,
            "weight_scale": self.moe_router_topk_scaling_factor or 1.0,
            "bias_rate": self.moe_router_bias_update_rate if self.moe_router_enable_expert_bias else 0.0,
            "forces_balance": self.moe_router_force_load_balancing,
        }

    def _check_experts_of_megatron(self) -> None:
        """Raise ConfigError for kinds of experts that Megatron refuses, or that the engine does not have."""
        for name, known in _KINDS.items():
            if (value := getattr(self, name)) not in known:
                raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, known))} here")
        if self.add_bias_linear:
            raise ConfigError("num_moe_experts is set, and experts have no biases here; set add_bias_linear=False")
        is_softmax, k = self.moe_router_score_function == "softmax", self.moe_router_topk
        if is_softmax and self.moe_router_enable_expert_bias:
            raise ConfigError("moe_router_enable_expert_bias needs moe_router_score_function='sigmoid'; set both")
        if is_softmax and k == 1 and not self.moe_router_pre_softmax:
            raise ConfigError("moe_router_topk is 1, and a softmax over one expert is 1; set moe_router_pre_softmax")
        considered, num = self.moe_router_group_topk, self.moe_router_num_groups
        if not considered:
            return
        if not num:
            raise ConfigError("moe_router_group_topk is about moe_router_num_groups, which is None; set both")
        summed = 1 if is_softmax else min(2, (self.num_moe_experts or 0) // num)
        if considered < num and k // considered != summed:
            raise ConfigError(
                f"moe_router_topk {k} with moe_router_group_topk {considered} compares groups by the sum of their "
                f"{k // considered} highest scores, and a router with {self.moe_router_score_function} scores sums "
                f"{summed} here; change one of the three"
            )

    def _recomputation(self) -> Recomputation:
        granularity, method, number = self.recompute_granularity, self.recompute_method, self.recompute_num_layers
        if granularity not in (None, "full", "selective"):
            raise ConfigError(f"recompute_granularity is {granularity!r}; it must be 'full', 'selective' or None")
        if granularity == "full":
            if method not in ("uniform", "block"):
                raise ConfigError(f"recompute_method is {method!r}; granularity 'full' needs 'uniform' or 'block'")
            if number is None or number < 1:
                raise ConfigError(f"recompute_num_layers is {number}; granularity 'full' needs at least 1")
        elif method is not None or number is not None:
            raise ConfigError(
                f"recompute_method {method!r} and recompute_num_layers {number} say which layers are recomputed whole, "
                f"and recompute_granularity is {granularity!r}; set it to 'full', or leave them out"
            )
        modules = self.recompute_modules
        if granularity == "selective":
            self.recompute_modules = tuple(Recomputation.modules if modules is None else modules)
            return Recomputation(granularity, modules=cast(tuple[RecomputedModule, ...], self.recompute_modules))
        if modules is not None:
            raise ConfigError(
                f"recompute_modules {list(modules)} are parts of layers, and recompute_granularity is {granularity!r}; "
                "set it to 'selective', or leave them out"
            )
        return Recomputation(granularity or "none", method or "uniform", number or 1)


# The engine's annotations are text. Programs make options of the types.
for _field in fields(TransformerConfig):
    _field.type = get_type_hints(TransformerConfig)[_field.name]

MLATransformerConfig = absent_names("transformer.transformer_config", base=TransformerConfig)("MLATransformerConfig")


# Fields that Megatron reads at each forward. These take effect at each forward here, too. Layers read those of
# ``_READ_ONCE`` and ``_ONLY_MEMORY`` once; results depend on the former, only memory and time on the latter.
_LIVE_OF_EXPERTS = {
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_router_topk_scaling_factor",
    "moe_router_bias_update_rate",
    "moe_router_force_load_balancing",
}
_OTHER_LAYOUTS = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
_READ_ONCE = {
    "activation_func",
    "defer_embedding_wgrad_compute",
    "gated_linear_unit",
    "moe_apply_probs_on_input",
    "moe_router_group_topk",
    "moe_router_num_groups",
    "moe_router_pre_softmax",
    "no_rope_freq",
    "rotary_interleaved",
    "sequence_parallel",
}
_ONLY_MEMORY = {
    "inference_fuse_tp_communication",
    "recompute_granularity",
    "recompute_method",
    "recompute_modules",
    "recompute_num_layers",
    "wgrad_deferral_limit",
}

_KINDS: dict[str, tuple[str | None, ...]] = {
    "moe_router_score_function": ("softmax", "sigmoid"),
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "none"),
    "moe_router_dtype": (None, "fp32"),
    "moe_token_dispatcher_type": ("allgather", "alltoall", "flex"),
}


def _is_each(config: TransformerConfig, name: str, first: int = 1) -> list[bool]:
    """Return for each layer whether the setting ``name`` selects it, as a 1 in its list or as every ``n``-th layer.

    ``first`` is the number of the first layer.
    """
    frequency, num_layers = getattr(config, name), config.num_layers
    if isinstance(frequency, list):
        if len(frequency) != num_layers or any(each not in (0, 1) for each in frequency):
            raise ConfigError(f"{name} is {frequency!r}; it must be 0 or 1 for each of the {num_layers} layers")
        return [bool(each) for each in frequency]
    if frequency < 1:
        raise ConfigError(f"{name} is {frequency!r}; it must be at least 1, or a list of 0 and 1")
    return [(first + layer) % frequency == 0 for layer in range(num_layers)]
