"""Messages between two ranks of a group: several at once, in flight while their ranks compute.

On gloo a message finds its receiver by its tag, in any order. NCCL knows no tags: there two ranks must exchange their
messages in the same order, and messages that are sent and received at one time belong in one call.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication.backend import sends_by_tag
from shardwise.core.communication.context import context_of
from shardwise.core.communication.transports.torch_distributed import Work
from shardwise.core.communication.transports.transport import Pending


class Transfer(NamedTuple):
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
    sends: Sequence[Transfer], receives: Sequence[Transfer], *, group: ProcessGroup
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
    by_tag = all(sends_by_tag(group, transfer.tensor.device) for transfer in (*sends, *receives))
    if by_tag:
        context_of(group).num_messages += len(sends) + len(receives)
    calls = [(dist.isend, "send", each) for each in sends] + [(dist.irecv, "receive", each) for each in receives]
    operations = [
        dist.P2POp(call, each.tensor, group=group, group_peer=each.rank, tag=each.tag) for call, _, each in calls
    ]
    # Where a message is found by its tag, each travels by itself, in this order.
    works = dist.batch_isend_irecv(operations) if operations else []
    # The messages of one call may share one work.
    works = works if len(works) == len(calls) else works[:1] * len(calls)
    pending = [
        _pending(work, name if by_tag else "exchange", each, group)
        for work, (_, name, each) in zip(works, calls, strict=True)
    ]
    return pending[: len(sends)], pending[len(sends) :]


def _pending(work: Any, name: str, transfer: Transfer, group: ProcessGroup) -> Pending:
    return Pending(Work(work, name, transfer.tensor, group, transfer.rank), lambda: transfer.tensor)
