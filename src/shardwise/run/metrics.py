"""What a run writes down about itself: ``metrics.jsonl``, and TensorBoard's files when asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from shardwise.core.errors import ConfigError
from shardwise.core.files import read_regular, write_atomically
from shardwise.core.json_files import parse_json

Metrics = dict[str, float]

# Of metrics.jsonl, a line of which has some 200 bytes.
_MAX_BYTES = 2_000_000_000


class MetricsFile(NamedTuple):
    """What a metrics file holds.

    Attributes:
        rows: the lines that can be read.
        unreadable: numbers, from 1, of the lines that cannot.
        is_cut: the last line has no end, as a kill leaves it, and cannot be read; it is not among ``unreadable``.
    """

    rows: list[dict[str, Any]]
    unreadable: list[int]
    is_cut: bool


def scan_metrics(path: Path) -> MetricsFile:
    """A metrics file, and what in it is no line of metrics; one that does not exist is empty."""
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
    """The lines of a metrics file, those of steps before ``below_step``; one that cannot be read is left out."""
    return [row for row in scan_metrics(path).rows if below_step is None or row["step"] < below_step]


class MetricsWriter:
    """Appends one JSON object per measurement.

    What an interrupted run wrote about steps that are trained again is dropped.

    Args:
        folder: of the run; gets ``metrics.jsonl``.
        first_step: the step that the run starts or resumes at.
        tensorboard: also write ``folder/tensorboard``.

    Raises:
        ConfigError: TensorBoard is asked for and not installed.
    """

    def __init__(self, folder: Path, first_step: int, *, tensorboard: bool = False) -> None:
        path = folder / "metrics.jsonl"
        before = scan_metrics(path)
        if before.unreadable:
            lines = ", ".join(map(str, before.unreadable[:5])) + (", ..." if len(before.unreadable) > 5 else "")
            print(f"note   {path} has lines that cannot be read, which are dropped: {lines}", flush=True)
        kept = "".join(json.dumps(row) + "\n" for row in before.rows if row["step"] < first_step)
        # Whoever reads the file meanwhile, or finds it after this process was killed, has what was kept.
        write_atomically(path, lambda file: file.write(kept.encode()))
        self._file: TextIO = path.open("a", encoding="utf-8")
        self._board = _open_tensorboard(folder / "tensorboard") if tensorboard else None

    def write(self, step: int, values: Metrics) -> None:
        """Record ``values`` of ``step``."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def _open_tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except Exception as error:  # an optional package can fail in any way
        raise ConfigError(
            f"training.tensorboard needs TensorBoard ({error}); install it with: pip install 'shardwise[tensorboard]'"
        ) from error
    return SummaryWriter(str(folder))
