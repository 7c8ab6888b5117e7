"""Collectives that arrive when a computation is done: whoever waits for them before it waits in vain.

Nothing here looks at a clock, so that it does not matter how busy the machine is.
"""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_")


class ProductsDone(TorchDispatchMode):
    """Counts down to the moment when the given number of matrix products has been computed."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.left -= func._schema.name in PRODUCTS
        return result


class ArrivesAfter:
    """A collective whose result arrives when the products have been computed.

    Attributes:
        arrived_early: it was there when it was waited for.
    """

    def __init__(self, pending: Any, products: ProductsDone) -> None:
        self.pending = pending
        self.products = products
        self.arrived_early = False

    def wait(self) -> Any:
        self.arrived_early = self.products.left <= 0
        return self.pending.wait()


class ProductTime(TorchDispatchMode):
    """A clock that matrix products alone move on, by their number of multiplications, and waits by what they take."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in PRODUCTS:
            left, right = args[-2:]
            self.now += left.size(0) * left.size(1) * right.size(1)
        return func(*args, **(kwargs or {}))


class ArrivesLater:
    """A collective whose result arrives a while after it was launched, by a clock of products.

    Args:
        pending: the collective.
        clock: which clock.
        delay: how much later, in its multiplications.
        waited: is given how long was waited for it.
    """

    def __init__(self, pending: Any, clock: ProductTime, delay: float, waited: list[float]) -> None:
        self.pending, self.clock, self.waited = pending, clock, waited
        self.arrival = clock.now + delay

    def wait(self) -> Any:
        left = max(0.0, self.arrival - self.clock.now)
        self.waited.append(left)
        self.clock.now += left
        return self.pending.wait()
