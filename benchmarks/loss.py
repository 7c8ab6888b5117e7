"""Time and memory of the loss over a split vocabulary: Shardwise, DTensor, the reference's algorithm and lower bounds.

    python benchmarks/loss.py --json loss.json
    python benchmarks/loss.py --contest logits --dtype bf16

Two gloo ranks of one thread each run forward and backward passes in alternating rounds: of the loss of given logits; of
output layer and loss together; and of both on one rank, compared with PyTorch. Before anything is timed, the errors of
all candidates' gradients are reported, and those of Shardwise must be within a bound.
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
# Maximum error of our gradients, relative to the largest gradient: a few roundings. With an output layer the logits are
# also rounded, to bf16 if they are stored, and so are both factors of the following products.
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
# Maximum ratio of times that meets the goal.
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
    """Return the maximum extra MiB that meet the goal, by candidate."""
    if contest == "logits":
        # The memory of a few values per token, and of the allocator's pages.
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
    """Check all candidates of one contest, and measure their memory and time.

    Args:
        workers: the ranks, each with a ``Runner``.
        contest: one of ``CONTESTS``.
        dtype: one of ``DTYPES``, the dtype of hidden states, weights and logits.
        sizes: sizes of the batch.
        num_rounds: number of rounds that count.
        num_steps: number of steps to time per candidate and round.
        chosen: candidates to measure; all if None.

    Returns:
        The results of this contest for ``--json``.

    Raises:
        ParityError: the error of our gradients exceeds rounding.
        LaunchError: a process failed or died.
    """
    # With one rank, the others wait without using a processor.
    ranks = [f"rank {rank}" for rank in range(1 if contest == "one_rank" else NUM_RANKS)]
    errors = dict(workers.call(ranks, "make", contest, dtype, sizes)[0])
    check_errors(errors, contest, dtype)
    # Each candidate once, in the order of the ratios. Some do not exist in every version of PyTorch.
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
        # A step ends when the last rank ends it.
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
    """True if a candidate computes no loss, but only a lower bound."""
    return name == "limit" or name.endswith("_gemms")


def check_errors(errors: Mapping[str, float], contest: str, dtype: str) -> None:
    """Check that the errors of our gradients are within rounding; the errors of other candidates are not checked.

    Raises:
        ParityError: an error is larger or NaN.
    """
    bound = MAX_ERROR[contest, dtype]
    for name, error in errors.items():
        if name.startswith("ours") and not error <= bound:
            raise ParityError(
                f"the {dtype} gradients of {name} ({CONTESTS[contest]}) are off by {error:.1e} of the largest "
                f"gradient, more than {bound:g}"
            )


def describe(result: Mapping[str, Any]) -> str:
    """Format the result of one contest."""
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
    """Run from the command line and return the exit code."""
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
    """Start the ranks, which connect through a file in ``folder``."""
    store = str(folder / "store")
    return Workers([WorkerSpec(f"rank {rank}", 1, Runner, (store, rank)) for rank in range(NUM_RANKS)])


if __name__ == "__main__":
    sys.exit(main())
