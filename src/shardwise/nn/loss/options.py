"""The options of every form of the loss: how logits enter it, which tokens count, how their losses are reduced."""

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication.agreement import check_ids_alike
from shardwise.core.communication.collectives import all_reduce
from shardwise.core.errors import AssertedConfigError, ConfigError
from shardwise.core.validation import validation_applies


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


REDUCTIONS = ("none", "mean", "sum")


@dataclass(frozen=True)
class Reduction:
    """Which tokens count, and what becomes of their losses.

    Attributes:
        kind: ``"none"``, ``"sum"``, or ``"mean"`` over the tokens that are not ignored.
        ignore_index: a target that costs nothing and is not counted.
        data_parallel_group: count the tokens of all its ranks, which costs one all-reduce of 8 bytes for a mean. The
            results of its ranks then add up to the mean over the whole batch, and so do their gradients.
        validate: check that targets are in the vocabulary (as ``check_ids`` does) and, on a CPU, that they are the same
            on all ranks (``LossChecks``), and warn where there is no token to average over; the mean is 0 then.

    Raises:
        ConfigError: ``kind`` is none of these.
    """

    kind: str
    ignore_index: int
    data_parallel_group: ProcessGroup | None
    validate: bool

    def __post_init__(self) -> None:
        if self.kind not in REDUCTIONS:
            raise ConfigError(f"reduction is {self.kind!r}; choose one of {', '.join(REDUCTIONS)}")

    def check_targets(self, target: Tensor, vocab_size: int, *, group: ProcessGroup) -> None:
        """Raise VocabularyError for a target outside the vocabulary that is not ignored, if ``validate``."""
        if self.validate:
            check_ids_alike(target, vocab_size, what="target", group=group, ignore_index=self.ignore_index)

    def apply(self, loss: Tensor, target: Tensor, *, stacklevel: int) -> Tensor:
        """The loss of each token, 0 where it is ignored, reduced.

        Args:
            loss: of each token.
            target: of each token.
            stacklevel: of the warning, as in ``warnings.warn``.
        """
        if self.kind == "none":
            return loss
        if self.kind == "sum":
            return loss.sum()
        count = (target != self.ignore_index).sum().to(torch.float64)
        if self.data_parallel_group is not None:
            count = all_reduce(count, group=self.data_parallel_group)
        # On a GPU the host would wait for the answer.
        if self.validate and count.is_cpu and validation_applies() and count.item() == 0:
            warnings.warn(
                f"all {target.numel()} targets are {self.ignore_index}, which is ignored: the mean loss is 0 and so is "
                "its gradient",
                stacklevel=stacklevel,
            )
        return loss.sum() / count.clamp(min=1.0).to(loss.dtype)
