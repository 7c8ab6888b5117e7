"""The definition of a move between two layouts, and a check that a function conforms to it.

The ranks of a group together hold one tensor: the sum of their partial values, the concatenation of their shards, or
the value that all of them hold. ``VALUES`` and ``GRADIENTS`` have the case for the values and gradients of each layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import hypothesis.strategies as st
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from harness.parity import assert_unmodified, gather_all
from shardwise.core.sharding import balanced_sizes


class Held(Enum):
    """How the ranks together hold one tensor."""

    SAME = "the same"
    PART = "a partial sum"
    SHARD = "each its shard"


VALUES = {"I": Held.SAME, "R": Held.SAME, "V": Held.SHARD, "P": Held.PART}
GRADIENTS = {"I": Held.SAME, "R": Held.PART, "V": Held.SHARD, "P": Held.SAME}


def drawn_by_all(held: Held, shape: Sequence[int], dim: int, sizes: list[int], t: int) -> tuple[list[Tensor], Tensor]:
    """Draw each rank's tensor; also return the tensor that they hold together. Integers, so that sums are exact."""
    if held is Held.SAME:
        whole = torch.randint(-9, 10, shape).double()
        return [whole] * t, whole
    if held is Held.PART:
        parts = [torch.randint(-9, 10, shape).double() for _ in range(t)]
        return parts, torch.stack(parts).sum(0)
    whole = torch.randint(-9, 10, shape).double()
    return list(whole.split(sizes, dim)), whole


def taken_by_rank(held: Held, whole: Tensor, dim: int, sizes: list[int], rank: int) -> Tensor:
    """Return the part of ``whole`` that a rank must hold, if it is determined."""
    return whole if held is Held.SAME else whole.split(sizes, dim)[rank]


def inner(values: Sequence[Tensor], gradients: Sequence[Tensor], held: Held) -> float:
    """Return the inner product over the group, counting values that all ranks share once."""
    products = [float((v * g).sum()) for v, g in zip(values, gradients, strict=True)]
    return products[0] if held is Held.SAME else sum(products)


@dataclass(frozen=True)
class Drawn:
    """Sizes of a tensor, cuts of the moved dimension (None: balanced sizes), and whether it is strided."""

    rows: int
    columns: int
    even: bool
    cuts: list[int] | None
    strided: bool


def drawn_moves() -> st.SearchStrategy[Drawn]:
    """Draw cases for ``assert_moves``."""
    counts = st.integers(0, 7)
    return st.builds(
        Drawn,
        rows=counts,
        columns=counts,
        even=st.booleans(),
        cuts=st.none() | st.lists(counts, min_size=3, max_size=3),
        strided=st.booleans(),
    )


def assert_moves(
    move: Callable[[Tensor, Sequence[int] | None], Tensor],
    source: str,
    target: str,
    drawn: Drawn,
    *,
    dim: int | None,
    group: ProcessGroup,
) -> None:
    """Check the forward and backward pass of a move between two layouts, and that it modifies nothing."""
    t, me = group.size(), group.rank()
    axis = 0 if dim is None else dim
    shape = [drawn.rows, 2, drawn.columns]
    if drawn.even:
        shape[axis] *= t
    n = shape[axis]
    sizes = list(balanced_sizes(n, t))
    given_sizes = None
    if dim is not None and drawn.cuts is not None:
        edges = [0, *sorted(min(cut, n) for cut in drawn.cuts[: t - 1]), n]
        given_sizes = sizes = [stop - start for start, stop in pairwise(edges)]
    elif source == "V" and len(set(sizes)) > 1:
        # A gather of uneven shards needs their sizes.
        given_sizes = sizes

    inputs, together = drawn_by_all(VALUES[source], shape, axis, sizes, t)
    gradients, _ = drawn_by_all(GRADIENTS[target], shape, axis, sizes, t)
    x, gradient = inputs[me].contiguous(), gradients[me].contiguous()
    if drawn.strided:
        x, gradient = (tensor.transpose(0, 2).contiguous().transpose(0, 2) for tensor in (x, gradient))
    x = x.clone().requires_grad_()
    with assert_unmodified(x=x, gradient=gradient):
        y = move(x, given_sizes)
        y.backward(gradient)

    # Forward: the tensor that the ranks together hold does not change.
    assert torch.equal(y, taken_by_rank(VALUES[target], together, axis, sizes, me))
    # Backward: the transposed linear map. Every rank computes all ranks' outputs by the formula checked above.
    outputs = [taken_by_rank(VALUES[target], together, axis, sizes, rank) for rank in range(t)]
    assert x.grad is not None
    grad_inputs = gather_all(x.grad, group)
    left = inner(outputs, gradients, Held.SAME if target == "I" else Held.SHARD)
    right = inner(inputs, grad_inputs, Held.SAME if source == "I" else Held.SHARD)
    assert left == right
    if GRADIENTS[source] is Held.SAME:
        assert all(torch.equal(grad_input, grad_inputs[0]) for grad_input in grad_inputs)
    assert x.grad.shape == x.shape
