"""Time of a tensor-parallel block: Shardwise against DTensor and against handwritten collectives.

    python benchmarks/tp_block.py --json tp_block.json
    python benchmarks/tp_block.py --sequence-parallel --json tp_block_sp.json

Two gloo ranks of one thread each run forward and backward passes of column -> GELU -> row and of column -> attention ->
row, in alternating rounds. Outputs, input gradients and weight-gradient shards of all three must agree before anything
is timed. Then one rank measures the overhead of a linear layer over ``F.linear``.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blocks.problem import BLOCKS, BlockSizes
from blocks.runner import CANDIDATES, LINEARS, Runner
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
from workers import Workers, WorkerSpec

from shardwise.core.errors import ConfigError, ParityError

# A few fp32 roundings, because sums of up to 8192 terms are computed in another order.
RTOL_OF_NORM = 1e-5

# Shapes of GPT. The small size is what a user runs on a CPU for a test or a lesson: two samples of 128 tokens, heads of
# 64; a step takes milliseconds, and each operator's overhead counts. The large size is a micro-batch of a model with
# about a billion parameters: two samples of 256 tokens, heads of 128; matrix products dominate the step.
SIZES = {
    "small": BlockSizes(hidden_size=256, ffn_hidden_size=1024, num_heads=4, sequence_length=128, batch_size=2),
    "large": BlockSizes(hidden_size=2048, ffn_hidden_size=8192, num_heads=16, sequence_length=256, batch_size=2),
}
DEFAULT_STEPS = {"small": 100, "large": 2}
RATIOS = (("ours", "dtensor"), ("ours", "bare"), ("bare", "dtensor"))
# Maximum ratio of times that meets the goal.
GOALS = {("small", "dtensor"): 0.45, ("large", "dtensor"): 0.95, ("small", "bare"): 1.02, ("large", "bare"): 1.02}

# Small sizes, so that the product itself is a small part of a call.
LINEAR_TOKENS, LINEAR_WIDTH = 8, 64
GOAL_MICROSECONDS_PER_LINEAR = 10.0


def benchmark_block(
    workers: Workers,
    size: str,
    sizes: BlockSizes,
    block: str,
    *,
    sequence_parallel: bool,
    num_rounds: int,
    num_steps: int,
) -> dict[str, Any]:
    """Check and time all candidates on one block.

    Args:
        workers: the ranks, each with a ``Runner``.
        size: name of ``sizes``, which selects the goals.
        sizes: sizes of the block and its input.
        block: one of ``BLOCKS``.
        sequence_parallel: split input and output along the sequence.
        num_rounds: number of rounds that count.
        num_steps: number of steps to time per candidate and round.

    Returns:
        The results of this block for ``--json``.

    Raises:
        ParityError: the results of the candidates differ.
        LaunchError: a process failed or died.
    """
    ranks = [f"rank {rank}" for rank in range(NUM_RANKS)]
    of_ranks = workers.call(ranks, "compare", block, sizes, sequence_parallel)
    largest = max(check_agreement(differences, rank) for rank, differences in enumerate(of_ranks))

    def seconds_per_step(name: str) -> float:
        # A step ends when the last rank ends it.
        slowest: float = max(workers.call(ranks, "time_steps", name, num_steps))
        return slowest / num_steps

    seconds = measure_in_rounds(CANDIDATES, seconds_per_step, num_rounds=num_rounds)
    return {
        "block": block,
        "size": size,
        "sizes": dataclasses.asdict(sizes),
        "sequence_parallel": sequence_parallel,
        "num_steps": num_steps,
        "largest_relative_difference": largest,
        "seconds_per_step": seconds,
        "ratios": [
            ratio.to_json() | {"goal": GOALS.get((size, ratio.denominator)) if ratio.numerator == "ours" else None}
            for ratio in ratios_of(seconds, RATIOS)
        ],
    }


def check_agreement(differences: Mapping[str, Mapping[str, float]], rank: int) -> float:
    """Check that the differences between candidates on one rank are within fp32 rounding, and return the largest.

    Raises:
        ParityError: a difference is larger.
    """
    largest = 0.0
    for candidate, of_tensors in differences.items():
        for name, difference in of_tensors.items():
            # Written so that a NaN fails.
            if not difference <= RTOL_OF_NORM:
                raise ParityError(
                    f"{name} on rank {rank} differs between {CANDIDATES[0]} and {candidate} by {difference:.1e} of its "
                    f"norm, more than {RTOL_OF_NORM:g}: the candidates do not compute the same"
                )
            largest = max(largest, difference)
    return largest


def benchmark_linear(workers: Workers, *, num_rounds: int, num_calls: int) -> dict[str, Any]:
    """Measure the forward pass of our layer on one rank and of ``F.linear`` on the same tensors, in microseconds.

    Args:
        workers: the ranks; the first one measures, the others wait without using a processor.
        num_rounds: number of rounds that count.
        num_calls: number of calls that are timed together.

    Returns:
        The results for ``--json``.
    """
    workers.call(["rank 0"], "make_linears", LINEAR_TOKENS, LINEAR_WIDTH)

    def microseconds_per_call(name: str) -> float:
        seconds: float = workers.call(["rank 0"], "time_linear", name, num_calls)[0]
        return 1e6 * seconds / num_calls

    microseconds = measure_in_rounds(LINEARS, microseconds_per_call, num_rounds=num_rounds)
    ours, theirs = (microseconds[name] for name in LINEARS)
    overhead = [a - b for a, b in zip(ours, theirs, strict=True)]
    return {
        "num_tokens": LINEAR_TOKENS,
        "width": LINEAR_WIDTH,
        "num_calls": num_calls,
        "microseconds_per_call": microseconds,
        "overhead_microseconds": {
            "per_round": overhead,
            **dataclasses.asdict(Spread.of(overhead)),
            "goal": GOAL_MICROSECONDS_PER_LINEAR,
        },
    }


def describe_block(result: dict[str, Any]) -> str:
    """Format the result of one block."""
    sizes = BlockSizes(**result["sizes"])
    between = "GELU" if result["block"] == "mlp" else "attention"
    inner = f"{sizes.ffn_hidden_size} between" if result["block"] == "mlp" else f"{sizes.num_heads} heads"
    ratios = [
        (f"{r['numerator']} / {r['denominator']}", *_cells(r, 3), "" if r["goal"] is None else f"{r['goal']:.2f}")
        for r in result["ratios"]
    ]
    times = {name: Spread.of([1e3 * s for s in values]) for name, values in result["seconds_per_step"].items()}
    return "\n".join(
        [
            f"column -> {between} -> row{', sequence parallel' if result['sequence_parallel'] else ''}: hidden "
            f"{sizes.hidden_size}, {inner}, sequence {sizes.sequence_length}, batch {sizes.batch_size}, "
            f"{'' if sizes.bias else 'no '}biases",
            f"the same with all candidates to {result['largest_relative_difference']:.1e} of each tensor's norm",
            "",
            format_table(("ratio of times", "min", "median", "max", "goal"), ratios),
            "",
            format_table(
                ("ms forward and backward", "min", "median", "max"),
                [(name, *_cells(dataclasses.asdict(spread), 2)) for name, spread in times.items()],
            ),
        ]
    )


def describe_linear(result: dict[str, Any]) -> str:
    """Format the result of the linear layer."""
    rows = [
        (name, *_cells(dataclasses.asdict(Spread.of(values)), 2), "")
        for name, values in result["microseconds_per_call"].items()
    ]
    overhead = result["overhead_microseconds"]
    rows.append(("difference", *_cells(overhead, 2), f"{overhead['goal']:.2f}"))
    header = (f"µs forward, {result['num_tokens']} x {result['width']} on one rank", "min", "median", "max", "goal")
    return format_table(header, rows)


def _cells(spread: Mapping[str, float], digits: int) -> list[str]:
    return [f"{spread[name]:.{digits}f}" for name in ("min", "median", "max")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=(*SIZES, "both"), default="both", help="default: both")
    parser.add_argument("--block", choices=(*BLOCKS, "both"), default="both", help="default: both")
    add_common_flags(parser, default_rounds=9)
    parser.add_argument(
        "--steps",
        type=positive_int,
        help="timed steps of each candidate in a round; default: "
        + ", ".join(f"{steps} at size {name}" for name, steps in DEFAULT_STEPS.items()),
    )
    parser.add_argument(
        "--linear-calls", type=positive_int, default=20_000, help="timed linear forwards in a round; default: 20000"
    )
    parser.add_argument("--sequence-parallel", action="store_true", help="for all candidates")
    add_sizes(parser, BlockSizes, "in place of those of the one size chosen with --size")
    return parser


def _chosen_sizes(arguments: argparse.Namespace) -> dict[str, BlockSizes]:
    """Return the sizes to measure.

    Raises:
        ConfigError: a size is out of range, or numbers are given for two sizes at once.
    """
    chosen = SIZES if arguments.size == "both" else {arguments.size: SIZES[arguments.size]}
    given = given_sizes(arguments, BlockSizes)
    numbers = [name for name in given if name != "bias"]
    if numbers and len(chosen) > 1:
        raise ConfigError(f"{', '.join(numbers)} would apply to both sizes; choose one with --size")
    chosen = {name: dataclasses.replace(sizes, **given) for name, sizes in chosen.items()}
    for sizes in chosen.values():
        sizes.check_split(NUM_RANKS)
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line and return the exit code."""
    parser = _parser()
    arguments = parse_arguments(parser, argv)
    try:
        chosen = _chosen_sizes(arguments)
    except ConfigError as error:
        parser.error(str(error))
    blocks = BLOCKS if arguments.block == "both" else (arguments.block,)

    def measure() -> dict[str, Any]:
        results = []
        with tempfile.TemporaryDirectory() as folder, start_workers(Path(folder)) as workers:
            for name, sizes in chosen.items():
                for block in blocks:
                    result = benchmark_block(
                        workers,
                        name,
                        sizes,
                        block,
                        sequence_parallel=arguments.sequence_parallel,
                        num_rounds=arguments.rounds,
                        num_steps=arguments.steps or DEFAULT_STEPS[name],
                    )
                    print(describe_block(result), end="\n\n", flush=True)
                    results.append(result)
            linear = benchmark_linear(workers, num_rounds=arguments.rounds, num_calls=arguments.linear_calls)
            print(describe_linear(linear), end="\n\n", flush=True)
        return {"blocks": results, "linear": linear}

    return run_benchmark("tp_block", arguments, measure)


def start_workers(folder: Path) -> Workers:
    """Start the ranks, which connect through a file in ``folder``."""
    store = str(folder / "store")
    return Workers([WorkerSpec(f"rank {rank}", 1, Runner, (store, rank)) for rank in range(NUM_RANKS)])


if __name__ == "__main__":
    sys.exit(main())
