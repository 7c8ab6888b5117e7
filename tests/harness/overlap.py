"""Collectives that complete only when a computation is done, to detect a wait that comes too early.

Nothing here reads a clock, so that the load of the machine does not matter.
"""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_")


class ProductsDone(TorchDispatchMode):
    """Counts down the given number of matrix products as they are computed."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.left -= func._schema.name in PRODUCTS
        return result


class ArrivesAfter:
    """A collective whose result arrives when the products have been computed."""

    def __init__(self, pending: Any, products: ProductsDone) -> None:
        self.pending = pending
        self.products = products
        self.arrived_early = False

    def wait(self) -> Any:
        self.arrived_early = self.products.left <= 0
        return self.pending.wait()


class ProductTime(TorchDispatchMode):
    """A clock that only matrix products and waits advance: products by their number of multiplications."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in PRODUCTS:
            left, right = args[-2:]
            self.now += left.size(0) * left.size(1) * right.size(1)
        return func(*args, **(kwargs or {}))


class ArrivesLater:
    """A collective whose result arrives a fixed time after its launch, by a clock of products."""

    def __init__(self, pending: Any, clock: ProductTime, delay: float, waited: list[float]) -> None:
        self.pending, self.clock, self.waited = pending, clock, waited
        self.arrival = clock.now + delay

    def wait(self) -> Any:
        left = max(0.0, self.arrival - self.clock.now)
        self.waited.append(left)
        self.clock.now += left
        return self.pending.wait()
