"""The progress of a run: step, loss, bits per byte, tokens per second, time left; a bar, or lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from tqdm import tqdm

from shardwise.run.plan.report import shown_bytes

_SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """On standard error: a bar if it is a terminal, else a line every few seconds. Nothing on ranks that are not first.

    Args:
        total: steps of the whole run.
        done: steps that are done already.
        visible: whether this rank shows it.
    """

    def __init__(self, total: int, done: int, *, visible: bool) -> None:
        self._total, self._first, self._done = total, done, done
        self._visible = visible
        self._start = time.monotonic()
        self._next_line = self._start
        self._bar = None
        if visible and sys.stderr.isatty():
            form = "{desc}{percentage:3.0f}%|{bar:20}| step {n_fmt}/{total_fmt}{postfix} [{elapsed}<{remaining}]"
            self._bar = tqdm(total=total, initial=done, bar_format=form, dynamic_ncols=True)

    def update(self, reported: Mapping[str, float], others: Mapping[str, float]) -> None:
        """One more step is done.

        Args:
            reported: what its objective reports, all of which is shown.
            others: the other metrics; tokens per second are shown, and utilisation and memory if they are there.
        """
        self._done += 1
        shown = f"{_shown(reported)}, {others['tokens_per_second']:,.0f} tokens/s"
        if "mfu" in others:
            shown += f", MFU {others['mfu']:.1%}"
        shown += "".join(f", {shown_bytes(int(value))}" for name, value in others.items() if name.startswith("peak_"))
        if self._bar is not None:
            self._bar.set_postfix_str(shown, refresh=False)
            self._bar.update()
        elif self._visible and (self._done == self._total or time.monotonic() >= self._next_line):
            now = time.monotonic()
            self._next_line = now + _SECONDS_BETWEEN_LINES
            left = (now - self._start) / (self._done - self._first) * (self._total - self._done)
            line = f"step {self._done}/{self._total}: {shown}, {tqdm.format_interval(left)} left"
            print(line, file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def _shown(reported: Mapping[str, float]) -> str:
    """Each number with its name, or its unit where that says enough."""
    units = {"bits_per_byte": "bits/byte"}
    return ", ".join(
        f"{value:.3f} {units[name]}" if name in units else f"{name.replace('_', ' ')} {value:.3f}"
        for name, value in reported.items()
    )
