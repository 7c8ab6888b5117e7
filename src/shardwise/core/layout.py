"""Layouts, which describe a tensor's values and gradient on the ranks of a group.

========= ===================== ======================
layout    values on the ranks   gradient on the ranks
========= ===================== ======================
``I``     the same              the same
``R``     the same              a partial sum
``V``     each its shard        each its shard
``P``     a partial sum         the same
========= ===================== ======================

Tensors do not store a layout. A move declares its source and target layouts (``moves.reduce.source`` and
``moves.reduce.target``). A parallel module declares the layouts of its input and output (``input_layout`` and
``output_layout``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal


@dataclass(frozen=True)
class Layout:
    """The layout of a tensor over one group; ``I``, ``R``, ``P`` and ``V(dim, sizes)`` make them.

    A layout does not store its group. A module's layouts refer to the module's group, and a move's layouts refer to the
    group passed to the move.

    Attributes:
        kind: the layout's letter.
        dim: split dimension of a V layout, counted from the end if negative; None if the move's caller chooses it.
        sizes: every rank's size along ``dim`` in a V layout; None for the balanced rule, or if the move's caller
            chooses the sizes.
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
