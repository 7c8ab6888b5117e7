"""Options of every form of the loss: its terms, the reduction over tokens, and checks.

Checks of logits and targets read the statistics that the ranks exchange anyway, so all ranks raise the same error.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from shardwise.core.communication.agreement import check_ids_alike
from shardwise.core.communication.collectives import all_gather, all_reduce
from shardwise.core.errors import ConfigError, DesyncError, DivergenceError
from shardwise.core.sharding import Interval
from shardwise.core.validation import validation_applies


@dataclass(frozen=True)
class LossOptions:
    """Terms of the loss; a logit ``x`` enters as ``y = softcap · tanh(x / softcap) / temperature``.

    Attributes:
        label_smoothing: probability taken from the target and spread evenly over all other ids.
        z_loss: weight of ``logsumexp(y)²``, which keeps logits from drifting (Chowdhery et al. 2022).
        softcap: bound of the logits' magnitude (Gemma 2); no bound if None.
        temperature: divisor of the logits.

    Raises:
        ConfigError: an option is out of range.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        # Each condition is written so that NaN fails it.
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ConfigError(f"label_smoothing is {self.label_smoothing}; it must be at least 0 and under 1")
        if not 0.0 <= self.z_loss < math.inf:
            raise ConfigError(f"z_loss is {self.z_loss}; it must be at least 0 and finite")
        for name in ("softcap", "temperature"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < math.inf:
                raise ConfigError(f"{name} is {value}; it must be over 0 and finite")

    @property
    def of_kernels(self) -> dict[str, Any]:
        """Options that change the logits, as keyword arguments of the kernels."""
        return {"softcap": self.softcap, "temperature": self.temperature}

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ConfigError if there is label smoothing, but the vocabulary has no second id."""
        if self.label_smoothing > 0 and vocab_size < 2:
            raise ConfigError(
                f"label_smoothing is {self.label_smoothing} over {vocab_size} ids; it needs at least 2 ids"
            )


REDUCTIONS = ("none", "mean", "sum")


@dataclass(frozen=True)
class Reduction:
    """The tokens that count, and the reduction of their losses.

    Attributes:
        kind: ``"none"``, ``"sum"``, or ``"mean"`` over the tokens that are not ignored.
        ignore_index: target whose loss is 0 and whose token is not counted.
        data_parallel_group: group whose tokens a mean counts, with one all-reduce of 8 bytes. The results of its ranks
            add up to the mean over the whole batch, and so do their gradients.
        validate: whether to check that targets are in the vocabulary (``check_ids``) and, on a CPU, that they are the
            same on all ranks (``LossChecks``), and to warn if a mean has no tokens and is 0.

    Raises:
        ConfigError: ``kind`` is unknown.
    """

    kind: str
    ignore_index: int
    data_parallel_group: ProcessGroup | None
    validate: bool

    def __post_init__(self) -> None:
        if self.kind not in REDUCTIONS:
            raise ConfigError(f"reduction is {self.kind!r}; choose one of {', '.join(REDUCTIONS)}")

    def check_targets(self, target: Tensor, vocab_size: int, *, group: ProcessGroup) -> None:
        """With ``validate``, raise VocabularyError for a target outside the vocabulary that is not ignored."""
        if self.validate:
            check_ids_alike(target, vocab_size, what="target", group=group, ignore_index=self.ignore_index)

    def apply(self, loss: Tensor, target: Tensor, *, stacklevel: int) -> Tensor:
        """Reduce the loss of each token, which is 0 for ignored targets; ``stacklevel`` is for the warning."""
        if self.kind == "none":
            return loss
        if self.kind == "sum":
            return loss.sum()
        count = (target != self.ignore_index).sum().to(torch.float64)
        if self.data_parallel_group is not None:
            count = all_reduce(count, group=self.data_parallel_group)
        # On a GPU this would synchronize.
        if self.validate and count.is_cpu and validation_applies() and count.item() == 0:
            warnings.warn(
                f"all {target.numel()} targets are {self.ignore_index}, which is ignored: the mean loss is 0 and so is "
                "its gradient",
                stacklevel=stacklevel,
            )
        return loss.sum() / count.clamp(min=1.0).to(loss.dtype)


@dataclass(frozen=True)
class LossChecks:
    """Checks of logits and targets that read the ranks' gathered statistics, which are the same on every rank.

    Another collective runs only after an error.

    Attributes:
        logits: whether to look for NaN and inf in the logits and compare the targets. Synchronizes with a GPU.
        targets: whether to compare the targets on a CPU.
    """

    logits: bool
    targets: bool

    def mark_ignored_(self, own: Tensor, ignored: Tensor, group: ProcessGroup) -> None:
        """If targets are compared, mark the ignored tokens ``[n]`` in this rank's ``row_statistics`` ``[n, k]``.

        The mark is +inf instead of the target's logit. Loss and gradient of these tokens are 0 anyway.
        """
        if self._compares_targets(own, group):
            own[:, 2].masked_fill_(ignored, torch.inf)

    def run(
        self,
        every: Tensor,
        row_of: Callable[[int], Tensor],
        target: Tensor,
        ignored: Tensor,
        interval: Interval,
        group: ProcessGroup,
    ) -> None:
        """Raise the same error on every rank if a check fails. No-op if ``validation_applies`` is False.

        Args:
            every: ``[t, n, k]``, all ranks' ``row_statistics``, or ``[t p, n, k]`` of their parts; marked.
            row_of: function that returns this rank's logits ``[v]`` of a token; called only after an error.
            target, ignored: this rank's targets, and a mask ``[n]`` of the ignored ones.
            interval: this rank's ids.
            group: the ranks that split the vocabulary.

        Raises:
            DesyncError: the ranks have different targets.
            DivergenceError: with ``logits``, a token that is not ignored has a NaN or inf logit, or only -inf logits
                (a single -inf is a forbidden id).
        """
        compares = self._compares_targets(every, group)
        if not (self.logits or compares) or not validation_applies() or every.numel() == 0:
            return
        disputed = ignored.new_zeros(())
        if compares:
            disputed, ignored = _disputed(every[..., 2])
            disputed = disputed.any()
        if not self.logits:
            # A target's logit may also be -inf.
            if disputed:
                check_same_targets(target, group)
            return
        maximum, sum_exp = every[..., 0], every[..., 1]
        wrong = (maximum.isnan() | sum_exp.isnan() | (maximum == torch.inf)) & ~ignored
        forbidden = (maximum == -torch.inf).all(dim=0) & ~ignored
        not_finite = wrong.any() | forbidden.any()
        # The only synchronization with a GPU, unless there is an error.
        if not (disputed | not_finite):
            return
        if disputed:
            check_same_targets(target, group)
        if not_finite:
            _raise_not_finite(wrong, forbidden, row_of, target.shape, interval, group)

    def _compares_targets(self, statistics: Tensor, group: ProcessGroup) -> bool:
        if group.size() == 1 or not validation_applies() or type(statistics) is not Tensor:
            return False
        return self.logits or (self.targets and statistics.is_cpu)


def _disputed(at_target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens on which the ranks' marked statistics ``[t, n]`` disagree, and the tokens that all ignore.

    The ranks agree on a token if all ignore it, or if one rank has its target and none ignores it.
    """
    ignores = at_target == torch.inf
    ignored = ignores.all(dim=0)
    holders = (at_target != -torch.inf).sum(dim=0)
    return ~ignored & ((holders != 1) | ignores.any(dim=0)), ignored


def check_same_targets(target: Tensor, group: ProcessGroup) -> None:
    """Raise DesyncError on every rank unless all have the same targets. Collective, and synchronizes with a GPU."""
    every = all_gather(target.reshape(1, -1).long(), group=group, dim=0)
    differs = every != every[0]
    if not differs.any():
        return
    token = int(differs.any(dim=0).nonzero()[0])
    rank = int(differs[:, token].nonzero()[0])
    first, other = every[[0, rank], token].tolist()
    raise DesyncError(
        f"the ranks have different targets: at token {_position(token, target.shape)} rank 0 has {first}, rank {rank} "
        f"has {other}; ranks that split the vocabulary must have the same batch: seed what shuffles it alike on all of "
        "them, or let one of them send it to the others (tensor_parallel.broadcast_data)"
    )


def _raise_not_finite(
    wrong: Tensor,
    forbidden: Tensor,
    row_of: Callable[[int], Tensor],
    shape: torch.Size,
    interval: Interval,
    group: ProcessGroup,
) -> None:
    """Raise for the first token that is ``wrong``, ``[t p, n]``, or ``forbidden``, ``[n]``; one collective if wrong."""
    if wrong.any():
        token = int(wrong.any(dim=0).nonzero()[0])
        rank = int(wrong[:, token].nonzero()[0]) * group.size() // wrong.size(0)
        row = row_of(token)
        columns = (row.isnan() | (row == torch.inf)).nonzero().flatten()
        id_, is_nan = -1, 0
        if group.rank() == rank and columns.numel():
            id_, is_nan = interval[0] + int(columns[0]), int(row[columns[0]].isnan())
        told = torch.tensor([id_, is_nan], dtype=torch.float64, device=wrong.device)
        id_, is_nan = (int(x) for x in all_reduce(told, group=group, op=ReduceOp.MAX).tolist())
        what = f"the logit of id {id_} on rank {rank} is {'nan' if is_nan else 'inf'}"
    else:
        token = int(forbidden.nonzero()[0])
        what = "every logit is -inf"
    raise DivergenceError(f"at token {_position(token, shape)} {what}; the loss is NaN, the model has diverged")


def _position(token: int, shape: torch.Size) -> list[int]:
    return [int(index) for index in torch.unravel_index(torch.tensor(token), shape)]
