"""Megatron's schedule of the learning rate and the weight decay of an optimizer's parameter groups."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypedDict, cast

from shardwise.core.errors import ConfigError
from shardwise.megatron.errors import AssertedConfigError
from shardwise.megatron.surface import offer

_LOGGER = logging.getLogger(__name__)
_WSD_STYLES: dict[str | None, Callable[[float], float]] = {
    "linear": lambda part: 1 - part,
    "cosine": lambda part: 0.5 * (1 + math.cos(math.pi * part)),
    "exponential": lambda part: 2 * 0.5**part - 1,
    "minus_sqrt": lambda part: 1 - math.sqrt(part),
}
_DECAYS = ("constant", "inverse-square-root", "linear", "cosine", "WSD")
_OF_DECAY = ("max_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style", "min_lr")
_OF_WEIGHTS = ("start_wd", "end_wd", "wd_incr_style", "wd_incr_steps")


class HasParamGroups(Protocol):
    """An optimizer with parameter groups, PyTorch's too."""

    param_groups: list[dict[str, Any]]


class ParamGroupOverride(TypedDict, total=False):
    """Values of a group of parameters that replace those of the schedule."""

    max_lr: float
    min_lr: float | None
    start_wd: float
    end_wd: float
    wd_mult: float


def combine_param_group_overrides(param_group_overrides: Sequence[ParamGroupOverride | None]) -> ParamGroupOverride:
    """Return all overrides as one.

    Raises:
        ConfigError: two have different values under one name.
    """
    combined: dict[str, Any] = {}
    for override in param_group_overrides:
        for name, value in (override or {}).items():
            if combined.setdefault(name, value) != value:
                raise ConfigError(
                    f"a parameter has two overrides of {name}, {combined[name]!r} and {value!r}; give keys that match "
                    "different parameters"
                )
    return cast(ParamGroupOverride, combined)


def param_group_override_to_tuple(param_group_override: ParamGroupOverride | None) -> tuple[Any, ...] | None:
    """Return an override as a sorted tuple of names and values; None for None."""
    return None if param_group_override is None else tuple(sorted(param_group_override.items()))


def get_canonical_lr_for_logging(param_groups: Sequence[dict[str, Any]]) -> float | None:
    """Return the learning rate of the first group without one of its own; None without such a group."""
    return next((group.get("lr") for group in param_groups if group.get("default_config")), None)


class OptimizerParamScheduler:
    """Set ``lr`` and ``weight_decay`` of the groups of an optimizer by the number of steps.

    A group may have its own ``max_lr``, ``min_lr``, ``start_wd``, ``end_wd`` and ``wd_mult``.

    Args:
        optimizer: object with ``param_groups``.
        init_lr, max_lr, min_lr: learning rate at step 0, after the warm-up, and at the end of the decay.
        lr_warmup_steps: steps of the linear warm-up.
        lr_decay_steps: steps until the end of the decay, warm-up included.
        lr_decay_style: "constant", "linear", "cosine", "inverse-square-root" or "WSD".
        start_wd, end_wd: weight decay at step 0 and after ``wd_incr_steps``.
        wd_incr_steps: steps of its increase.
        wd_incr_style: "constant", "linear" or "cosine".
        use_checkpoint_opt_param_scheduler: whether ``load_state_dict`` takes values that differ from these.
        override_opt_param_scheduler: whether ``load_state_dict`` keeps these.
        wsd_decay_steps: last steps of ``lr_decay_steps`` in which "WSD" decays.
        lr_wsd_decay_style: "linear", "cosine", "exponential" or "minus_sqrt".

    Raises:
        AssertedConfigError: the values contradict each other, or a style is unknown.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        init_lr: float,
        max_lr: float,
        min_lr: float,
        lr_warmup_steps: int,
        lr_decay_steps: int,
        lr_decay_style: str,
        start_wd: float,
        end_wd: float,
        wd_incr_steps: int,
        wd_incr_style: str,
        use_checkpoint_opt_param_scheduler: bool | None = True,
        override_opt_param_scheduler: bool | None = False,
        wsd_decay_steps: int | None = None,
        lr_wsd_decay_style: str | None = None,
    ) -> None:
        self.optimizer, self.num_steps = optimizer, 0
        self.init_lr, self.max_lr, self.min_lr = init_lr, float(max_lr), min_lr
        self.lr_warmup_steps, self.lr_decay_steps, self.lr_decay_style = lr_warmup_steps, lr_decay_steps, lr_decay_style
        self.wsd_decay_steps, self.lr_wsd_decay_style = wsd_decay_steps, lr_wsd_decay_style
        self.start_wd, self.end_wd = start_wd, end_wd
        self.wd_incr_steps, self.wd_incr_style = wd_incr_steps, wd_incr_style
        self.use_checkpoint_opt_param_scheduler = use_checkpoint_opt_param_scheduler
        self.override_opt_param_scheduler = override_opt_param_scheduler
        self._check()
        self.step(0)

    def _check(self) -> None:
        is_wsd = self.lr_decay_style == "WSD"
        rules = {
            f"0 <= min_lr {self.min_lr} <= max_lr {self.max_lr}": 0 <= self.min_lr <= self.max_lr,
            f"init_lr {self.init_lr} <= max_lr {self.max_lr}": self.init_lr <= self.max_lr,
            f"lr_warmup_steps {self.lr_warmup_steps} < lr_decay_steps {self.lr_decay_steps}": (
                self.lr_decay_steps > 0 and self.lr_warmup_steps < self.lr_decay_steps
            ),
            f"lr_decay_style {self.lr_decay_style!r} in {_DECAYS}": self.lr_decay_style in _DECAYS,
            f"WSD with wsd_decay_steps {self.wsd_decay_steps} > 0": not is_wsd or bool(self.wsd_decay_steps),
            f"lr_wsd_decay_style {self.lr_wsd_decay_style!r} in {[*_WSD_STYLES]}": (
                not is_wsd or self.lr_wsd_decay_style in _WSD_STYLES
            ),
            f"0 <= start_wd {self.start_wd} <= end_wd {self.end_wd}": 0 <= self.start_wd <= self.end_wd,
            f"constant weight decay, start_wd {self.start_wd} == end_wd {self.end_wd}": (
                self.wd_incr_style != "constant" or self.start_wd == self.end_wd
            ),
            f"wd_incr_style {self.wd_incr_style!r} in constant, linear, cosine": (
                self.wd_incr_style in ("constant", "linear", "cosine")
            ),
            "not both use_checkpoint_opt_param_scheduler and override_opt_param_scheduler": not (
                self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler
            ),
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        if broken:
            raise AssertedConfigError(f"OptimizerParamScheduler needs {broken[0]}; change one of the values")

    def get_wd(self, param_group: dict[str, Any] | None = None) -> float:
        """Weight decay at this step; a group's own bounds apply."""
        own = param_group or {}
        start, end = own.get("start_wd", self.start_wd), own.get("end_wd", self.end_wd)
        if self.num_steps > self.wd_incr_steps or self.wd_incr_style == "constant":
            return float(end)
        part = self.num_steps / self.wd_incr_steps
        share = part if self.wd_incr_style == "linear" else 0.5 * (math.cos(math.pi * (1 - part)) + 1)
        return float(start + share * (end - start))

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """Learning rate at this step; a group's own bounds apply."""
        high, low = param_group.get("max_lr", self.max_lr), param_group.get("min_lr", self.min_lr)
        step, warmup, decay = self.num_steps, self.lr_warmup_steps, self.lr_decay_steps
        if warmup > 0 and step <= warmup:
            return float(self.init_lr + (high - self.init_lr) * step / warmup)
        if self.lr_decay_style == "constant":
            return float(high)
        if step > decay:
            return float(low)
        if self.lr_decay_style == "inverse-square-root":
            return float(max(low, high * max(warmup, 1) ** 0.5 / max(step, 1) ** 0.5))
        part = (step - warmup) / (decay - warmup)
        if self.lr_decay_style == "linear":
            share = 1 - part
        elif self.lr_decay_style == "cosine":
            share = 0.5 * (math.cos(math.pi * part) + 1)
        else:
            assert self.wsd_decay_steps is not None
            decayed = step - (decay - self.wsd_decay_steps)
            share = 1.0 if decayed <= 0 else _WSD_STYLES[self.lr_wsd_decay_style](decayed / self.wsd_decay_steps)
        return float(low + share * (high - low))

    def step(self, increment: int) -> None:
        """Count ``increment`` more steps, and set the values of all groups."""
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr(group)
            group["weight_decay"] = self.get_wd(group) * group.get("wd_mult", 1.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule and the number of steps."""
        return {name: getattr(self, name) for name in (*_OF_DECAY, "num_steps", *_OF_WEIGHTS)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the stored step.

        Raises:
            AssertedConfigError: a stored value differs, and neither the stored nor the own ones have precedence.
        """
        for name in (*_OF_DECAY, *_OF_WEIGHTS):
            if name not in state_dict:
                continue
            own, stored = getattr(self, name), state_dict[name]
            if self.override_opt_param_scheduler or own == stored:
                continue
            if not self.use_checkpoint_opt_param_scheduler:
                raise AssertedConfigError(
                    f"{name} is {own}, and {stored} in the checkpoint; set use_checkpoint_opt_param_scheduler or "
                    "override_opt_param_scheduler"
                )
            _LOGGER.info("%s is %s, as in the checkpoint, not %s", name, stored, own)
            setattr(self, name, stored)
        self.num_steps = 0
        self.step(increment=state_dict["num_steps"])


offer(globals())
