"""Which rows of a tensor this rank holds, where PyTorch's ``fully_shard`` shares them out.

Such a tensor is a ``DTensor``, of the shape of what tensor parallelism has left of a parameter. Of its ``n`` rows each
of ``d`` data-parallel ranks holds ``ceil(n / d)``, in order; the last may hold fewer, or none. All functions take any
other tensor too, of which this rank holds all rows.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.sharding.balanced import Interval

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether ranks share out the rows."""
    # Slow to import, and before somebody has done it there is no such tensor.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_rows(tensor: Tensor) -> Tensor:
    """The rows that this rank holds, in their own memory; no gradient flows through."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def group_of_rows(param: Tensor) -> ProcessGroup | None:
    """The ranks that share out the rows of a parameter; None where none do."""
    return getattr(param, "row_group", None)


def set_group_of_rows_(param: Tensor, group: ProcessGroup) -> None:
    """Say who shares out the rows of a parameter that is a ``DTensor``.

    Its own mesh may be another's of the same ranks, whose groups are gone: PyTorch keeps what it once found out for one
    mesh, and takes an equal one for the same.
    """
    param.row_group = group  # type: ignore[attr-defined]


def rows_of_ranks(param: Tensor) -> list[Interval]:
    """The rows of a parameter that each rank holds: the first, and the one after the last."""
    group = group_of_rows(param)
    num_ranks = 1 if group is None else group.size()
    total, each = param.size(0), -(-param.size(0) // num_ranks)
    return [(min(total, rank * each), min(total, (rank + 1) * each)) for rank in range(num_ranks)]


def first_row(param: Tensor) -> int:
    """Which row of a parameter is the first of those that this rank holds."""
    group = group_of_rows(param)
    return 0 if group is None else rows_of_ranks(param)[group.rank()][0]


def intervals_of_rows(param: Tensor) -> tuple[Interval, ...]:
    """The elements of a parameter that each rank holds, in row-major order: the first, and the one after the last."""
    elements = math.prod(param.shape[1:])
    return tuple((start * elements, stop * elements) for start, stop in rows_of_ranks(param))


def interval_of_rows(param: Tensor) -> Interval | None:
    """The elements of a parameter that this rank holds, in row-major order; None where rows are not shared out."""
    group = group_of_rows(param)
    return None if group is None else intervals_of_rows(param)[group.rank()]
