"""The options that every form of the loss has."""

import math
from dataclasses import dataclass
from typing import Any

from shardwise.core.errors import AssertedConfigError, ConfigError


@dataclass(frozen=True)
class LossOptions:
    """What is computed from the logits; a logit ``x`` enters as ``y = softcap · tanh(x / softcap) / temperature``.

    Attributes:
        label_smoothing: probability taken from the target and spread evenly over all other ids.
        z_loss: weight of ``logsumexp(y)²``, which keeps logits from drifting (Chowdhery et al. 2022).
        softcap: bound of the logits' magnitude (Gemma 2); no bound if None.
        temperature: divides the logits.

    Raises:
        ConfigError: an option out of range.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        # Each written so that NaN fails.
        if not 0.0 <= self.label_smoothing < 1.0:
            raise AssertedConfigError(f"label_smoothing is {self.label_smoothing}; it must be at least 0 and under 1")
        if not 0.0 <= self.z_loss < math.inf:
            raise ConfigError(f"z_loss is {self.z_loss}; it must be at least 0 and finite")
        for name in ("softcap", "temperature"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < math.inf:
                raise ConfigError(f"{name} is {value}; it must be over 0 and finite")

    @property
    def of_kernels(self) -> dict[str, Any]:
        """Those that change the logits themselves, as the kernels take them."""
        return {"softcap": self.softcap, "temperature": self.temperature}

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ConfigError if the probability taken from a target has no other id to go to."""
        if self.label_smoothing > 0 and vocab_size < 2:
            raise ConfigError(
                f"label_smoothing is {self.label_smoothing} over {vocab_size} ids; it needs at least 2 ids"
            )
