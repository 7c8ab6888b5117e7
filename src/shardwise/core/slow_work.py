"""Lines about work that takes long, in the log of the package, which the commands print."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LOGGER = logging.getLogger("shardwise")
_FIRST_SECONDS = 5.0


@contextmanager
def told_if_slow(work: str, done: Callable[[], str] = str) -> Iterator[None]:
    """Log a line once the block has taken five seconds, and again whenever that time has doubled.

    Args:
        work: what the block does, such as "reading data.jsonl".
        done: returns what is done so far, such as "3 of 10 MB"; called on another thread.
    """
    over = threading.Event()

    def tell() -> None:
        begun, seconds, number = time.monotonic(), _FIRST_SECONDS, 0
        while not over.wait(seconds):
            so_far, number = done(), number + 1
            seconds = max(_FIRST_SECONDS, time.monotonic() - begun)
            line = f"{work}: {so_far and f'{so_far}, '}{seconds:.0f} s so far"
            # Ranks of a host do the same work.
            _LOGGER.warning("%s", line, extra={"once": f"{work}, {number}"})

    thread = threading.Thread(target=tell, name="shardwise-slow-work", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
