"""Time and memory of the loss over a split vocabulary: Shardwise against DTensor, the reference's algorithm and limits.

    python benchmarks/loss.py --json loss.json
    python benchmarks/loss.py --contest logits --dtype bf16

Two gloo ranks of one thread each, forward and backward in alternating rounds of one run: the loss of given logits; the
output layer and the loss together; and these on one rank, against PyTorch's own. How far each candidate's gradients
are from the exact ones is told, and ours are held to it, before anything is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import (
    Spread,
    add_common_flags,
    format_table,
    measure_in_rounds,
    parse_arguments,
    positive_int,
    ratios_of,
    run_benchmark,
)
from losses.problem import DTYPES, LossSizes
from losses.runner import Runner
from ranks import NUM_RANKS
from workers import Workers, WorkerSpec

from shardwise.core.errors import ConfigError, ParityError

# A batch of 2,048 tokens of a model with Llama 3's vocabulary.
SIZES = LossSizes(num_tokens=2048, vocab_size=128_256, hidden_size=1024)
CONTESTS = {
    "logits": "the loss of given logits, in place",
    "head": "output layer and loss",
    "one_rank": "output layer and loss on one rank",
}
# Largest error of our gradients, relative to the largest gradient: a few roundings. With an output layer the logits
# are rounded too, to bf16 where they are kept, and so are both factors of the products behind them.
MAX_ERROR = {
    ("logits", "bf16"): 2**-8,
    ("logits", "fp32"): 2e-6,
    ("head", "bf16"): 0.03,
    ("head", "fp32"): 1e-4,
    ("one_rank", "bf16"): 0.03,
    ("one_rank", "fp32"): 1e-4,
}
RATIOS = {
    "logits": (("ours", "dtensor"), ("ours", "reference"), ("ours", "limit")),
    "head": (
        ("ours_local", "dtensor"),
        ("ours_local", "reference"),
        ("ours_local", "ours_plain"),
        ("ours_local", "three_gemms"),
        ("ours_chunked", "four_gemms"),
    ),
    "one_rank": (
        ("ours_local", "linear_and_cross_entropy"),
        ("ours_local", "linear_cross_entropy"),
        ("ours_chunked", "linear_cross_entropy"),
    ),
}
# The largest ratio of times that meets the goal.
GOALS = {
    ("logits", "bf16", "ours", "dtensor"): 0.05,
    ("logits", "fp32", "ours", "dtensor"): 0.05,
    ("logits", "bf16", "ours", "reference"): 0.12,
    ("logits", "fp32", "ours", "limit"): 1.8,
    ("head", "bf16", "ours_local", "three_gemms"): 1.05,
    ("head", "bf16", "ours_chunked", "four_gemms"): 1.15,
}
MIB = 2**20


def memory_goals(contest: str, dtype: str, sizes: LossSizes) -> dict[str, float]:
    """Most extra MiB that meet the goal, by candidate."""
    if contest == "logits":
        # What a few numbers for each token take, and the allocator's pages.
        return {"ours": 1.0}
    num_ranks = 1 if contest == "one_rank" else NUM_RANKS
    elements = sizes.hidden_size * (sizes.num_tokens + sizes.vocab_size // num_ranks)
    return {"ours_chunked": 1.05 * elements * DTYPES[dtype].itemsize / MIB + 16}


def benchmark_contest(
    workers: Workers,
    contest: str,
    dtype: str,
    sizes: LossSizes,
    *,
    num_rounds: int,
    num_steps: int,
    chosen: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Check, weigh and time all candidates of one contest.

    Args:
        workers: the ranks, each with a ``Runner``.
        contest: one of ``CONTESTS``.
        dtype: one of ``DTYPES``, of hidden states, weights and logits.
        sizes: of the batch.
        num_rounds: rounds that count.
        num_steps: steps that a candidate is timed for in a round.
        chosen: the candidates that are weighed and timed; all if None.

    Returns:
        What ``--json`` writes of this contest.

    Raises:
        ParityError: our gradients are off by more than rounding.
        LaunchError: a process failed or died.
    """
    # On one rank the others wait, without using a processor.
    ranks = [f"rank {rank}" for rank in range(1 if contest == "one_rank" else NUM_RANKS)]
    errors = dict(workers.call(ranks, "make", contest, dtype, sizes)[0])
    check_errors(errors, contest, dtype)
    # In the order of the ratios, each once; not all exist in every PyTorch.
    compared = dict.fromkeys(name for pair in RATIOS[contest] for name in pair)
    candidates = [
        name for name in compared if (name in errors or is_limit(name)) and (chosen is None or name in chosen)
    ]

    extra: dict[str, float | None] = {}
    for name in candidates:
        of_ranks = workers.call(ranks, "extra_bytes", name)
        extra[name] = None if None in of_ranks else max(of_ranks) / MIB

    processor: dict[str, list[float]] = {name: [] for name in candidates}

    def seconds_per_step(name: str) -> float:
        of_ranks = workers.call(ranks, "time_steps", name, num_steps)
        processor[name].append(sum(seconds for _, seconds in of_ranks))
        # A step is done when the last rank has done it.
        slowest: float = max(wall for wall, _ in of_ranks)
        return slowest

    seconds = measure_in_rounds(candidates, seconds_per_step, num_rounds=num_rounds)
    return {
        "contest": contest,
        "dtype": dtype,
        "sizes": dataclasses.asdict(sizes),
        "num_steps": num_steps,
        "largest_relative_error": errors,
        "extra_mib": extra,
        "extra_mib_goals": memory_goals(contest, dtype, sizes),
        "seconds_per_step": seconds,
        "processor_seconds_per_step": {name: values[-num_rounds:] for name, values in processor.items()},
        "ratios": [
            ratio.to_json() | {"goal": GOALS.get((contest, dtype, ratio.numerator, ratio.denominator))}
            for ratio in ratios_of(seconds, RATIOS[contest])
        ],
    }


def is_limit(name: str) -> bool:
    """Whether a candidate computes no loss."""
    return name == "limit" or name.endswith("_gemms")


def check_errors(errors: Mapping[str, float], contest: str, dtype: str) -> None:
    """Hold the errors of our gradients against rounding; others' are only told.

    Raises:
        ParityError: one is larger, or not a number.
    """
    bound = MAX_ERROR[contest, dtype]
    for name, error in errors.items():
        if name.startswith("ours") and not error <= bound:
            raise ParityError(
                f"the {dtype} gradients of {name} ({CONTESTS[contest]}) are off by {error:.1e} of the largest "
                f"gradient, more than {bound:g}"
            )


def describe(result: Mapping[str, Any]) -> str:
    """One contest's result as text."""
    sizes = LossSizes(**result["sizes"])
    head = "" if result["contest"] == "logits" else f", hidden {sizes.hidden_size}"
    ratios = [
        (
            f"{r['numerator']} / {r['denominator']}",
            *(f"{r[name]:.3f}" for name in ("min", "median", "max")),
            "" if r["goal"] is None else f"{r['goal']:.2f}",
        )
        for r in result["ratios"]
    ]
    rows = []
    for name, seconds in result["seconds_per_step"].items():
        wall = Spread.of([1e3 * value for value in seconds])
        processor = Spread.of([1e3 * value for value in result["processor_seconds_per_step"][name]])
        extra, goal = result["extra_mib"][name], result["extra_mib_goals"].get(name)
        error = result["largest_relative_error"].get(name)
        rows.append(
            (
                name,
                *(f"{value:.1f}" for value in (wall.min, wall.median, wall.max, processor.median)),
                "?" if extra is None else f"{extra:.0f}",
                "" if goal is None else f"{goal:.0f}",
                "" if error is None else f"{error:.1e}",
            )
        )
    header = ("ms forward and backward", "min", "median", "max", "CPU, all ranks", "extra MiB", "goal", "error")
    return "\n".join(
        [
            f"{CONTESTS[result['contest']]}: {result['dtype']}, {sizes.num_tokens} tokens, vocabulary "
            f"{sizes.vocab_size}{head}",
            "",
            format_table(("ratio of times", "min", "median", "max", "goal"), ratios),
            "",
            format_table(header, rows),
        ]
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--contest", choices=(*CONTESTS, "all"), default="all", help="default: all")
    parser.add_argument("--dtype", choices=(*DTYPES, "both"), default="both", help="default: both")
    parser.add_argument("--candidates", nargs="+", metavar="NAME", help="weigh and time these only, by their names")
    add_common_flags(parser, default_rounds=7)
    parser.add_argument("--steps", type=positive_int, default=1, help="timed steps in a round; default: 1")
    for field in dataclasses.fields(LossSizes):
        default = getattr(SIZES, field.name)
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=positive_int, default=default, metavar="N", help=f"default: {default}")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; returns the exit code."""
    parser = _parser()
    arguments = parse_arguments(parser, argv)
    sizes = LossSizes(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(LossSizes)})
    try:
        sizes.check_split(NUM_RANKS)
    except ConfigError as error:
        parser.error(str(error))
    contests = list(CONTESTS) if arguments.contest == "all" else [arguments.contest]
    known = sorted({name for contest in contests for pair in RATIOS[contest] for name in pair})
    if unknown := sorted(set(arguments.candidates or ()) - set(known)):
        parser.error(f"no candidates of this contest: {', '.join(unknown)}; there are {', '.join(known)}")
    dtypes = list(DTYPES) if arguments.dtype == "both" else [arguments.dtype]

    def measure() -> dict[str, Any]:
        results = []
        with tempfile.TemporaryDirectory() as folder, start_workers(Path(folder)) as workers:
            for contest in contests:
                for dtype in dtypes:
                    result = benchmark_contest(
                        workers,
                        contest,
                        dtype,
                        sizes,
                        num_rounds=arguments.rounds,
                        num_steps=arguments.steps,
                        chosen=arguments.candidates,
                    )
                    print(describe(result), end="\n\n", flush=True)
                    results.append(result)
        return {"contests": results}

    return run_benchmark("loss", arguments, measure)


def start_workers(folder: Path) -> Workers:
    """Start the ranks, which meet through a file in ``folder``."""
    store = str(folder / "store")
    return Workers([WorkerSpec(f"rank {rank}", 1, Runner, (store, rank)) for rank in range(NUM_RANKS)])


if __name__ == "__main__":
    sys.exit(main())
