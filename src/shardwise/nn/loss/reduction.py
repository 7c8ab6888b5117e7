"""From the loss of each token to what is returned."""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication.agreement import check_ids_alike
from shardwise.core.communication.collectives import all_reduce
from shardwise.core.errors import ConfigError
from shardwise.core.validation import validation_applies

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
