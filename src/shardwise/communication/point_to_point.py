"""Messages between two ranks of a group: several at once, in flight while their ranks compute.

On gloo a message finds its receiver by its tag, in any order. NCCL knows no tags: there two ranks must exchange their
messages in the same order, and messages that are sent and received at one time belong in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.communication.backend import sends_by_tag
from shardwise.communication.context import context_of
from shardwise.communication.pending import Pending
from shardwise.communication.transports.torch_distributed import _Work


class Letter(NamedTuple):
    """A tensor on its way: what is sent, or where what is received goes (which is overwritten).

    Attributes:
        tensor: contiguous; of the same shape and dtype on both sides. The sender must not change it until it arrived.
        rank: the other side, counted within the group.
        tag: tells messages between the same two ranks apart; the same on both sides.
    """

    tensor: Tensor
    rank: int
    tag: int = 0


def exchange(
    sends: Sequence[Letter], receives: Sequence[Letter], *, group: ProcessGroup
) -> tuple[list[Pending], list[Pending]]:
    """Start sending and receiving.

    Args:
        sends: what this rank sends.
        receives: what it receives.
        group: of this rank and the other sides.

    Returns:
        One for each of ``sends``, whose ``wait()`` returns once the tensor may be changed, and one for each of
        ``receives``, whose ``wait()`` returns the received tensor.

    Raises:
        DesyncError: from ``wait()``: the other side is gone, or does not come within the group's time limit.
    """
    if not all(sends_by_tag(group, letter.tensor.device) for letter in (*sends, *receives)):
        return _exchange_in_one(sends, receives, group)
    context_of(group).num_messages += len(sends) + len(receives)
    return (
        [
            _pending(dist.isend(tensor, group=group, group_dst=rank, tag=tag), "send", tensor, group, rank)
            for tensor, rank, tag in sends
        ],
        [
            _pending(dist.irecv(tensor, group=group, group_src=rank, tag=tag), "receive", tensor, group, rank)
            for tensor, rank, tag in receives
        ],
    )


def _exchange_in_one(
    sends: Sequence[Letter], receives: Sequence[Letter], group: ProcessGroup
) -> tuple[list[Pending], list[Pending]]:
    operations = [
        dist.P2POp(operation, letter.tensor, group=group, group_peer=letter.rank, tag=letter.tag)
        for operation, letters in ((dist.isend, sends), (dist.irecv, receives))
        for letter in letters
    ]
    works = dist.batch_isend_irecv(operations)
    # The messages of one call may share one work.
    works = works if len(works) == len(operations) else works[:1] * len(operations)
    pending = [
        _pending(work, "exchange", letter.tensor, group, letter.rank)
        for work, letter in zip(works, [*sends, *receives], strict=True)
    ]
    return pending[: len(sends)], pending[len(sends) :]


def _pending(work: Any, name: str, tensor: Tensor, group: ProcessGroup, peer: int) -> Pending:
    return Pending(_Work(work, name, tensor, group, peer), lambda: tensor, tensor)
