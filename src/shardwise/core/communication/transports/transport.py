"""The interface of a transport, the handle of a collective in flight, and the check of an all-to-all."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication.context import GlobalMemoryBuffer
from shardwise.core.errors import DesyncError


class Pending:
    """A collective in flight; ``wait()`` returns its result. The handle keeps the input tensors alive until then."""

    __slots__ = ("_finish", "_kept", "_work")

    def __init__(self, work: Any, finish: Callable[[], Tensor], *kept: Tensor) -> None:
        self._work = work
        self._finish = finish
        self._kept = kept

    def wait(self) -> Tensor:
        """Wait for the result and return it. Call this once."""
        if self._work is not None:
            self._work.wait()
        return self._finish()


class Transport(Protocol):
    """The interface that carries tensors between the ranks of a group; a module or an object implements it.

    ``collectives`` checks dimensions and sizes before each call, and handles groups of one rank itself. Each call
    starts a collective, overwrites an argument only if the caller allows it, records the collective in ``accounting``
    if PyTorch's dispatcher does not see it, and registers its waits (``Wait``). If ranks make different calls, they
    raise a DesyncError where the transport can detect it.
    """

    def all_reduce(self, tensor: Tensor, group: ProcessGroup, op: Any, may_overwrite: bool) -> Pending:
        """Start an all-reduce by a ``ReduceOp``, in place if ``may_overwrite``."""

    def all_gather(
        self,
        tensor: Tensor,
        group: ProcessGroup,
        dim: int,
        sizes: Sequence[int],
        buffer: GlobalMemoryBuffer | Tensor | None,
    ) -> Pending:
        """Start an all-gather of shards with ``sizes`` along ``dim``, into ``buffer`` if given."""

    def reduce_scatter(
        self, tensor: Tensor, group: ProcessGroup, dim: int, sizes: Sequence[int], may_overwrite: bool
    ) -> Pending:
        """Start a reduce-scatter into shards with ``sizes`` along ``dim``.

        With ``may_overwrite`` the tensor is contiguous, ``dim`` is 0, and the result is this rank's part of ``tensor``.
        """

    def all_to_all(
        self, tensor: Tensor, group: ProcessGroup, output_sizes: Sequence[int], input_sizes: Sequence[int]
    ) -> Pending:
        """Start an exchange of rows with every rank."""

    def shift(
        self, tensor: Tensor, group: ProcessGroup, step: int, counts: Sequence[int], out: Tensor | None
    ) -> Pending:
        """Start a ring shift: send rows to the rank ``step`` places ahead and receive from the rank ``step`` back.

        ``counts`` has the number of rows of every rank. ``tensor`` is contiguous. The received rows are written to
        ``out`` if it is given, which is contiguous as well.
        """


def check_exchange(sent: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> None:
    """Raise DesyncError unless the sent row counts match the expected row counts for every pair of ranks.

    Args:
        sent: for each rank, the number of rows that it sends to every rank.
        expected: for each rank, the number of rows that it expects from every rank.
    """
    for source, to in enumerate(sent):
        for target, rows in enumerate(to):
            if rows != expected[target][source]:
                raise DesyncError(
                    f"all_to_all: rank {source} sends {rows} rows to rank {target}, which expects "
                    f"{expected[target][source]}; input_sizes are {[list(sizes) for sizes in sent]}, output_sizes "
                    f"{[list(sizes) for sizes in expected]}"
                )
