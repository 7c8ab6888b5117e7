"""The interface of a transport, the handle of a collective in flight, and the check of an all-to-all."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication.context import GlobalMemoryBuffer
from shardwise.core.errors import DesyncError


class Pending:
    """A collective in flight; ``wait()`` returns its result. The tensors that it reads are kept alive until then."""

    __slots__ = ("_finish", "_kept", "_work")

    def __init__(self, work: Any, finish: Callable[[], Tensor], *kept: Tensor) -> None:
        self._work = work
        self._finish = finish
        self._kept = kept

    def wait(self) -> Tensor:
        """Wait for the result and return it; call once."""
        if self._work is not None:
            self._work.wait()
        return self._finish()


class Transport(Protocol):
    """A way for tensors to travel between the ranks of a group; a module or an object.

    ``collectives`` has checked dimensions and sizes before, and there is more than one rank. Each call starts a
    collective, modifies no argument but those that it may, records it in ``accounting`` if PyTorch's dispatcher does
    not see it, and announces its waits (``Wait``). Ranks that make different calls get a DesyncError where possible.
    """

    def all_reduce(self, tensor: Tensor, group: ProcessGroup, op: Any, may_overwrite: bool) -> Pending:
        """Start an all-reduce by a ``ReduceOp``, into ``tensor``'s own memory if it may be overwritten."""

    def all_gather(
        self,
        tensor: Tensor,
        group: ProcessGroup,
        dim: int,
        sizes: Sequence[int],
        buffer: GlobalMemoryBuffer | Tensor | None,
    ) -> Pending:
        """Start an all-gather of shards with ``sizes`` along ``dim``, into ``buffer`` if there is one."""

    def reduce_scatter(
        self, tensor: Tensor, group: ProcessGroup, dim: int, sizes: Sequence[int], may_overwrite: bool
    ) -> Pending:
        """Start a reduce-scatter into shards with ``sizes`` along ``dim``.

        If ``tensor`` may be overwritten, it is contiguous, ``dim`` is 0, and the result is this rank's part of it.
        """

    def all_to_all(
        self, tensor: Tensor, group: ProcessGroup, output_sizes: Sequence[int], input_sizes: Sequence[int]
    ) -> Pending:
        """Start an exchange of rows with every rank."""

    def shift(
        self, tensor: Tensor, group: ProcessGroup, step: int, counts: Sequence[int], out: Tensor | None
    ) -> Pending:
        """Start sending rows to the rank ``step`` places on in the ring, and receiving from the one as far back.

        ``counts`` has the number of rows of every rank. ``tensor`` is contiguous; received rows go into ``out``, if
        there is one, which is contiguous too.
        """


def check_exchange(sent: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> None:
    """Raise DesyncError unless every rank sends what every other expects.

    Args:
        sent: for each rank, the rows that it sends to each.
        expected: for each rank, the rows that it expects from each.
    """
    for source, to in enumerate(sent):
        for target, rows in enumerate(to):
            if rows != expected[target][source]:
                raise DesyncError(
                    f"all_to_all: rank {source} sends {rows} rows to rank {target}, which expects "
                    f"{expected[target][source]}; input_sizes are {[list(sizes) for sizes in sent]}, output_sizes "
                    f"{[list(sizes) for sizes in expected]}"
                )
