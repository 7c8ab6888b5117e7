"""Logits that are NaN: found from what the ranks exchange anyway, told alike on every rank."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from shardwise.communication.collectives import all_reduce
from shardwise.errors import DivergenceError
from shardwise.sharding import Interval
from shardwise.validation import validation_applies


def check_finite_logits(
    every: Tensor,
    row_of: Callable[[int], Tensor],
    ignored: Tensor,
    shape: torch.Size,
    interval: Interval,
    group: ProcessGroup,
) -> None:
    """Raise DivergenceError, the same on every rank, if a logit of a token that counts is NaN or infinite.

    -inf is a forbidden id and allowed, unless all ids are forbidden. Only where something is wrong is there a
    collective, to tell all ranks the id. Does nothing where ``validation_applies`` is False.

    Args:
        every: ``[t, n, k]``, all ranks' ``row_statistics``.
        row_of: this rank's logits ``[v]`` of a token, asked for only where something is wrong.
        ignored: ``[n]``, the tokens that do not count.
        shape: of the targets, in which positions are told.
        interval: this rank's ids.
        group: the ranks that split the vocabulary.
    """
    if every.numel() == 0 or not validation_applies():
        return
    maximum, sum_exp = every[..., 0], every[..., 1]
    wrong = (maximum.isnan() | sum_exp.isnan() | (maximum == torch.inf)) & ~ignored
    forbidden = (maximum == -torch.inf).all(dim=0) & ~ignored
    if not (wrong.any() | forbidden.any()):
        return
    if wrong.any():
        token = int(wrong.any(dim=0).nonzero()[0])
        rank = int(wrong[:, token].nonzero()[0])
        row = row_of(token)
        columns = (row.isnan() | (row == torch.inf)).nonzero().flatten()
        id_, is_nan = -1, 0
        if group.rank() == rank and columns.numel():
            id_, is_nan = interval[0] + int(columns[0]), int(row[columns[0]].isnan())
        told = torch.tensor([id_, is_nan], dtype=torch.float64, device=every.device)
        id_, is_nan = (int(x) for x in all_reduce(told, group=group, op=ReduceOp.MAX).tolist())
        what = f"the logit of id {id_} on rank {rank} is {'nan' if is_nan else 'inf'}"
    else:
        token = int(forbidden.nonzero()[0])
        what = "every logit is -inf"
    position = [int(index) for index in torch.unravel_index(torch.tensor(token), shape)]
    raise DivergenceError(f"at token {position} {what}; the loss is NaN, the model has diverged")
