"""Tensors of which each rank has a piece, dealt out so that each is whole on one rank, and handed back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication.collectives import all_to_all


def dealt_out(shapes: Sequence[tuple[int, ...]], num_ranks: int) -> list[list[int]]:
    """Which matrices each rank computes: the most work first, always to the rank with the least."""
    work = [math.prod(shape) * min(shape) for shape in shapes]
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    for index in sorted(range(len(work)), key=lambda index: -work[index]):
        min(dealt, key=lambda indices: sum(work[k] for k in indices)).append(index)
    return dealt


class Dealing:
    """An exchange of the pieces of several tensors: two all-to-alls, one to collect them and one to hand them back.

    Args:
        sizes: of each tensor the elements of each rank's piece.
        dealt: for each rank the tensors that it is given, by index; the same on every rank.
        group: the ranks; None if there is one.
    """

    def __init__(
        self, sizes: Sequence[Sequence[int]], dealt: Sequence[Sequence[int]], group: ProcessGroup | None
    ) -> None:
        self._sizes, self._dealt = sizes, dealt
        self._group = None if group is None or group.size() == 1 else group
        rank = 0 if group is None else group.rank()
        self._own = dealt[rank]
        self._order = [index for indices in dealt for index in indices]
        # To each rank what it is given, and from each what it has of what this one is given.
        self._sent = [sum(sizes[index][rank] for index in indices) for indices in dealt]
        self._received = [sum(sizes[index][other] for index in self._own) for other in range(len(dealt))]
        self._pieces = [sizes[index][rank] for index in self._order]

    def collect(self, pieces: Sequence[Tensor]) -> dict[int, list[Tensor]]:
        """All ranks' pieces of what this rank was given.

        Args:
            pieces: this rank's piece of every tensor, in one dimension.

        Returns:
            By the tensor's index, a piece of each rank, in rank order.
        """
        if self._group is None:
            return {index: [pieces[index]] for index in self._own}
        flat = _joined([pieces[index] for index in self._order], like=pieces[0])
        flat = all_to_all(flat, group=self._group, input_sizes=self._sent, output_sizes=self._received)
        runs = [
            run.split([self._sizes[index][other] for index in self._own])
            for other, run in enumerate(flat.split(self._received))
        ]
        return {index: [run[place] for run in runs] for place, index in enumerate(self._own)}

    def hand_back(self, wholes: Mapping[int, Sequence[Tensor]], like: Tensor) -> list[Tensor]:
        """This rank's piece of every tensor, in one dimension.

        Args:
            wholes: by index, a piece for each rank of the tensors that this rank was given.
            like: has the pieces' dtype and device.
        """
        if self._group is None:
            return [wholes[index][0] for index in range(len(self._sizes))]
        flat = _joined([wholes[index][other] for other in range(len(self._dealt)) for index in self._own], like=like)
        flat = all_to_all(flat, group=self._group, input_sizes=self._received, output_sizes=self._sent)
        by_index = dict(zip(self._order, flat.split(self._pieces), strict=True))
        return [by_index[index] for index in range(len(self._sizes))]


def _joined(pieces: Sequence[Tensor], like: Tensor) -> Tensor:
    # A rank may have nothing to send.
    return torch.cat([like.new_empty(0), *(piece.reshape(-1) for piece in pieces)])
