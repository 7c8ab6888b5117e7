"""Time and memory of a data-parallel training step: one model under four wrappers, in alternating rounds of one run.

    python benchmarks/data_parallel.py --json data_parallel.json

Two gloo ranks of one thread each hold Shardwise's whole model and see different samples: under PyTorch's
DistributedDataParallel and fully_shard, under Shardwise's gradient buffers, and with split optimizer state (zero 1).
All variants use the same kernels. Losses and gradient norms must agree before anything is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import (
    Spread,
    add_common_flags,
    add_sizes,
    format_table,
    given_sizes,
    measure_in_rounds,
    parse_arguments,
    positive_int,
    ratios_of,
    run_benchmark,
)
from ranks import NUM_RANKS
from steps.problem import LlamaSizes
from steps.replicas import REPLICA_VARIANTS, SILENT, ReplicaRunner
from train_step import check_parity
from workers import Workers, WorkerSpec

from shardwise.core.errors import ConfigError

NUM_PARITY_STEPS = 3
SIZES = LlamaSizes(
    hidden_size=512,
    num_layers=4,
    num_heads=8,
    ffn_hidden_size=1376,
    vocab_size=8192,
    sequence_length=256,
    batch_size=4,
)
SAMPLES = (4, 1)
DEFAULT_STEPS = 3
DEFAULT_VARIANTS = ("ddp", "fsdp2", "fsdp2_zero2", "buffers", "zero")
RATIOS = (
    ("zero", "ddp"),
    ("zero", "fsdp2"),
    ("zero", "fsdp2_zero2"),
    ("zero", "buffers"),
    ("zero", "silent"),
    ("silent", "ddp"),
    ("silent", "fsdp2"),
    ("fsdp2", "ddp"),
    ("buffers", "ddp"),
    ("zero_gloo", "ddp"),
    ("buffers_gloo", "ddp"),
    ("zero_gloo", "zero"),
)

_RANKS = [f"rank {rank}" for rank in range(NUM_RANKS)]


def benchmark(
    sizes: LlamaSizes, variants: Sequence[str], workers: Workers, *, num_rounds: int, num_steps: int
) -> dict[str, Any]:
    """Check all variants, and measure their memory and time.

    Args:
        sizes: sizes of the model and of a rank's batch.
        variants: names from ``REPLICA_VARIANTS``.
        workers: workers from ``start_workers``.
        num_rounds: number of rounds that count.
        num_steps: number of steps to time per variant and round.

    Returns:
        The results of these sizes for ``--json``.

    Raises:
        ParityError: the results of the variants differ.
        LaunchError: a process failed or died.
    """
    num_parameters = workers.call(_RANKS, "prepare", sizes, variants)[0]
    same = [variant for variant in variants if variant != SILENT]
    first_steps = {variant: workers.call(_RANKS, "run_steps", variant, NUM_PARITY_STEPS)[0] for variant in same}
    difference = check_parity(first_steps)

    def seconds_per_step(variant: str) -> float:
        # A step ends when the last rank ends it.
        slowest: float = max(workers.call(_RANKS, "time_steps", variant, num_steps))
        return slowest / num_steps

    seconds = measure_in_rounds(variants, seconds_per_step, num_rounds=num_rounds)
    return {
        "sizes": dataclasses.asdict(sizes),
        "num_parameters": num_parameters,
        "num_steps": num_steps,
        "first_loss_relative_difference": difference,
        "bytes_per_rank": {variant: max(workers.call(_RANKS, "num_bytes", variant)) for variant in variants},
        "seconds_per_step": seconds,
        "ratios": [ratio.to_json() for ratio in ratios_of(seconds, RATIOS)],
    }


def start_workers(folder: Path) -> Workers:
    """Start the ranks, which connect through a file in ``folder``."""
    return Workers([WorkerSpec(name, 1, ReplicaRunner, (str(folder / "store"), k)) for k, name in enumerate(_RANKS)])


def describe(result: dict[str, Any]) -> str:
    """Format the result of one size."""
    sizes = LlamaSizes(**result["sizes"])
    held = result["bytes_per_rank"]
    times = {name: Spread.of([1e3 * s for s in values]) for name, values in result["seconds_per_step"].items()}
    ratios = [(f"{r['numerator']} / {r['denominator']}", r["min"], r["median"], r["max"]) for r in result["ratios"]]
    lines = [
        f"{result['num_parameters'] / 1e6:.1f} M parameters, hidden {sizes.hidden_size}, {sizes.num_layers} layers, "
        f"vocabulary {sizes.vocab_size}, sequence {sizes.sequence_length}, {sizes.batch_size} samples a rank",
        "",
    ]
    if ratios:
        rows = [(name, *(f"{value:.3f}" for value in values)) for name, *values in ratios]
        lines += [format_table(("ratio of times", "min", "median", "max"), rows), ""]
    rows = [
        (
            name,
            *(f"{value:.1f}" for value in (t.min, t.median, t.max)),
            f"{held[name] / 2**20:.1f}",
            f"{held[name] / result['num_parameters']:.2f}",
        )
        for name, t in times.items()
    ]
    lines.append(format_table(("ms per step", "min", "median", "max", "MiB per rank", "bytes per parameter"), rows))
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_common_flags(parser, default_rounds=9)
    parser.add_argument(
        "--steps",
        type=positive_int,
        default=DEFAULT_STEPS,
        help=f"timed steps of each variant in a round; default: {DEFAULT_STEPS}",
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=REPLICA_VARIANTS,
        default=DEFAULT_VARIANTS,
        metavar="VARIANT",
        help=f"of {', '.join(REPLICA_VARIANTS)}; default: {' '.join(DEFAULT_VARIANTS)}",
    )
    add_sizes(parser, LlamaSizes, f"in place of the usual ones; both {SAMPLES} samples a rank without --batch-size")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line and return the exit code."""
    parser = _parser()
    arguments = parse_arguments(parser, argv)
    given = given_sizes(arguments, LlamaSizes)
    try:
        sizes = dataclasses.replace(SIZES, **given)
    except ConfigError as error:
        parser.error(str(error))
    several = [sizes] if "batch_size" in given else [dataclasses.replace(sizes, batch_size=b) for b in SAMPLES]
    variants = list(dict.fromkeys(arguments.variants))

    def measure() -> dict[str, Any]:
        results = []
        with tempfile.TemporaryDirectory() as folder, start_workers(Path(folder)) as workers:
            for each in several:
                result = benchmark(each, variants, workers, num_rounds=arguments.rounds, num_steps=arguments.steps)
                print(describe(result), end="\n\n", flush=True)
                results.append(result)
        return {"sizes": results}

    return run_benchmark("data_parallel", arguments, measure)


if __name__ == "__main__":
    sys.exit(main())
