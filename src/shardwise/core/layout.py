"""Layouts: what the values and the gradient of a tensor are on the ranks of a group.

========= ===================== ======================
layout    values on the ranks   gradient on the ranks
========= ===================== ======================
``I``     the same              the same
``R``     the same              a partial sum
``V``     each its shard        each its shard
``P``     a partial sum         the same
========= ===================== ======================

Tensors carry no layout. A move states the two layouts that it goes between (``moves.reduce.source`` and
``moves.reduce.target``), a parallel module those of its input and output (``input_layout``, ``output_layout``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal


@dataclass(frozen=True)
class Layout:
    """The layout of a tensor over one group; ``I``, ``R``, ``P`` and ``V(dim, sizes)`` make them.

    A layout names no group: a module's layouts are over the module's group, a move's over the group that it is given.

    Attributes:
        kind: the layout's letter.
        dim: for V the dimension that is split, counted from the end if negative; None where a move's caller chooses it.
        sizes: for V every rank's size along ``dim``; None for the balanced rule, or where a move's caller chooses.
    """

    kind: Literal["I", "R", "V", "P"]
    dim: int | None = None
    sizes: tuple[int, ...] | None = None

    @property
    def gradient(self) -> Layout:
        """The layout of the gradient's values: P for R, I for P, and the layout itself for I and V."""
        return {"R": P, "P": I}.get(self.kind, self)

    def __repr__(self) -> str:
        if self.dim is None:
            return self.kind
        sizes = "" if self.sizes is None else f", sizes={list(self.sizes)}"
        return f"{self.kind}(dim={self.dim}{sizes})"


I, R, P = Layout("I"), Layout("R"), Layout("P")  # noqa: E741  # The names of the table above.
V = partial(Layout, "V")


def hidden_layout(*, sequence_parallel: bool) -> Layout:
    """Layout of hidden states ``[s, b, h]`` between tensor-parallel regions: I, V(dim=0) with sequence parallelism."""
    return V(dim=0) if sequence_parallel else I
