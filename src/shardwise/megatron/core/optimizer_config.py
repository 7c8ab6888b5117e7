"""Settings of Megatron's optimizers, the groups of parameters that they make, and the scale of the loss."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from shardwise.core.errors import ConfigError
from shardwise.megatron.absent import absent_names, check_inert, inert_settings_of
from shardwise.megatron.core.optimizer_param_scheduler import ParamGroupOverride, combine_param_group_overrides
from shardwise.megatron.surface import offer

__getattr__ = absent_names("optimizer.optimizer_config")

_NO_OTHER_DTYPE = {"refused": "gradients, copies of weights and the optimizer's state are in fp32"}


@dataclass
class OptimizerConfig(inert_settings_of("OptimizerConfig")):  # type: ignore[misc]
    """Settings of AdamW. Field names and defaults are Megatron's.

    Attributes:
        lr, min_lr: maximum and minimum of the learning rate, which ``OptimizerParamScheduler`` sets.
        decoupled_lr, decoupled_min_lr: the same for the embedding and the output layer, by
            ``get_standard_config_overrides``.
        weight_decay: weight decay per unit of learning rate.
        apply_wd_to_qk_layernorm: whether the norms of queries and keys decay, as matrices do.
        fp16, bf16: whether 16-bit parameters have fp32 copies; with fp16 the loss is scaled.
        params_dtype: dtype of the parameters.
        loss_scale: constant factor of the loss; None means a dynamic one with fp16, and 1 otherwise. Only mixed
            precision and the distributed optimizer have one, as in Megatron.
        initial_loss_scale, min_loss_scale, loss_scale_window, hysteresis: arguments of ``DynamicGradScaler``.
        adam_beta1, adam_beta2, adam_eps: constants of AdamW.
        use_distributed_optimizer: whether each data-parallel rank updates its elements of the parameters (ZeRO stage
            1), as in ``DistributedDataParallelConfig``.
        clip_grad: maximum norm of the gradients; 0 turns clipping off.
        log_num_zeros_in_grad: whether ``step`` counts the zeros in the gradients.
        config_logger_dir: folder of ``log_config_to_disk``.

    Megatron's other fields are accepted: a field that has no effect here warns if it is set, and a field that would
    change results or memory raises.

    Raises:
        ConfigError: an option that is not offered.
    """

    lr: float | None = None
    min_lr: float | None = None
    decoupled_lr: float | None = None
    decoupled_min_lr: float | None = None
    weight_decay: float = 0.01
    apply_wd_to_qk_layernorm: bool = False
    fp16: bool = False
    bf16: bool = False
    params_dtype: torch.dtype = torch.float32
    main_grads_dtype: torch.dtype = field(default=torch.float32, metadata=_NO_OTHER_DTYPE)
    main_params_dtype: torch.dtype = field(default=torch.float32, metadata=_NO_OTHER_DTYPE)
    exp_avg_dtype: torch.dtype = field(default=torch.float32, metadata=_NO_OTHER_DTYPE)
    exp_avg_sq_dtype: torch.dtype = field(default=torch.float32, metadata=_NO_OTHER_DTYPE)
    loss_scale: float | None = None
    initial_loss_scale: float = 2**32
    min_loss_scale: float = 1.0
    loss_scale_window: float = 1000
    hysteresis: int = 2
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-08
    use_distributed_optimizer: bool = False
    clip_grad: float = 1.0
    log_num_zeros_in_grad: bool = False
    config_logger_dir: str = ""

    def __post_init__(self) -> None:
        check_inert(self)


AdamOptimizerConfig = OptimizerConfig


@dataclass(frozen=True)
class ParamPredicate:
    """A condition on a parameter; two of one name are equal."""

    name: str
    fn: Callable[[Parameter], bool] = field(compare=False, hash=False)

    def __call__(self, param: Parameter) -> bool:
        return self.fn(param)


@dataclass(frozen=True)
class ParamWithNamePredicate:
    """A condition on a parameter and its name; two of one name are equal."""

    name: str
    fn: Callable[[Parameter, str], bool] = field(compare=False, hash=False)

    def __call__(self, param: Parameter, name: str) -> bool:
        return self.fn(param, name)


@dataclass(frozen=True, slots=True)
class ParamKey:
    """Conditions on parameters; one that holds is enough. Each is one value or a tuple of several.

    Attributes:
        name: patterns of names, as in a shell.
        attr: names of attributes that are set and true.
        predicate, with_name_predicate: functions.
    """

    name: str | tuple[str, ...] = ()
    attr: str | tuple[str, ...] = ()
    predicate: ParamPredicate | tuple[ParamPredicate, ...] = ()
    with_name_predicate: ParamWithNamePredicate | tuple[ParamWithNamePredicate, ...] = ()

    def matches(self, param: Parameter, param_name: str) -> bool:
        """True if the parameter satisfies one of the conditions."""
        return (
            any(fnmatch(param_name, pattern) for pattern in _several(self.name))
            or any(getattr(param, attr, False) for attr in _several(self.attr))
            or any(holds(param) for holds in _several(self.predicate))
            or any(holds(param, param_name) for holds in _several(self.with_name_predicate))
        )


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


ConfigOverrides = Mapping[ParamKey, ParamGroupOverride]
"""Values of the groups of the parameters that a key matches."""


def get_standard_config_overrides(config: OptimizerConfig) -> dict[ParamKey, ParamGroupOverride]:
    """Return what holds without overrides: biases and vectors do not decay, and the rates of ``decoupled_lr``."""
    if config.apply_wd_to_qk_layernorm:

        def is_plain(param: Parameter, name: str) -> bool:
            is_vector = param.dim() == 1 or name.endswith(".bias")
            return is_vector and not ("q_layernorm." in name or "k_layernorm." in name)

        undecayed = ParamKey(with_name_predicate=ParamWithNamePredicate("s1_not_qkln", is_plain))
    else:
        undecayed = ParamKey("*.bias", predicate=ParamPredicate("param_len_1", lambda param: param.dim() == 1))
    overrides = {undecayed: ParamGroupOverride(wd_mult=0.0)}
    if config.decoupled_lr is not None:
        rates = ParamGroupOverride(max_lr=config.decoupled_lr)
        if config.decoupled_min_lr is not None:
            rates["min_lr"] = config.decoupled_min_lr
        overrides[ParamKey(attr="is_embedding_or_output_parameter")] = rates
    return overrides


def check_config_overrides_consistency(config: OptimizerConfig, config_overrides: ConfigOverrides | None) -> bool:
    """Return True if no override contradicts a setting of the optimizer as a whole.

    Raises:
        ConfigError: one does.
    """
    for override in map(dict, (config_overrides or {}).values()):
        for name in ("overlap_param_gather_with_optimizer_step", "optimizer", "optimizer_cpu_offload"):
            if name in override and override[name] != getattr(config, name):
                raise ConfigError(
                    f"an override sets {name} to {override[name]!r}, and the config has {getattr(config, name)!r}; "
                    "one optimizer has one value, so set it in the config"
                )
    return True


def _param_groups(
    chunks: Sequence[nn.Module], config: OptimizerConfig, overrides: ConfigOverrides | None
) -> list[dict[str, Any]]:
    """Return groups of parameters by their overrides, and by whether they are of experts."""
    if overrides is None:
        overrides = get_standard_config_overrides(config)
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    seen: set[Parameter] = set()
    for chunk in chunks:
        for name, param in chunk.named_parameters():
            if not param.requires_grad or param in seen:
                continue
            seen.add(param)
            own: dict[str, Any] = {
                **combine_param_group_overrides([each for key, each in overrides.items() if key.matches(param, name)])
            }
            is_of_expert = not getattr(param, "allreduce", True)
            made = {
                "params": [],
                "is_expert_parallel": is_of_expert,
                "default_config": not any("lr" in name for name in own),
                "wd_mult": 1.0,
                "lr_mult": 1.0,
                "is_decoupled_lr": False,
                "max_lr": config.lr,
                "min_lr": config.min_lr,
                "weight_decay": config.weight_decay,
                **own,
            }
            groups.setdefault((bool(own), sorted(own.items()).__repr__(), is_of_expert), made)["params"].append(param)
    # A rank may train nothing, and PyTorch wants a group.
    return [groups[key] for key in sorted(groups)] or [{"params": [], "weight_decay": config.weight_decay}]


class ConstantGradScaler:
    """A constant factor of the loss."""

    def __init__(self, initial_scale: float) -> None:
        self._scale = float(initial_scale)

    @property
    def scale(self) -> Tensor:
        """The factor, ``[1]``."""
        return torch.tensor([self._scale])

    @property
    def inv_scale(self) -> Tensor:
        """Its inverse, ``[1]``."""
        return torch.tensor([1 / self._scale])

    def update(self, found_inf: bool) -> None:
        """Count a step, in which gradients overflowed or did not."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the values of ``state_dict``."""


MegatronGradScaler = ConstantGradScaler


class DynamicGradScaler(ConstantGradScaler):
    """A factor of the loss that shrinks when gradients overflow, and grows after many steps without an overflow.

    Args:
        initial_scale, min_scale: first value, and lower bound.
        growth_factor, backoff_factor: factors of a growth and of a decrease.
        growth_interval: number of steps in a row without an overflow before it grows.
        hysteresis: number of overflows since the last growth before it shrinks.
    """

    def __init__(
        self,
        initial_scale: float,
        min_scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: float,
        hysteresis: int,
    ) -> None:
        super().__init__(initial_scale)
        if not (0 < min_scale <= initial_scale and 0 < backoff_factor < 1 < growth_factor):
            raise ConfigError(
                f"initial_scale is {initial_scale}, min_scale {min_scale}, growth_factor {growth_factor} and "
                f"backoff_factor {backoff_factor}; they need 0 < min_scale <= initial_scale and "
                "0 < backoff_factor < 1 < growth_factor"
            )
        if growth_interval < 1 or hysteresis < 1:
            raise ConfigError(
                f"growth_interval is {growth_interval} and hysteresis {hysteresis}; they must be at least 1"
            )
        self.min_scale, self.growth_factor, self.backoff_factor = min_scale, growth_factor, backoff_factor
        self.growth_interval, self.hysteresis = growth_interval, hysteresis
        self._growth_tracker, self._hysteresis_tracker = 0, hysteresis

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self._growth_tracker = 0
            self._hysteresis_tracker -= 1
            if self._hysteresis_tracker <= 0:
                self._scale = max(self._scale * self.backoff_factor, self.min_scale)
            return
        self._growth_tracker += 1
        if self._growth_tracker == self.growth_interval:
            self._growth_tracker, self._hysteresis_tracker = 0, self.hysteresis
            self._scale *= self.growth_factor

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": self._scale,
            "growth_tracker": self._growth_tracker,
            "hysteresis_tracker": self._hysteresis_tracker,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._scale = float(state_dict["scale"])
        self._growth_tracker = state_dict["growth_tracker"]
        self._hysteresis_tracker = state_dict["hysteresis_tracker"]


def _scaler_of(config: OptimizerConfig) -> ConstantGradScaler | None:
    if not (config.fp16 or config.bf16 or config.use_distributed_optimizer):
        # Megatron's FP32Optimizer does not scale.
        return None
    if config.loss_scale:
        return ConstantGradScaler(config.loss_scale)
    if not config.fp16:
        return None
    return DynamicGradScaler(
        config.initial_loss_scale, config.min_loss_scale, 2.0, 0.5, config.loss_scale_window, config.hysteresis
    )


offer(globals(), "AdamOptimizerConfig MegatronGradScaler ParamGroupOverride")
