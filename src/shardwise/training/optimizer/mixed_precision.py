"""Precisions of a run: dtypes, and the dynamic scale of the loss in fp16."""

from dataclasses import dataclass
from typing import Any

import torch

from shardwise.core.errors import ConfigError, DivergenceError


@dataclass
class DynamicLossScale:
    """A power of two that is halved when a gradient overflows, and doubled after many steps without an overflow.

    Gradients are often below 6e-8, the smallest positive fp16 number. The loss, and so the gradients, are multiplied by
    ``scale``; the gradients are divided by it in fp32. If a gradient overflows, the step is skipped.

    Attributes:
        scale: factor of the loss.
        growth_interval: number of steps without an overflow after which the scale is doubled.
        most_skipped: number of consecutive overflows at which training ends.
        num_good: number of steps since the scale last changed.
        num_skipped_in_a_row: number of consecutive overflows until now.

    Source: Micikevicius et al. 2018 (arXiv:1710.03740), section 3.2.
    """

    scale: float = 65536.0
    growth_interval: int = 1000
    most_skipped: int = 30
    num_good: int = 0
    num_skipped_in_a_row: int = 0

    def skip_(self, step: int) -> None:
        """Count an overflow in ``step``; raise DivergenceError after ``most_skipped`` overflows in a row."""
        self.num_skipped_in_a_row += 1
        if self.num_skipped_in_a_row >= self.most_skipped:
            raise DivergenceError(
                f"gradients overflow in each of the last {self.num_skipped_in_a_row} steps, now at loss scale "
                f"{self.scale:g}, at step {step}"
            )
        self.num_good = 0
        self.scale /= 2

    def keep_(self) -> None:
        """Count a step without an overflow."""
        self.num_skipped_in_a_row = 0
        self.num_good += 1
        # In fp32, 2^32 times the loss leaves room for gradients of any sane size.
        if self.num_good >= self.growth_interval and self.scale < 2.0**32:
            self.num_good = 0
            self.scale *= 2

    def to_json(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {name: getattr(self, name) for name in ("scale", "num_good", "num_skipped_in_a_row")}

    def restore_(self, value: object) -> None:
        """Restore a state of ``to_json``, or raise ConfigError; early versions lack ``num_skipped_in_a_row``."""
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
    """Dtypes of a run's computation and of its weights.

    Attributes:
        params_dtype: dtype of parameters, of forward and backward, and of messages between ranks.
        has_masters: whether gradients are summed in fp32, and the optimizer updates fp32 copies of the parameters.
        scales_loss: whether the loss is multiplied by a factor, so that small gradients do not vanish.
        uses_tf32: whether CUDA's tensor cores multiply fp32 matrices, reading 11 of the 24 significant bits of an
            element.
    """

    params_dtype: torch.dtype
    has_masters: bool = False
    scales_loss: bool = False
    uses_tf32: bool = False


PRECISIONS = {
    # Until the run chooses by its device.
    "auto": Precision(torch.float32),
    "float32": Precision(torch.float32),
    "tf32": Precision(torch.float32, uses_tf32=True),
    "float64": Precision(torch.float64),
    "bfloat16": Precision(torch.bfloat16, has_masters=True),
    "float16": Precision(torch.float16, has_masters=True, scales_loss=True),
    "pure-bfloat16": Precision(torch.bfloat16),
}
