"""How a model is split, and in which dtype."""

# ruff: noqa: RUF009 - `unused` and `refused` are dataclass fields

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from shardwise.config.fields import check_fields, refused, say_once, unused
from shardwise.errors import ConfigError

_PIPELINE = "stages exchange hidden states of one shape, ahead of their use, and keep no output that was sent"
_TP_OVERLAP = "collectives are overlapped with the weight gradient wherever they can be"
_OFFLOADING = "activations and weights stay on their device"
_HOOK = "gradients and parameters are synchronised by the program, not during the backward"


@dataclass
class ModelParallelConfig:
    """How a model is split, and in which dtype. Field names and defaults are those of the reference.

    Attributes:
        tensor_model_parallel_size: ranks that split each layer.
        pipeline_model_parallel_size: number of pipeline stages.
        virtual_pipeline_model_parallel_size: parts of the model that each stage holds, interleaved; needs
            ``pipeline_model_parallel_size`` over 1.
        sequence_parallel: keep what lies between tensor-parallel regions split along the sequence (Korthikanti et al.
            2022); the activations there take 1/t of the memory. On one rank there is nothing to split.
        context_parallel_size: ranks that split the sequence in attention.
        hierarchical_context_parallel_sizes: sizes of the levels of the context-parallel group, innermost first; their
            product is ``context_parallel_size``.
        expert_model_parallel_size: ranks that share out the experts.
        expert_tensor_parallel_size: ranks that split each expert; ``tensor_model_parallel_size`` if None.
        perform_initialization: give weights their initial values when made.
        use_cpu_initialization: draw initial values on the CPU, so that they do not depend on the device.
        fp16, bf16: the dtype that the program trains in; at most one. Layers go by ``params_dtype``.
        params_dtype: dtype of the parameters.
        autocast_dtype: ``params_dtype`` if None.
        finalize_model_grads_func, grad_scale_func, no_sync_func: called by ``get_forward_backward_func``'s function, at
            its end, on each loss, and around backward steps.
        deterministic_mode: choose operations whose result does not depend on the order of threads.
        gradient_accumulation_fusion: add weight gradients straight into ``weight.main_grad``.
        defer_embedding_wgrad_compute: keep the output layer's inputs and gradients, and compute its weight gradient
            when ``drain_embedding_wgrad_compute`` is called, with any number of stages.
        wgrad_deferral_limit: number of micro-batches that are kept for it; 0 is no limit.
        delay_wgrad_compute: leave the weight gradients of linear layers out of the backward pass, until the layer's
            ``backward_dw`` is called; a zero-bubble pipeline schedule needs it and calls it.
        cross_entropy_loss_fusion, cross_entropy_fusion_impl: with True and ``"linear"`` a model computes output
            layer and loss in one, without the logits of all ranks. The loss by itself has one implementation, fused.
        pipeline_dtype: dtype of what stages send to each other; ``params_dtype`` if None.
        microbatch_group_size_per_vp_stage: ``pipeline_model_parallel_size`` if None.

    Other fields are accepted for programs that set them: one that changes nothing here warns once per process when set
    to something else than its default, and one that would change numbers raises.

    Raises:
        ConfigError: a value that cannot be, two that contradict each other, or an option that is not offered.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_comm_backend: str | None = unused(None, _PIPELINE)
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    sequence_parallel: bool = False
    context_parallel_size: int = 1
    hierarchical_context_parallel_sizes: Sequence[int] | None = None
    max_seqlen_per_dp_cp_rank: int | None = unused(None, "samples are not spread over ranks by their length")
    hybrid_context_parallel: bool = refused(False, "samples are not spread over ranks by their length")
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    moe_extended_tp: bool = unused(False, "experts are split by expert_tensor_parallel_size")

    perform_initialization: bool = True
    use_cpu_initialization: bool = False

    fp16: bool = False
    bf16: bool = False
    params_dtype: torch.dtype = torch.float32
    timers: Callable[..., Any] | None = unused(None, "nothing here is timed by it")
    finalize_model_grads_func: Callable[..., Any] | None = None
    grad_scale_func: Callable[..., Any] | None = None
    mtp_grad_scale_func: Callable[..., Any] | None = unused(None, "each position predicts the next token only")
    no_sync_func: Callable[..., Any] | None = None
    grad_sync_func: Callable[..., Any] | None = unused(None, _HOOK)
    param_sync_func: Callable[..., Any] | None = unused(None, _HOOK)
    deterministic_mode: bool = False
    enable_autocast: bool = refused(False, "no schedule here enters torch.autocast; enter it around the forward pass")
    autocast_dtype: torch.dtype | None = None
    num_microbatches_with_partial_activation_checkpoints: int | None = unused(
        None, "recomputation is chosen where a module is called, with tensor_parallel.checkpoint"
    )

    gradient_accumulation_fusion: bool = False
    async_tensor_model_parallel_allreduce: bool = unused(True, _TP_OVERLAP)
    use_te_rng_tracker: bool = unused(False, "there is one tracker, in tensor_parallel.random")
    tp_comm_overlap: bool = unused(False, _TP_OVERLAP)
    tp_comm_bulk_wgrad: bool = unused(True, _TP_OVERLAP)
    tp_comm_bulk_dgrad: bool = unused(True, _TP_OVERLAP)
    tp_comm_overlap_ag: bool = unused(True, _TP_OVERLAP)
    tp_comm_overlap_rs: bool = unused(True, _TP_OVERLAP)
    tp_comm_overlap_rs_dgrad: bool = unused(False, _TP_OVERLAP)
    tp_comm_split_ag: bool = unused(True, _TP_OVERLAP)
    tp_comm_atomic_ag: bool = unused(False, _TP_OVERLAP)
    tp_comm_split_rs: bool = unused(True, _TP_OVERLAP)
    tp_comm_atomic_rs: bool = unused(False, _TP_OVERLAP)
    cross_entropy_loss_fusion: bool = False
    cross_entropy_fusion_impl: str = "native"
    tp_comm_overlap_disable_qkv: bool = unused(False, _TP_OVERLAP)
    tp_comm_overlap_disable_fc1: bool = unused(False, _TP_OVERLAP)
    tp_comm_bootstrap_backend: str = unused("nccl", _TP_OVERLAP)
    overlap_moe_expert_parallel_comm: bool = unused(False, "experts' collectives wait for their result")
    delay_wgrad_compute: bool = False
    ep_overlap_early_attn_memory_release: bool = unused(False, "experts' collectives wait for their result")

    pipeline_dtype: torch.dtype | None = None
    variable_seq_lengths: bool = unused(False, _PIPELINE)
    overlap_p2p_comm: bool = unused(False, _PIPELINE)
    batch_p2p_comm: bool = unused(True, _PIPELINE)
    batch_p2p_sync: bool = unused(True, _PIPELINE)
    use_ring_exchange_p2p: bool = unused(False, _PIPELINE)
    deallocate_pipeline_outputs: bool = unused(False, _PIPELINE)
    defer_embedding_wgrad_compute: bool = False
    wgrad_deferral_limit: int = 0
    overlap_p2p_comm_warmup_flush: bool = unused(False, _PIPELINE)
    microbatch_group_size_per_vp_stage: int | None = None
    mtp_standalone: bool = unused(False, "each position predicts the next token only")

    cpu_offloading: bool = unused(False, _OFFLOADING)
    cpu_offloading_num_layers: int = unused(0, _OFFLOADING)
    cpu_offloading_activations: bool = unused(True, _OFFLOADING)
    cpu_offloading_weights: bool = unused(False, _OFFLOADING)
    cpu_offloading_double_buffering: bool = unused(False, _OFFLOADING)
    # The reference's name.
    barrier_with_L1_time: bool = unused(True, "nothing here is timed by it")  # noqa: N815

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_sizes()
        if self.fp16 and self.bf16:
            raise ConfigError("fp16 and bf16 are both set; choose one")
        for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
            if getattr(self, name) and self.params_dtype != dtype:
                say_once(name, "layers go by params_dtype; give it that dtype too")
        if self.cross_entropy_fusion_impl not in ("native", "te", "linear"):
            raise ConfigError(
                f"cross_entropy_fusion_impl is {self.cross_entropy_fusion_impl!r}; it must be 'native', "
                "'te' or 'linear'"
            )
        if self.wgrad_deferral_limit < 0:
            raise ConfigError(f"wgrad_deferral_limit is {self.wgrad_deferral_limit}; it must be at least 0 (no limit)")
        if self.expert_tensor_parallel_size is None:
            self.expert_tensor_parallel_size = self.tensor_model_parallel_size
        if self.autocast_dtype is None:
            self.autocast_dtype = self.params_dtype
        if self.microbatch_group_size_per_vp_stage is None:
            self.microbatch_group_size_per_vp_stage = self.pipeline_model_parallel_size

    def _check_sizes(self) -> None:
        for spec in fields(self):
            if spec.name.endswith("_parallel_size"):
                size = getattr(self, spec.name)
                if size is not None and size < 1:
                    raise ConfigError(f"{spec.name} is {size}; it must be at least 1")
        if self.virtual_pipeline_model_parallel_size is not None and self.pipeline_model_parallel_size == 1:
            raise ConfigError(
                f"virtual_pipeline_model_parallel_size is {self.virtual_pipeline_model_parallel_size} and "
                "pipeline_model_parallel_size is 1; interleaving needs at least 2 stages"
            )
        levels = self.hierarchical_context_parallel_sizes
        if levels is not None and math.prod(levels) != self.context_parallel_size:
            raise ConfigError(
                f"hierarchical_context_parallel_sizes {list(levels)} multiply to {math.prod(levels)}; they must "
                f"multiply to context_parallel_size {self.context_parallel_size}"
            )
