"""Common code of benchmarks: command line, alternating rounds, ratios and their spread, machine, and JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from shardwise.core.errors import LaunchError, ParityError


@dataclass(frozen=True)
class Spread:
    """Minimum, median and maximum of some values."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of one or more values."""
        return cls(min(values), statistics.median(values), max(values))


@dataclass(frozen=True)
class Ratio:
    """Ratio of the times of two variants, round by round.

    Attributes:
        numerator, denominator: names of the variants; below 1 the first is faster.
        per_round: one ratio per round. Both times come from the same round, so a temporary slowdown of the machine
            cancels.
    """

    numerator: str
    denominator: str
    per_round: list[float]

    @property
    def spread(self) -> Spread:
        """Spread of the ratio over the rounds."""
        return Spread.of(self.per_round)

    def to_json(self) -> dict[str, Any]:
        """Convert to plain JSON values."""
        return asdict(self) | asdict(self.spread)


def alternating_orders(names: Sequence[str], num_rounds: int) -> Iterator[tuple[str, ...]]:
    """Yield the order of each round: forwards, backwards, forwards, ..., so that drift favours no variant.

    >>> list(alternating_orders(["a", "b"], 2))
    [('a', 'b'), ('b', 'a')]
    """
    for number in range(num_rounds):
        yield tuple(names if number % 2 == 0 else reversed(names))


def measure_in_rounds(
    names: Sequence[str], measure: Callable[[str], float], *, num_rounds: int, num_warmup_rounds: int = 1
) -> dict[str, list[float]]:
    """Measure every variant once per round, in alternating order.

    Args:
        names: names of the variants.
        measure: measures the variant with a given name and returns the value.
        num_rounds: number of rounds that count.
        num_warmup_rounds: number of earlier rounds that do not count.

    Returns:
        The values of each variant in the rounds that count.
    """
    values: dict[str, list[float]] = {name: [] for name in names}
    orders = alternating_orders(names, num_warmup_rounds + num_rounds)
    bar = tqdm(orders, total=num_warmup_rounds + num_rounds, unit="round", leave=False, disable=None)
    for number, order in enumerate(bar):
        for name in order:
            bar.set_postfix_str(name)
            value = measure(name)
            if number >= num_warmup_rounds:
                values[name].append(value)
    return values


def ratios_of(values: Mapping[str, Sequence[float]], pairs: Sequence[tuple[str, str]]) -> list[Ratio]:
    """Return the ratio of each pair if both of its variants were measured."""
    return [
        Ratio(first, second, [a / b for a, b in zip(values[first], values[second], strict=True)])
        for first, second in pairs
        if first in values and second in values
    ]


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table with the first column aligned to the left and the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in (header, *rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def print_result(result: Mapping[str, Any]) -> None:
    """Print the spread of ``ratios``, in the form of ``Ratio.to_json``, and of the times ``seconds_per_step``."""
    header = ("min", "median", "max")
    rows = [
        (f"{each['numerator']} / {each['denominator']}", *(f"{each[key]:.3f}" for key in header))
        for each in result["ratios"]
    ]
    print(format_table(("ratio of times", *header), rows))
    times = {key: Spread.of([1e3 * each for each in own]) for key, own in result["seconds_per_step"].items()}
    rows = [(key, *(f"{getattr(each, name):.1f}" for name in header)) for key, each in times.items()]
    print(format_table(("ms per step", *header), rows))


def machine_facts() -> dict[str, Any]:
    """Return the facts needed to judge a measurement: processor, memory, load, versions; but no name of the machine."""
    return {
        "processor": _processor(),
        "logical_cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "load_average_at_start": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write ``value`` to ``path`` as indented JSON with a final newline; NaN and infinity raise an error."""
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n")


def positive_int(text: str) -> int:
    """Parse a number of the command line, at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def add_common_flags(parser: argparse.ArgumentParser, *, default_rounds: int) -> None:
    """Add ``--rounds`` and ``--json``."""
    parser.add_argument(
        "--rounds", type=positive_int, default=default_rounds, help=f"rounds that count; default: {default_rounds}"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")


def add_sizes(parser: argparse.ArgumentParser, sizes: type[Any], title: str) -> None:
    """Add a flag for each field of the dataclass ``sizes``; the value is None if the flag is not given."""
    group = parser.add_argument_group("sizes", title)
    for field in dataclasses.fields(sizes):
        flag = "--" + field.name.replace("_", "-")
        if field.type in (bool, "bool"):
            group.add_argument(flag, action=argparse.BooleanOptionalAction)
        else:
            group.add_argument(flag, type=positive_int, metavar="N")


def given_sizes(arguments: argparse.Namespace, sizes: type[Any]) -> dict[str, Any]:
    """Return the fields of ``sizes`` whose flags were given."""
    given = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(sizes)}
    return {name: value for name, value in given.items() if value is not None}


def parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments, and exit with a message if the folder of the JSON file does not exist."""
    arguments = parser.parse_args(argv)
    if arguments.json is not None and not arguments.json.parent.is_dir():
        parser.error(f"--json {arguments.json}: there is no folder {arguments.json.parent}")
    return arguments


def run_benchmark(name: str, arguments: argparse.Namespace, measure: Callable[[], Mapping[str, Any]]) -> int:
    """Measure, print the machine, and write the JSON file if one was asked for.

    Args:
        name: name of the benchmark.
        arguments: parsed arguments, with the flags of ``add_common_flags``.
        measure: prints the results, and returns those for the JSON file.

    Returns:
        The exit code.
    """
    machine = machine_facts()
    try:
        results = measure()
    except (LaunchError, ParityError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted; all processes were ended", file=sys.stderr)
        return 130
    cores, version = machine["usable_cores"], machine["torch"]
    print(f"{arguments.rounds} rounds on {machine['processor']}, {cores} cores, torch {version}")
    if arguments.json is not None:
        write_json(arguments.json, {"benchmark": name, "machine": machine, "num_rounds": arguments.rounds, **results})
    return 0
