"""Collectives that arrive when a computation is done: whoever waits for them before it waits in vain."""

from __future__ import annotations

import threading
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class ProductsDone(TorchDispatchMode):
    """Tells when the given number of matrix products has been computed."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number
        self.done = threading.Event()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.left -= func._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_")
        if self.left == 0:
            self.done.set()
        return result


class ArrivesAfter:
    """A collective whose result arrives when an event has happened, or late."""

    def __init__(self, pending: Any, event: threading.Event) -> None:
        self.pending = pending
        self.arrived_early = False
        self.thread = threading.Thread(target=self.arrive, args=(event,))
        self.thread.start()

    def arrive(self, event: threading.Event) -> None:
        self.arrived_early = event.wait(timeout=2.0)

    def wait(self) -> Any:
        self.thread.join()
        return self.pending.wait()
