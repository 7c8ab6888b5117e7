"""Megatron's data parallelism, on the engine's gradient buffers."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import (
    _flatten_dense_tensors as _flatten_dense_tensors,
    _unflatten_dense_tensors as _unflatten_dense_tensors,
)
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from shardwise.core.communication import accounting
from shardwise.core.communication.collectives import all_gather, all_reduce, broadcast_
from shardwise.core.communication.context import device_of, device_of_host_facts
from shardwise.core.errors import ConfigError, DivergenceError
from shardwise.core.validation import validation_applies
from shardwise.megatron.absent import absent_names, check_inert, inert_settings_of
from shardwise.megatron.core import parallel_state
from shardwise.megatron.core.models.language_module import LanguageModule, _output_weight_of
from shardwise.megatron.core.process_groups_config import ProcessGroupCollection, _group_of
from shardwise.megatron.core.program_utils import get_attr_wrapped_model as get_attr_wrapped_model
from shardwise.megatron.core.tensor_parallel.module import adopt_marks_
from shardwise.megatron.core.transformer.module import _Wrapper
from shardwise.megatron.core.transformer.transformer_config import TransformerConfig
from shardwise.models.experts.moe import MoELayer
from shardwise.nn.replicated import replicas_of
from shardwise.training.gradients import GradientBuffers, default_bucket_size
from shardwise.training.gradients.finalize import finalize_gradients_, summed_over_other_groups
from shardwise.training.gradients.replicas import check_replicas, fingerprints
from shardwise.training.pipeline.stage import deferred_buffers

__getattr__ = absent_names(
    "distributed.finalize_model_grads",
    "distributed.fsdp",
    "distributed.torch_fully_sharded_data_parallel",
    "distributed.torch_fully_sharded_data_parallel_config",
)

__all__ = ["DistributedDataParallel", "DistributedDataParallelConfig", "finalize_model_grads"]


@dataclass
class DistributedDataParallelConfig(inert_settings_of("DistributedDataParallelConfig")):  # type: ignore[misc]
    """Settings of the reduction of gradients over data-parallel ranks. Field names and defaults are Megatron's.

    Attributes:
        grad_reduce_in_fp32: whether to accumulate and reduce in fp32 instead of the parameters' dtype.
        overlap_grad_reduce: whether to reduce buckets during the backward instead of all at ``finish_grad_sync``.
        check_for_nan_in_grad: whether a NaN or infinite gradient is an error, on every rank.
        bucket_size: maximum number of elements in a bucket; None means max(40e6, 1e6 per data-parallel rank).
        use_distributed_optimizer: whether each rank gets the complete gradients only of the elements that it updates,
            as ``get_megatron_optimizer`` needs with the same setting.

    Megatron's other fields are accepted: a field that has no effect here warns if it is set, and a field that would
    change results or memory raises.

    Raises:
        ConfigError: an option that is not offered.
    """

    grad_reduce_in_fp32: bool = False
    overlap_grad_reduce: bool = False
    check_for_nan_in_grad: bool = False
    bucket_size: int | None = None
    use_distributed_optimizer: bool = False

    def __post_init__(self) -> None:
        check_inert(self)


class DistributedDataParallel(_Wrapper):
    """A model whose gradients are the mean over the data-parallel ranks after ``finish_grad_sync``.

    With ``config.calculate_per_token_loss`` they are the sum, which ``finalize_model_grads`` divides by all tokens.

    Gradients are in one flat buffer per dtype; ``main_grad`` of each trained parameter is a view of it. If the buffer
    has the parameter's dtype, ``grad`` is the same view, so that PyTorch's optimizers can use it. In Megatron ``grad``
    is None, and PyTorch's optimizers have no effect.

    Args:
        config: config of the model, which is stored.
        ddp_config: settings of the reduction of gradients.
        module: the model, or a stage's chunk of it, on its device.
        disable_bucketing: whether to use one bucket per dtype.
        pg_collection: groups ``dp_cp``, ``tp`` and ``pp``, and ``expt_dp``, over which gradients of parameters with
            ``allreduce=False`` are summed; None means those of the ambient topology.

    Attributes:
        module: the model.
        gradients: the gradient buffers.

    Raises:
        ConfigError: a program changed a parameter's ``allreduce`` after construction.
        TopologyError: no groups are given and none are initialised.
        DesyncError: the ranks have different parameters.
    """

    def __init__(
        self,
        config: TransformerConfig,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        disable_bucketing: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__()
        self.config, self.ddp_config, self.module = config, ddp_config, module
        self.pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups(
            ["dp_cp", "tp", "pp", "expt_dp"]
        )
        self.dp_cp_group = _group_of(self.pg_collection, "dp_cp")
        adopt_marks_(module)
        self._of_experts = _experts_in(module)
        self.expert_dp_group = _group_of(self.pg_collection, "expt_dp") if self._of_experts else None
        self._summed = self._whole()
        bucket_size = None
        if ddp_config.overlap_grad_reduce and not disable_bucketing:
            bucket_size = ddp_config.bucket_size or default_bucket_size("cuda", self.dp_cp_group.size())
        self.gradients = GradientBuffers(
            module,
            group=self.dp_cp_group,
            bucket_size=bucket_size,
            dtype=torch.float32 if ddp_config.grad_reduce_in_fp32 else None,
            average=not getattr(config, "calculate_per_token_loss", False),
            overlap=ddp_config.overlap_grad_reduce,
            late=[] if deferred_buffers(module) is None else [_output_weight_of(module)],
            other_groups={param: self._group_of(param) for param in self._of_experts},
            scatter=ddp_config.use_distributed_optimizer,
            whole=self._summed,
        )
        self._has_checked_replicas = False
        self._models = [each for each in module.modules() if isinstance(each, LanguageModule)]
        if self.dp_cp_group.size() > 1:
            for model in self._models:
                model.targets_of_first_step = []

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model's forward; before the first one with gradients, ranks compare their replicated parameters.

        Raises:
            DesyncError: on every rank that shares this chunk of the model, if the parameters differ.
        """
        if not self._has_checked_replicas and torch.is_grad_enabled() and validation_applies():
            self._has_checked_replicas = True
            for model in self._models:
                model.has_checked_replicas = True
            self._adopt_marks_()
            tp_group = _group_of(self.pg_collection, "tp")
            check_replicas(
                self.module, tp_group=tp_group, dp_group=self.dp_cp_group, expert_dp_group=self.expert_dp_group
            )
        return self.module(*inputs, **kwargs)

    def _group_of(self, param: Parameter) -> ProcessGroup:
        """Return the ranks that hold the same values."""
        is_of_expert = self.expert_dp_group is not None and param in self._of_experts
        return self.expert_dp_group if is_of_expert else self.dp_cp_group  # type: ignore[return-value]

    def _whole(self) -> set[Parameter]:
        """Return the parameters whose gradients every rank needs, because they are summed over other groups too."""
        embd_group = _embd_group_of(self.pg_collection)
        return {
            *summed_over_other_groups(self.module, tp_group=_group_of(self.pg_collection, "tp"), embd_group=embd_group)
        }

    def _adopt_marks_(self) -> None:
        adopt_marks_(self.module)
        changed = {"allreduce": _experts_in(self.module) ^ self._of_experts}
        if self.ddp_config.use_distributed_optimizer:
            changed["sequence_parallel or shared"] = self._whole() ^ self._summed
        for mark, params in changed.items():
            if params and self.dp_cp_group.size() > 1:
                name = next(name for name, param in self.module.named_parameters() if param in params)
                raise ConfigError(
                    f"{mark} of parameter {name!r} was changed after DistributedDataParallel put its gradient into a "
                    "buffer; set it before"
                )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backward passes only accumulate, without communication."""
        with self.gradients.no_sync():
            yield

    def start_grad_sync(self, *unused: Any) -> None:
        """Start the reductions that have not started yet."""
        self.gradients.start()

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Finish the reduction of gradients. All are all-reduced anyway, so ``force_all_reduce`` has no effect.

        Raises:
            DivergenceError: with ``check_for_nan_in_grad``, on every rank of the model if a gradient is not finite.
        """
        self._adopt_marks_()
        self.gradients.finish()
        self._compare_first_targets()
        if self.ddp_config.check_for_nan_in_grad:
            self._check_finite()

    def _compare_first_targets(self) -> None:
        """Warn after the first step if all data-parallel ranks learned the same targets; collective in that step."""
        models = [model for model in self._models if model.targets_of_first_step is not None]
        if not models:
            return
        hashes = [value for model in models for value in model.targets_of_first_step or ()]
        for model in models:
            model.targets_of_first_step = None
        device = self._device()
        values = torch.stack(hashes) if hashes else torch.zeros(0, dtype=torch.int64, device=device)
        own = torch.cat([fingerprints([values]), values.new_full((1,), len(hashes))])
        with accounting.uncounted():
            own = own.to(device_of_host_facts(self.dp_cp_group, device))
            every = all_gather(own.unsqueeze(0), group=self.dp_cp_group).tolist()
        is_first = self.dp_cp_group.rank() == _group_of(self.pg_collection, "tp").rank() == 0
        if is_first and hashes and all(numbers == every[0] for numbers in every):
            warnings.warn(
                f"all {len(every)} data-parallel ranks learned the same targets in the first step, and so train as one "
                "rank would; give each its own samples, by torch.utils.data.DistributedSampler or by another seed "
                "for shuffling",
                stacklevel=3,
            )

    def _device(self) -> torch.device:
        # A chunk may have no parameters.
        return next((param.device for param in self.module.parameters()), device_of(self.dp_cp_group))

    def _check_finite(self) -> None:
        wrong = [bool(~torch.isfinite(buffer).all()) for buffer in self.gradients.buffers]
        flag = torch.tensor(float(any(wrong)), device=self._device())
        # Data-parallel ranks have the same gradients, except those of experts and of other ranks' elements.
        differ = self._of_experts or self.ddp_config.use_distributed_optimizer
        for name in ("dp_cp", "tp", "pp") if differ else ("tp", "pp"):
            flag = all_reduce(flag, group=_group_of(self.pg_collection, name), op=dist.ReduceOp.MAX)
        if flag:
            raise DivergenceError(
                "check_for_nan_in_grad: a gradient is NaN or infinite; lower the learning rate, or look at the samples "
                "of this step"
            )

    def zero_grad_buffer(self) -> None:
        """Set all gradients to zero; call this at the start of each step."""
        self.gradients.zero_()

    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        """Multiply all gradients."""
        self.gradients.scale_(scaling_factor)

    def start_param_sync(self, *unused: Any, **also_unused: Any) -> None:
        """Do nothing: the optimizer's step gathers the parameters."""

    enable_forward_pre_hook = disable_forward_pre_hook = start_param_sync

    def broadcast_params(self) -> None:
        """Broadcast the first data-parallel rank's parameters to the others, in-place."""
        with torch.no_grad():
            for param in self.module.parameters():
                broadcast_(param, group=self._group_of(param))

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return the model's ``state_dict_for_save_checkpoint``."""
        module: Any = self.module
        return module.state_dict_for_save_checkpoint(prefix=prefix, keep_vars=keep_vars)


def finalize_model_grads(
    model: Sequence[nn.Module],
    num_tokens: Tensor | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool | None = False,
) -> None:
    """Complete the gradients of a step over data-parallel ranks, over ranks that share a sequence, and of tied weights.

    Biases that balance experts (``moe_router_enable_expert_bias``) are moved by the loads of the step.

    Args:
        model: this stage's chunks, each a ``DistributedDataParallel``.
        num_tokens: None, or a scalar with this rank's number of tokens on the last stage. It is overwritten by the
            total over all ranks. The gradients, which are means over ranks, or with ``calculate_per_token_loss`` sums,
            are divided by this total.
        pg_collection: groups ``tp``, ``pp``, ``embd`` and ``dp_cp``; missing groups come from the ambient topology.
        force_all_reduce: no effect, because gradients are always all-reduced.

    Raises:
        ConfigError: a chunk is not wrapped.
    """
    for chunk in model:
        if not hasattr(chunk, "finish_grad_sync"):
            raise ConfigError(
                f"finalize_model_grads was given a {type(chunk).__name__}, which has no finish_grad_sync; wrap each "
                "chunk of the model in DistributedDataParallel"
            )
    chunks: Sequence[Any] = model
    for chunk in chunks:
        chunk.finish_grad_sync(force_all_reduce=force_all_reduce)
    whole = nn.ModuleList(model)
    adopt_marks_(whole)
    pp_group = _group_of(pg_collection, "pp")
    embd_group = _embd_group_of(pg_collection)
    finalize_gradients_(whole, tp_group=_group_of(pg_collection, "tp"), dp_group=None, embd_group=embd_group)
    if num_tokens is not None:
        broadcast_(num_tokens, group=pp_group, group_src=pp_group.size() - 1)
        num_tokens.copy_(all_reduce(num_tokens, group=_group_of(pg_collection, "dp_cp")))
        for chunk in chunks:
            chunk.scale_gradients(1.0 / num_tokens.clamp(min=1))
    _balance_(whole, [_group_of(pg_collection, name) for name in ("tp", "dp_cp")])


def _embd_group_of(collection: ProcessGroupCollection | None) -> ProcessGroup | None:
    """Return the stages that hold a tied weight; None if this rank is in no such group."""
    if hasattr(collection, "embd") or not parallel_state.model_parallel_is_initialized():
        return getattr(collection, "embd", None)
    return parallel_state.get_embedding_group(check_initialized=False)


def _experts_in(module: nn.Module) -> set[Parameter]:
    return {param for param, replicas in replicas_of(module).items() if replicas.is_of_expert}


def _balance_(model: nn.Module, groups: Sequence[ProcessGroup]) -> None:
    """Move the routers' biases by the numbers of tokens that each expert got on all ranks, and forget the numbers."""
    layers = [each for each in model.modules() if isinstance(each, MoELayer) and each.spec.bias_rate]
    counts = {layer: layer.statistics[: layer.spec.num] for layer in layers if layer.statistics is not None}
    if not counts:
        return
    loads = torch.stack([*counts.values()])
    for group in groups:
        loads = all_reduce(loads, group=group)
    for layer, each in zip(counts, loads, strict=True):
        layer.router.balance_(each)
        layer.statistics = None
