"""A collective in flight."""

from collections.abc import Callable
from typing import Any

from torch import Tensor


class Pending:
    """A collective in flight; ``wait()`` returns its result.

    Whatever the collective reads is kept alive until then.
    """

    __slots__ = ("_finish", "_kept", "_work")

    def __init__(self, work: Any, finish: Callable[[], Tensor], *kept: Tensor) -> None:
        self._work = work
        self._finish = finish
        self._kept = kept

    def wait(self) -> Tensor:
        """Wait until the result is there and return it; call once."""
        if self._work is not None:
            self._work.wait()
        return self._finish()
