"""The factor by which the loss is multiplied, so that small gradients do not vanish in fp16.

In which dtypes a run computes, and in which it keeps its weights.

fp32 copies of parameters in 16 bits, which an optimizer updates in their place.

A step of AdamW changes a weight by about the learning rate, and bf16 has 8 bits: most steps are less than half the
distance to the next number, and are lost. Here the optimizer updates fp32 copies from fp32 gradients, and parameters
are the copies rounded.

Source: Micikevicius et al. 2018 (arXiv:1710.03740), section 3.1.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from shardwise.core.errors import ConfigError, DivergenceError
from shardwise.core.sharding import ParamLayout
from shardwise.training.gradients import Division
from shardwise.training.optimizer.gradients import gradient_of
from shardwise.training.optimizer.optimizer import ShardedOptimizer


@dataclass
class DynamicLossScale:
    """A power of two that falls when a gradient overflows, and rises after many steps without.

    fp16 holds nothing under 6e-8, and gradients are often smaller: the loss is multiplied by ``scale``, and the
    gradients, which are then all multiplied by it, are divided again in fp32. Where a gradient overflows, the step is
    skipped and the scale halved.

    Attributes:
        scale: the factor.
        growth_interval: steps without an overflow after which the scale is doubled.
        most_skipped: overflows in a row that are put up with.
        num_good: steps since the last overflow or growth.
        num_skipped_in_a_row: the latest of them, one after the other.

    Source: Micikevicius et al. 2018 (arXiv:1710.03740), section 3.2.
    """

    scale: float = 65536.0
    growth_interval: int = 1000
    most_skipped: int = 30
    num_good: int = 0
    num_skipped_in_a_row: int = 0

    def skip_(self, step: int) -> None:
        """Take note of an overflow in ``step``.

        Raises:
            DivergenceError: it is one too many in a row.
        """
        self.num_skipped_in_a_row += 1
        if self.num_skipped_in_a_row >= self.most_skipped:
            raise DivergenceError(
                f"gradients overflow in each of the last {self.num_skipped_in_a_row} steps, now at loss scale "
                f"{self.scale:g}, at step {step}"
            )
        self.num_good = 0
        self.scale /= 2

    def keep_(self) -> None:
        """Take note of a step without an overflow."""
        self.num_skipped_in_a_row = 0
        self.num_good += 1
        # 2^32 times the loss, in fp32, leaves room for gradients of any sane size.
        if self.num_good >= self.growth_interval and self.scale < 2.0**32:
            self.num_good = 0
            self.scale *= 2

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint records."""
        return {
            "scale": self.scale,
            "num_good": self.num_good,
            "num_skipped_in_a_row": self.num_skipped_in_a_row,
        }

    def restore_(self, value: object) -> None:
        """Go on from what ``to_json`` gave; earlier versions did not record ``num_skipped_in_a_row``.

        Raises:
            ConfigError: it is something else.
        """
        if (
            not isinstance(value, dict)
            or {"num_skipped_in_a_row", *value} != self.to_json().keys()
            or not all(type(number) in (int, float) and 0 <= number <= 2.0**64 for number in value.values())
        ):
            raise ConfigError(f"the loss scale of the checkpoint is {value!r}; it must be an object of numbers")
        self.scale = max(float(value["scale"]), 2.0**-64)
        self.num_good = int(value["num_good"])
        self.num_skipped_in_a_row = int(value.get("num_skipped_in_a_row", 0))


@dataclass(frozen=True)
class Precision:
    """In which dtypes a run computes, and in which it keeps its weights.

    Attributes:
        params_dtype: of parameters, of what the forward and the backward compute, and of what ranks send each other.
        has_masters: gradients are summed in fp32, and the optimizer updates fp32 copies of the parameters.
        scales_loss: the loss is multiplied by a factor, so that small gradients do not vanish.
        uses_tf32: CUDA's tensor cores multiply fp32 matrices, of whose elements they read 11 bits of 24.
    """

    params_dtype: torch.dtype
    has_masters: bool = False
    scales_loss: bool = False
    uses_tf32: bool = False


PRECISIONS = {
    # Where no run has asked what its device is best at.
    "auto": Precision(torch.float32),
    "float32": Precision(torch.float32),
    "tf32": Precision(torch.float32, uses_tf32=True),
    "float64": Precision(torch.float64),
    "bfloat16": Precision(torch.bfloat16, has_masters=True),
    "float16": Precision(torch.float16, has_masters=True, scales_loss=True),
    "pure-bfloat16": Precision(torch.bfloat16),
}


class MasterWeights:
    """An optimizer of a model in 16 bits, by another that updates fp32 copies of its parameters.

    Gradients are read where they are: from ``param.main_grad`` if there is one, else from ``param.grad``.

    Args:
        optimizer: of the model's parameters, before its first step; from here on it updates the copies.
        model: the model, or the parameters that ``optimizer`` updates.

    Attributes:
        optimizer: as given.
        param_groups, why_not_fused: the optimizer's.
    """

    def __init__(self, optimizer: ShardedOptimizer, model: nn.Module | Iterable[Parameter]) -> None:
        self.optimizer = optimizer
        params = model.parameters() if isinstance(model, nn.Module) else model
        self._masters = {
            param: Parameter(param.detach().float())
            for param in params
            if param.requires_grad and param.dtype in (torch.float16, torch.bfloat16)
        }
        optimizer.train_instead_(self._masters)
        self.param_groups: list[dict[str, Any]] = optimizer.param_groups
        self.why_not_fused: str | None = optimizer.why_not_fused

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, those of the model's parameters too."""
        self.optimizer.zero_grad(set_to_none)
        for param in self._masters:
            param.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update the copies, and round the parameters to them."""
        for param, master in self._masters.items():
            gradient = gradient_of(param)
            master.grad = None if gradient is None else gradient.to(master.dtype)
        self.optimizer.step()
        self.round_()
        for master in self._masters.values():
            master.grad = None

    def state_of(self, param: Parameter, layout: ParamLayout) -> Mapping[str, tuple[Tensor, ParamLayout]]:
        """What the other optimizer keeps of the parameter's copy; the copy itself is ``weight_of``."""
        return self.optimizer.state_of(self._masters.get(param, param), layout)

    def set_step_(self, step: int) -> None:
        """Take ``step`` steps for done, and the copies for loaded."""
        self.optimizer.set_step_(step)
        self.round_()

    def train_instead_(
        self, copies: Mapping[Parameter, Parameter], shares: Mapping[Parameter, Division] | None = None
    ) -> None:
        """Not of an optimizer that has copies already."""
        raise NotImplementedError("the parameters have fp32 copies already")

    def weight_of(self, param: Tensor) -> Tensor:
        """The fp32 copy of a parameter, of its shape; the parameter itself if it has none."""
        return (self._masters.get(param, param) if isinstance(param, Parameter) else param).detach()

    @torch.no_grad()
    def round_(self) -> None:
        """Make the model's parameters the copies, rounded."""
        if self._masters:
            torch._foreach_copy_(list(self._masters), list(self._masters.values()))
