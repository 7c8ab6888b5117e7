"""Options of every form of the loss: how logits enter it, which tokens count, how losses are reduced, what is checked.

Checks of logits and targets read the statistics that the ranks exchange anyway, so that all ranks raise alike.
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
            raise ConfigError(f"label_smoothing is {self.label_smoothing}; it must be at least 0 and under 1")
        if not 0.0 <= self.z_loss < math.inf:
            raise ConfigError(f"z_loss is {self.z_loss}; it must be at least 0 and finite")
        for name in ("softcap", "temperature"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < math.inf:
                raise ConfigError(f"{name} is {value}; it must be over 0 and finite")

    @property
    def of_kernels(self) -> dict[str, Any]:
        """Options that change the logits, as the kernels take them."""
        return {"softcap": self.softcap, "temperature": self.temperature}

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ConfigError if label smoothing has no second id."""
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
        """Reduce the loss of each token, which is 0 where its target is ignored; ``stacklevel`` is of the warning."""
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


@dataclass(frozen=True)
class LossChecks:
    """Checks of logits and targets, decided from the ranks' gathered statistics, which are the same on every rank.

    Another collective is made only if they show an error.

    Attributes:
        logits: look for NaN and inf in the logits, and compare the targets. The host waits for a GPU.
        targets: on a CPU, compare the targets.
    """

    logits: bool
    targets: bool

    def mark_ignored_(self, own: Tensor, ignored: Tensor, group: ProcessGroup) -> None:
        """Mark the tokens ``[n]`` that this rank ignores in its ``row_statistics`` ``[n, k]``, if targets are compared.

        +inf replaces the target's logit there; loss and gradient are 0 anyway.
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
        """Raise the same error on every rank if there is one. Does nothing where ``validation_applies`` is False.

        Args:
            every: ``[t, n, k]``, all ranks' ``row_statistics``, or ``[t p, n, k]`` of their parts; marked.
            row_of: this rank's logits ``[v]`` of a token; called only after an error.
            target, ignored: this rank's targets, whose shape is that of positions in messages; those that do not count.
            interval: this rank's ids.
            group: the ranks that split the vocabulary.

        Raises:
            DesyncError: the ranks have different targets.
            DivergenceError: with ``logits``, a logit of a token that counts is NaN or inf, or all of its are -inf (one
                -inf is a forbidden id).
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
        # The one look at a GPU, unless something is wrong.
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
    """Tokens whose marked statistics ``[t, n]`` of the target contradict each other, and tokens that all ranks ignore.

    A token fits if all ranks ignore it, or if one rank has its target and none ignores it.
    """
    ignores = at_target == torch.inf
    ignored = ignores.all(dim=0)
    holders = (at_target != -torch.inf).sum(dim=0)
    return ~ignored & ((holders != 1) | ignores.any(dim=0)), ignored


def check_same_targets(target: Tensor, group: ProcessGroup) -> None:
    """Raise DesyncError on every rank unless all have the same targets. Collective, and the host waits for a GPU."""
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
    """Name the first token that is ``wrong``, ``[t p, n]``, or ``forbidden``, ``[n]``; one collective for the id."""
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
