"""Write a run's metrics to ``metrics.jsonl``.

The progress display shows step, loss, bits per byte, tokens per second and remaining time, as a bar on a terminal and
as lines in a log.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from tqdm import tqdm

from shardwise.core.atomic_files import read_regular, write_atomically
from shardwise.core.errors import ConfigError, UnwritableError
from shardwise.core.json_text import parse_json
from shardwise.run.quantities import shown_bytes

Metrics = dict[str, float]

SAMPLES = "evaluated_samples"
"""Field with the number of held-out samples that were measured after a step."""

# Maximum size of a metrics file; a line has about 200 bytes.
_MAX_BYTES = 2_000_000_000


class MetricsFile(NamedTuple):
    """The content of a metrics file.

    Attributes:
        rows: values of the readable lines.
        unreadable: line numbers, from 1, of the unreadable lines.
        is_cut: True if the last line is truncated, as after a kill; ``unreadable`` does not include it.
    """

    rows: list[dict[str, Any]]
    unreadable: list[int]
    is_cut: bool


def scan_metrics(path: Path) -> MetricsFile:
    """Read a metrics file and find its unreadable lines. A file that does not exist counts as empty."""
    rows, unreadable = [], []
    content = read_regular(path, limit=_MAX_BYTES) if path.exists() else b""
    lines = content.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line)
        except ValueError:
            row = {}
        if type(row.get("step")) is int:
            rows.append(row)
        else:
            unreadable.append(number)
    is_cut = not content.endswith(b"\n") and unreadable[-1:] == [len(lines)]
    return MetricsFile(rows, unreadable[:-1] if is_cut else unreadable, is_cut)


def read_metrics(path: Path, *, below_step: int | None = None) -> list[dict[str, Any]]:
    """Read the lines of a metrics file for steps before ``below_step``, skipping unreadable lines."""
    return [row for row in scan_metrics(path).rows if below_step is None or row["step"] < below_step]


class MetricsWriter:
    """Appends one JSON object per measurement.

    Lines of steps that a resumed run repeats are removed.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        path = folder / "metrics.jsonl"
        try:
            before = scan_metrics(path)
        except OSError as error:
            raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}; move it away") from error
        if before.unreadable:
            lines = ", ".join(map(str, before.unreadable[:5])) + (", ..." if len(before.unreadable) > 5 else "")
            print(f"note   {path} has lines that cannot be read, which are dropped: {lines}", flush=True)
        kept = "".join(json.dumps(row) + "\n" for row in before.rows if row["step"] < first_step)
        # The rename is atomic: readers see a complete file at any time, even if this process is killed.
        write_atomically(path, lambda file: file.write(kept.encode()))
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Metrics) -> None:
        """Record ``values`` of ``step``; raise UnwritableError if the file cannot be written."""
        try:
            self._file.write(json.dumps({"step": step, **values}) + "\n")
            self._file.flush()
        except OSError as error:
            raise UnwritableError(
                f"cannot write {self._file.name!r}: {error.strerror or error}; free the disk, and go on with "
                "--resume auto"
            ) from error

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        # Lines that cannot be written raised an error in ``write``.
        with suppress(OSError):
            self._file.close()


_SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Progress display on standard error: a bar on a terminal, else a line now and then; on the first rank."""

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
        """Advance the display by one step.

        Args:
            reported: metrics of the objective, which are all shown.
            others: other metrics; tokens per second are shown (also those computed and learned, if they are other
                numbers), and utilisation and memory if present.
        """
        self._done += 1
        shown = f"{_shown(reported)}, {_speed(others)}"
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


def _speed(others: Mapping[str, float]) -> str:
    speed = others["tokens_per_second"]
    parts = [
        f"{others[key]:,.0f} {part}"
        for part in ("computed", "learned")
        if others.get(key := f"{part}_tokens_per_second", speed) != speed
    ]
    return f"{speed:,.0f} tokens/s" + (f" ({', '.join(parts)})" if parts else "")


def _shown(reported: Mapping[str, float]) -> str:
    """Format each metric with its name, or only with its unit if that is clear enough."""
    units = {"bits_per_byte": "bits/byte"}
    return ", ".join(
        f"{value:.3f} {units[name]}" if name in units else f"{name.replace('_', ' ')} {value:.3f}"
        for name, value in reported.items()
    )
