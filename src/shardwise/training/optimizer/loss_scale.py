"""The factor by which the loss is multiplied, so that small gradients do not vanish in fp16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwise.core.errors import ConfigError, DivergenceError


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
