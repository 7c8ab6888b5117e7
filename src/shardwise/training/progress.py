"""The progress bar of a run: step, loss, bits per byte, tokens per second, time left."""

from __future__ import annotations

import sys
from types import TracebackType

from tqdm import tqdm

# Where nobody watches (a log file), a line now and then is enough.
_LOG_SECONDS = 15.0


class Progress:
    """A bar on standard error; shows nothing on ranks that are not the first.

    Args:
        total: steps of the whole run.
        done: steps that are done already.
        visible: whether this rank shows it.
    """

    def __init__(self, total: int, done: int, *, visible: bool) -> None:
        on_screen = sys.stderr.isatty()
        self._bar = tqdm(
            total=total,
            initial=done,
            disable=not visible,
            mininterval=0.1 if on_screen else _LOG_SECONDS,
            maxinterval=10.0 if on_screen else _LOG_SECONDS,
            bar_format="{desc}{percentage:3.0f}%|{bar:20}| step {n_fmt}/{total_fmt}{postfix} [{elapsed}<{remaining}]",
            dynamic_ncols=True,
            leave=True,
        )

    def update(self, *, loss: float, bits_per_byte: float, tokens_per_second: float) -> None:
        """One more step is done."""
        self._bar.set_postfix_str(
            f"loss {loss:.3f}, {bits_per_byte:.3f} bits/byte, {tokens_per_second:,.0f} tokens/s", refresh=False
        )
        self._bar.update()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
