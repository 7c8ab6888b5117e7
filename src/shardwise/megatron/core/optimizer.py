"""Megatron's optimizers: the engine's AdamW, fp32 copies, ZeRO stage 1, norm and clipping, by Megatron's names."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from shardwise.core.errors import ConfigError
from shardwise.core.sharding import ParamShard
from shardwise.core.topology import Groups
from shardwise.megatron.absent import absent_names
from shardwise.megatron.core import optimizer_config
from shardwise.megatron.core.optimizer_config import *  # noqa: F403
from shardwise.megatron.core.optimizer_config import (
    ConfigOverrides,
    OptimizerConfig,
    _param_groups,
    _scaler_of,
    check_config_overrides_consistency,
)
from shardwise.megatron.core.process_groups_config import ProcessGroupCollection, _group_of
from shardwise.megatron.core.services import has_config_logger_enabled, log_config_to_disk
from shardwise.megatron.core.sharded_entries import ShardedTensorFactory
from shardwise.megatron.core.utils import unwrap_model
from shardwise.megatron.surface import offer
from shardwise.training.gradients import Share
from shardwise.training.gradients.finalize import gradients_of
from shardwise.training.optimizer.adamw import AdamW
from shardwise.training.optimizer.clipping import scale_gradients_
from shardwise.training.optimizer.grad_norm import global_grad_norm, num_zeros
from shardwise.training.optimizer.optimizer import (
    MasterWeights,
    ShardedOptimizer,
    ZeroOptimizer,
    optimizer_state,
    stored_weights,
)

__getattr__ = absent_names(
    "optimizer", "optimizer.optimizer", "optimizer.optimizer_config", "optimizer.distrib_optimizer"
)


class _GroupedAdamW(AdamW):
    """The engine's AdamW, with Megatron's groups of parameters."""

    def __init__(self, chunks: nn.ModuleList, config: OptimizerConfig, overrides: ConfigOverrides | None) -> None:
        if config.lr is None:
            raise ConfigError("OptimizerConfig.lr is None; set the learning rate")
        self._groups = _param_groups(list(chunks), config, overrides)
        super().__init__(
            chunks,
            learning_rate=config.lr,
            weight_decay=config.weight_decay,
            betas=(config.adam_beta1, config.adam_beta2),
            epsilon=config.adam_eps,
        )

    def _divided(self, groups: list[dict[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
        return self._groups


class _Chunks(nn.ModuleList):
    """Chunks of a stage; the number of experts is that of their config, also if no layer of the stage has any."""

    config: Any


class _Buffers:
    """The gradient buffers of several chunks, as one."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._of_chunks = [chunk.gradients for chunk in chunks]
        self.buckets = [bucket for each in self._of_chunks for bucket in each.buckets]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "before_reducing":
            for each in self._of_chunks:
                each.before_reducing = value
        super().__setattr__(name, value)

    def zero_(self) -> None:
        for each in self._of_chunks:
            each.zero_()


class MegatronOptimizer:
    """Base class of the optimizers that ``get_megatron_optimizer`` makes."""


class _OptimizerOfChunks(MegatronOptimizer):
    """Optimizer of a stage's chunks.

    A group's ``weight_decay`` is the config's, also with a ``wd_mult`` of 0, until ``OptimizerParamScheduler`` sets it,
    as in Megatron.

    Args:
        config: settings.
        model_chunks: chunks, each a ``DistributedDataParallel``.
        config_overrides: values of groups; None for ``get_standard_config_overrides``.
        pg_collection: groups ``tp``, ``pp``, ``dp_cp`` and ``expt_dp``; missing groups come from the ambient topology.

    Attributes:
        optimizer: AdamW, with its groups and state.
        config: the settings.
        model_chunks: the chunks.
        grad_scaler: factor of the loss; None for 1.
        is_stub_optimizer: True if this rank trains nothing.

    Raises:
        ConfigError: settings contradict each other, the config of the chunks, or the dtype of the parameters.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        model_chunks: Sequence[nn.Module],
        config_overrides: ConfigOverrides | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        _check(config, model_chunks)
        if has_config_logger_enabled(config):
            log_config_to_disk(config, {"config": config}, prefix=type(self).__name__)
        self.config, self.model_chunks = config, list(model_chunks)
        self.grad_scaler = _scaler_of(config)
        self._model = _Chunks(model_chunks)
        self._model.config = getattr(unwrap_model(model_chunks[0]), "config", None)
        tp_group, pp_group, dp_group, expert_dp = (
            _group_of(pg_collection, name) for name in ("tp", "pp", "dp_cp", "expt_dp")
        )
        self._groups = Groups(tp_group, pp=pp_group, dp=dp_group, expert_dp=expert_dp)
        self.optimizer = _GroupedAdamW(self._model, config, config_overrides)
        self.is_stub_optimizer = not any(group["params"] for group in self.optimizer.param_groups)
        self._num_steps = 0
        self._device = next(self._model.parameters()).device
        self._engine = self._wrapped(self.optimizer)

    def _wrapped(self, optimizer: AdamW) -> ShardedOptimizer:
        """Return the engine's optimizer, which may update other tensors than the parameters."""
        return optimizer

    @property
    def _shares(self) -> Mapping[Parameter, Share] | None:
        return None

    @property
    def _of_norm(self) -> dict[str, Any]:
        groups = self._groups
        return {"tp_group": groups.tp, "pp_group": groups.pp, "shares": self._shares, "groups": groups}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of parameters, of their fp32 copies or of this rank's elements."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        """State of each parameter of ``param_groups``."""
        return self.optimizer.state

    def get_parameters(self) -> list[Parameter]:
        """Return the parameters of ``param_groups``."""
        return [param for group in self.param_groups for param in group["params"]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients."""
        self._engine.zero_grad(set_to_none)
        if (masters := self._masters) is not None:
            masters.factor_of_copies = 1.0

    def get_loss_scale(self) -> Tensor:
        """Return the factor of the loss, ``[1]`` in fp32."""
        scale = torch.ones(1) if self.grad_scaler is None else self.grad_scaler.scale
        return scale.to(self._device)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times the factor, for ``grad_scale_func`` of the model's config."""
        return self.get_loss_scale() * loss

    @torch.no_grad()
    def get_grad_norm(self) -> float:
        """Return the 2-norm of the whole model's gradient. Collective."""
        later = 1.0 if self._masters is None else self._masters.factor_of_copies
        return float(global_grad_norm(self._model, **self._of_norm)) * later

    @torch.no_grad()
    def count_zeros(self) -> float:
        """Return the number of zeros in the whole model's gradient. Collective."""
        return float(num_zeros(self._model, **self._of_norm))

    def clip_grad_norm(self, clip_grad: float) -> float:
        """Scale the gradients so that their norm is at most ``clip_grad``, and return the norm before. Collective."""
        norm, masters = self.get_grad_norm(), self._masters
        own = gradients_of(self._model.parameters())
        if masters is None or any(gradient.dtype.itemsize > 2 for gradient in own):
            self._scale_gradients_(norm, clip_grad)
        elif 0 < clip_grad < norm + 1e-6:
            # As in Megatron, 16-bit gradients keep their values, and their fp32 copies are scaled.
            masters.factor_of_copies *= clip_grad / (norm + 1e-6)
        return norm

    @torch.no_grad()
    def _scale_gradients_(self, norm: float, max_norm: float, loss_scale: float = 1.0) -> None:
        known = torch.tensor(norm, dtype=torch.float64)
        scale_gradients_(self._model, known, max_norm, loss_scale=loss_scale, shares=self._shares)

    def prepare_grads(self) -> bool:
        """Divide the gradients by the factor of the loss; return True if they overflow, on any rank. Collective."""
        if self.grad_scaler is None:
            return False
        scale = float(self.grad_scaler.scale)
        found_inf = not math.isfinite(self.get_grad_norm())
        self.grad_scaler.update(found_inf)
        if not found_inf:
            self._scale_gradients_(0.0, 0.0, scale)
        return found_inf

    def step_with_ready_grads(self) -> bool:
        """Update the parameters from the gradients; return True. Collective with the distributed optimizer."""
        self._engine.step()
        self._num_steps += 1
        return True

    def step(self) -> tuple[bool, float | None, float | None]:
        """Clip the gradients and update the parameters. Collective.

        Returns:
            Whether the parameters were updated, the norm of the gradients before clipping and, with
            ``log_num_zeros_in_grad``, the number of zeros in them; False, None and None if scaled gradients overflow.
        """
        if self.prepare_grads():
            return False, None, None
        norm = self.clip_grad_norm(self.config.clip_grad)
        zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else None
        return self.step_with_ready_grads(), norm, zeros

    def reload_model_params(self, state_dict: Any = None) -> None:
        """Take over parameters that the program has changed.

        Raises:
            ConfigError: ``state_dict`` is given.
        """
        if state_dict is not None:
            raise ConfigError("reload_model_params takes the values of the model's parameters; leave state_dict out")
        if (masters := self._masters) is not None:
            masters.reload_()

    @property
    def _masters(self) -> MasterWeights | None:
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of PyTorch's optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state of ``state_dict``, or from what ``dist_checkpointing.load`` returns.

        The latter has loaded the tensors already. Learning rates and weight decays of groups are the program's, or come
        from ``OptimizerParamScheduler.load_state_dict``. Collective with the distributed optimizer.
        """
        if "common_step" not in state_dict:
            self._load_tensors(state_dict)
            steps = [int(state["step"]) for state in self.state.values() if "step" in state]
            self._num_steps = max(steps, default=0)
        else:
            self._num_steps = int(state_dict["common_step"])
            self._engine.set_step_(self._num_steps)
        if self.grad_scaler is not None and state_dict.get("grad_scaler"):
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])

    def _load_tensors(self, state_dict: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(dict(state_dict))

    def sharded_state_dict(
        self,
        model_sharded_state_dict: Mapping[str, Any],
        is_loading: bool = False,
        metadata: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the state for ``dist_checkpointing.save`` and ``load``, which may be at another layout.

        Args:
            model_sharded_state_dict: state with the entries of the model's parameters, at any depth.
            is_loading, metadata: no effect: there is one format, and missing state is made.
        """
        state: dict[str, ParamShard] = {}
        for path, weight in _shards_in(model_sharded_state_dict).items():
            # Shards that make up one tensor have one key.
            own = optimizer_state({weight.key: weight}, self._engine)
            if own and self._masters is not None:
                name = f"fp32_param.{weight.key}"
                own |= stored_weights({name: weight.with_key(name)}, self._engine)
            state |= {f"{name.partition('.')[0]}.{path}": shard for name, shard in own.items()}
        scaler = {} if self.grad_scaler is None else self.grad_scaler.state_dict()
        return {"state": state, "common_step": self._num_steps, "grad_scaler": scaler}

    def offload_to_cpu(self) -> NoReturn:
        """Raise ConfigError: the state stays on the parameters' device."""
        raise ConfigError("the optimizer's state stays on the parameters' device; leave offload_to_cpu out")

    restore_from_cpu = offload_to_cpu


class FP32Optimizer(_OptimizerOfChunks):
    """Optimizer of parameters that it updates in their dtype."""

    def prepare_grads(self) -> bool:
        # A program may write main_grad by hand, and finish no reduction.
        for param in self.get_parameters():
            if param.grad is None:
                param.grad = getattr(param, "main_grad", None)
        return super().prepare_grads()


class MixedPrecisionOptimizer(_OptimizerOfChunks):
    """Base class of optimizers whose gradients may be scaled."""


class Float16OptimizerWithFloat16Params(MixedPrecisionOptimizer):
    """Optimizer of 16-bit parameters by fp32 copies."""

    def _wrapped(self, optimizer: AdamW) -> ShardedOptimizer:
        return MasterWeights(optimizer, self._model)

    @property
    def _masters(self) -> MasterWeights:
        return cast(MasterWeights, self._engine)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of PyTorch's optimizer, of the scaler, and the fp32 copies by group."""
        scaler = {} if self.grad_scaler is None else {"grad_scaler": self.grad_scaler.state_dict()}
        copies = [list(group["params"]) for group in self.param_groups]
        return {"optimizer": self.optimizer.state_dict(), **scaler, "fp32_from_fp16_params": copies}

    @torch.no_grad()
    def _load_tensors(self, state_dict: Mapping[str, Any]) -> None:
        super()._load_tensors(state_dict["optimizer"])
        for own, stored in zip(self.param_groups, state_dict["fp32_from_fp16_params"], strict=True):
            for copy, value in zip(own["params"], stored, strict=True):
                copy.copy_(value)
        self._masters.round_()


class DistributedOptimizer(MixedPrecisionOptimizer):
    """Optimizer of which each data-parallel rank holds the state of its elements only (ZeRO stage 1)."""

    def _wrapped(self, optimizer: AdamW) -> ZeroOptimizer:
        gradients: Any = _Buffers(self.model_chunks)
        has_masters = self.config.bf16 or self.config.fp16
        return ZeroOptimizer(optimizer, self.model_chunks, gradients, has_masters=has_masters)

    @property
    def _shares(self) -> Mapping[Parameter, Share]:
        return cast(ZeroOptimizer, self._engine).parameters.shares

    @property
    def _masters(self) -> MasterWeights | None:
        inner = cast(ZeroOptimizer, self._engine).optimizer
        return inner if isinstance(inner, MasterWeights) else None

    def step_with_ready_grads(self) -> bool:
        super().step_with_ready_grads()
        # Programs read parameters between steps.
        cast(ZeroOptimizer, self._engine).parameters.wait()
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the values that are the same on all ranks; ``sharded_state_dict`` has the tensors too."""
        groups = [{name: value for name, value in each.items() if name != "params"} for each in self.param_groups]
        scaler = {} if self.grad_scaler is None else {"grad_scaler": self.grad_scaler.state_dict()}
        return {"optimizer": {"param_groups": groups}, "common_step": self._num_steps, **scaler}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for group, stored in zip(
            self.param_groups, state_dict.get("optimizer", {}).get("param_groups", []), strict=False
        ):
            group.update(stored)
        super().load_state_dict(state_dict)

    def save_parameter_state(self, filename: str) -> NoReturn:
        """Raise ConfigError: the file would be pickled."""
        raise ConfigError(
            f"{filename} would hold pickled tensors of one rank; save sharded_state_dict with dist_checkpointing.save"
        )

    def load_parameter_state(self, filename: str, *, update_legacy_format: bool = False) -> NoReturn:
        """Raise ConfigError: the file is pickled."""
        self.save_parameter_state(filename)


class ChainedOptimizer(MegatronOptimizer):
    """The optimizer of all parameters, by the name that Megatron gives to a list of them; has its attributes.

    Args:
        chained_optimizers: a list of one.

    Raises:
        ConfigError: there are several.
    """

    def __init__(self, chained_optimizers: Sequence[MegatronOptimizer]) -> None:
        if len(chained_optimizers) != 1:
            raise ConfigError(
                f"chained_optimizers has {len(chained_optimizers)} optimizers; one updates all parameters, also of "
                "experts, so give get_megatron_optimizer all chunks"
            )
        self.chained_optimizers = chained_optimizers

    def __getattr__(self, name: str) -> Any:
        if name == "chained_optimizers":
            raise AttributeError(name)
        return getattr(self.chained_optimizers[0], name)


def get_megatron_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[nn.Module],
    config_overrides: ConfigOverrides | None = None,
    use_gloo_process_groups: bool = True,
    pg_collection: ProcessGroupCollection | None = None,
    dump_param_to_param_group_map: str | None = None,
) -> ChainedOptimizer:
    """Make the optimizer of a stage's chunks. Every rank calls it.

    Args:
        config: settings.
        model_chunks: chunks, each a ``DistributedDataParallel``.
        config_overrides: values of groups of parameters; None for ``get_standard_config_overrides``.
        use_gloo_process_groups: no effect.
        pg_collection: groups ``tp``, ``pp``, ``dp_cp`` and ``expt_dp``; missing groups come from the ambient topology.
        dump_param_to_param_group_map: not supported.

    Returns:
        A ``ChainedOptimizer`` of a ``DistributedOptimizer`` if the config says so, else of a
        ``Float16OptimizerWithFloat16Params`` with fp16 or bf16, else of an ``FP32Optimizer``.

    Raises:
        ConfigError: the config contradicts itself, the chunks, or the dtype of their parameters.
    """
    if dump_param_to_param_group_map is not None:
        raise ConfigError("dump_param_to_param_group_map is not offered here; read the optimizer's param_groups")
    check_config_overrides_consistency(config, config_overrides)
    kind: type[_OptimizerOfChunks] = FP32Optimizer
    if config.use_distributed_optimizer:
        kind = DistributedOptimizer
    elif config.fp16 or config.bf16:
        kind = Float16OptimizerWithFloat16Params
    return ChainedOptimizer([kind(config, model_chunks, config_overrides, pg_collection)])


def _check(config: OptimizerConfig, chunks: Any) -> None:
    if not isinstance(config, OptimizerConfig):
        raise ConfigError(
            f"config is a {type(config).__name__}; give an OptimizerConfig, or use get_megatron_optimizer"
        )
    if config.fp16 and config.bf16:
        raise ConfigError("OptimizerConfig has fp16=True and bf16=True; set one of them")
    for chunk in chunks:
        if not hasattr(chunk, "ddp_config"):
            raise ConfigError(
                f"a chunk of the model is a {type(chunk).__name__}; wrap each in DistributedDataParallel, which "
                "sums the gradients"
            )
        if chunk.ddp_config.use_distributed_optimizer != config.use_distributed_optimizer:
            raise ConfigError(
                f"use_distributed_optimizer is {config.use_distributed_optimizer} in OptimizerConfig and "
                f"{chunk.ddp_config.use_distributed_optimizer} in DistributedDataParallelConfig; give both the same"
            )
        for name, param in chunk.named_parameters():
            gradient = getattr(param, "main_grad", param)
            if not (config.fp16 or config.bf16) and gradient.dtype != param.dtype:
                raise ConfigError(
                    f"parameter {name!r} has dtype {param.dtype} and a gradient in {gradient.dtype}; set bf16 or fp16 "
                    "in OptimizerConfig"
                )


def _shards_in(state: Any) -> dict[str, ParamShard]:
    """Return the entries in nested dicts and lists by path, without the names that dicts of chunks add."""
    if isinstance(state, ParamShard):
        return {"": state}
    if isinstance(state, ShardedTensorFactory):
        raise ConfigError(
            f"{state.key!r} is a ShardedTensorFactory, whose optimizer state has no entries here; give an entry "
            "for each tensor that it builds, such as ShardedTensor of views of the parameter"
        )
    items: Any = enumerate(state) if isinstance(state, (list, tuple)) else getattr(state, "items", tuple)()
    return {f"{key}.{path}".rstrip("."): shard for key, item in items for path, shard in _shards_in(item).items()}


offer(globals(), optimizer_config)
