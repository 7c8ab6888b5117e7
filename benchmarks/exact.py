"""Cost of exact runs, and a check that they have the same bits in every layout.

    python benchmarks/exact.py --json exact.json
    python benchmarks/exact.py --prove --steps 50

The first command measures whole training steps of exact and plain runs, on one process with two threads and on two
tensor-parallel ranks of one thread each, in alternating rounds (about four minutes for both models). It also measures
the trials at the start of an exact run. Exact steps must have the same bits in both places before anything is timed.
The second command starts a run with dropout in each layout, and compares all results of the runs with
``shardwise compare``. If a run has other bits, it continues with the other layouts and reports this at the end.
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
from exact_runs import Layout, Runs
from ranks import NUM_RANKS
from steps.exact_steps import EXACT_VARIANTS, ExactRunner
from steps.problem import LlamaSizes
from train_step import MODELS
from workers import Workers, WorkerSpec

from shardwise.core.errors import ConfigError, ParityError
from shardwise.run.exact.environment import fix_order_of_mkl

NUM_PARITY_STEPS = 3
RATIOS = (("exact", "plain"), ("exact", "plain_whole"))
# Maximum of the first of these ratios.
GOALS = {"demo": 1.25, "llama": 1.10}
STEPS = {"demo": 6, "llama": 2}
PLACES = {"tp 1": ["alone"], "tp 2": [f"rank {rank}" for rank in range(NUM_RANKS)]}

# Number of ranks, and flags of the layout. The first layout is the reference.
LAYOUTS = (
    (1, ""),
    (2, "--tp 2"),
    (2, "--tp 2 --sequence-parallel"),
    (4, "--tp 4"),
    (4, "--tp 4 --sequence-parallel"),
    (8, "--tp 8"),
    (8, "--tp 8 --sequence-parallel"),
    (2, "--pp 2 --pipeline-schedule gpipe"),
    (2, "--pp 2"),
    (2, "--pp 2 --pipeline-schedule interleaved --virtual-stages 2"),
    (2, "--pp 2 --pipeline-schedule zero-bubble"),
    (4, "--pp 4 --pipeline-schedule gpipe"),
    (4, "--pp 4"),
    (4, "--pp 4 --pipeline-schedule interleaved --virtual-stages 2"),
    (4, "--pp 4 --pipeline-schedule zero-bubble"),
    (2, ""),
    (4, ""),
    (8, ""),
    (4, "--zero 1"),
    (8, "--zero 1"),
    (4, "--zero 1 --tp 2"),
    (8, "--zero 1 --tp 2 --pp 2"),
    (2, "--tp 2 --recompute.granularity full"),
    (2, "--tp 2 --recompute.granularity selective --recompute.modules core_attn layernorm mlp_act"),
    (8, "--tp 2 --pp 2"),
)
SMALL = "--model.vocab-size 512 --model.sequence-length 32"
LLAMA = f"{SMALL} --model.num-layers 8 --model.num-heads 16 --model.num-query-groups 8 --model.no-tie-embeddings"
RUNS = {
    "llama": LLAMA,
    "muon": f"{LLAMA} --optimizer.name muon",
    "gpt": f"{SMALL} --model.architecture gpt --model.num-layers 8 --model.num-heads 8",
    "demo": "--model.num-layers 2 --model.num-heads 4 --model.vocab-size 4096 --model.sequence-length 256",
}
# The micro-batch size is given, so that plain runs have the same micro-batches.
COMMON = (
    "--device cpu --data stdlib --corpus.held-out-fraction 0.0001 --model.hidden-size 128 --model.dropout 0.1 "
    "--training.global-batch-size 8 --training.micro-batch-size 1"
)


def benchmark(sizes: LlamaSizes, workers: Workers, *, num_rounds: int, num_steps: int) -> dict[str, Any]:
    """Check and time all variants at tp 1 and tp 2.

    Args:
        sizes: sizes of the model and the batch.
        workers: workers from ``start_workers``.
        num_rounds: number of rounds that count.
        num_steps: number of steps to time per variant and round.

    Returns:
        The results of these sizes for ``--json``.

    Raises:
        ParityError: exact steps have other bits at tp 2 than at tp 1.
        LaunchError: a process failed or died.
    """
    for names in PLACES.values():
        workers.call(names, "prepare", sizes)
    first = {place: workers.call(names, "run_steps", "exact", NUM_PARITY_STEPS)[0] for place, names in PLACES.items()}
    if first["tp 1"] != first["tp 2"]:
        raise ParityError(f"exact steps (loss, gradient norm) are {first['tp 1']} at tp 1 and {first['tp 2']} at tp 2")
    results: dict[str, Any] = {"sizes": dataclasses.asdict(sizes), "num_steps": num_steps}
    results["check_seconds"] = {place: max(workers.call(names, "check")) for place, names in PLACES.items()}
    for place, names in PLACES.items():

        def seconds_per_step(variant: str, names: Sequence[str] = names) -> float:
            slowest: float = max(workers.call(names, "time_steps", variant, num_steps))
            return slowest / num_steps

        seconds = measure_in_rounds(EXACT_VARIANTS, seconds_per_step, num_rounds=num_rounds)
        ratios = [ratio.to_json() for ratio in ratios_of(seconds, RATIOS)]
        results[place] = {"seconds_per_step": seconds, "ratios": ratios}
    return results


def start_workers(folder: Path) -> Workers:
    """Start the single process, and the ranks, which connect through a file in ``folder``."""
    # As at the start of an exact run. On Intel, plain steps then also use MKL's reproducible kernels.
    fix_order_of_mkl()
    store = str(folder / "store")
    ranks = [WorkerSpec(name, 1, ExactRunner, (store, rank)) for rank, name in enumerate(PLACES["tp 2"])]
    return Workers([WorkerSpec("alone", NUM_RANKS, ExactRunner, (None, 0)), *ranks])


def describe(name: str, result: dict[str, Any]) -> str:
    """Format the result of one model."""
    goal = f"; goal: exact / plain at most {GOALS[name]:.2f}" if name in GOALS else ""
    lines = [f"{name}: exact steps have the same bits at tp 1 and tp 2{goal}", ""]
    for place in PLACES:
        lines += [f"{place}: the device is tried in {result['check_seconds'][place]:.2f} s", ""]
        rows = [
            (f"{place}: {r['numerator']} / {r['denominator']}", *(f"{r[key]:.3f}" for key in ("min", "median", "max")))
            for r in result[place]["ratios"]
        ]
        lines += [format_table(("ratio of times", "min", "median", "max"), rows), ""]
        times = {key: Spread.of([1e3 * s for s in each]) for key, each in result[place]["seconds_per_step"].items()}
        rows = [(key, f"{t.min:.1f}", f"{t.median:.1f}", f"{t.max:.1f}") for key, t in times.items()]
        lines += [format_table(("ms per step", "min", "median", "max"), rows), ""]
    return "\n".join(lines)


def prove(num_steps: int, models: Sequence[str], dtypes: Sequence[str], more: str = "") -> list[str]:
    """Run every model in every layout, each in separate processes, and compare the results of the runs.

    Args:
        num_steps: number of steps of every run.
        models: names from ``RUNS``.
        dtypes: dtypes of ``shardwise train``.
        more: additional flags for every run.

    Returns:
        A line for each run.

    Raises:
        LaunchError: the first run of a model failed.
        ParityError: a run has other bits or failed; raised after all layouts were tried.
    """
    outcomes, wrong = [], []
    for name in models:
        for dtype in dtypes:
            flags = f"{COMMON} {RUNS[name]} {more} --training.steps {num_steps} --training.dtype {dtype}".split()
            flags += ["--training.eval-every", str(max(1, num_steps // 2))]
            with tempfile.TemporaryDirectory() as folder:
                runs = Runs(f"{name} in {dtype}", Path(folder), flags, num_steps)
                runs.prove([layout for layout in LAYOUTS if name != "demo" or fits_the_demo(layout)])
            outcomes += runs.outcomes
            wrong += runs.wrong
    if wrong:
        raise ParityError(f"{len(wrong)} of {len(outcomes)} runs: " + "; ".join(wrong))
    return outcomes


def fits_the_demo(layout: Layout) -> bool:
    """True if a model of 4 heads and 2 layers can be split in this layout."""
    return not any(word in layout[1] for word in ("--tp 8", "--pp 4", "interleaved"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_common_flags(parser, default_rounds=7)
    parser.add_argument("--model", choices=(*MODELS, "both"), default="both", help="default: both")
    parser.add_argument("--steps", type=positive_int, help="timed steps in a round, or with --prove steps of a run")
    parser.add_argument("--prove", action="store_true", help="start a run at each layout and compare them all")
    parser.add_argument("--models", nargs="+", choices=RUNS, help="of --prove; default: all")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="of the runs of --prove")
    add_sizes(parser, LlamaSizes, "in place of the model's own")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line and return the exit code."""
    parser = _parser()
    arguments = parse_arguments(parser, argv)
    given = given_sizes(arguments, LlamaSizes)
    names = list(MODELS) if arguments.model == "both" else [arguments.model]
    try:
        models = {name: dataclasses.replace(MODELS[name], **given) for name in names}
    except ConfigError as error:
        parser.error(str(error))

    def measure() -> dict[str, Any]:
        if arguments.prove:
            more = " ".join(f"--model.{name.replace('_', '-')} {value}" for name, value in given.items())
            return {"proved": prove(arguments.steps or 50, arguments.models or list(RUNS), arguments.dtypes, more)}
        results = {}
        with tempfile.TemporaryDirectory() as folder, start_workers(Path(folder)) as workers:
            for name, sizes in models.items():
                num_steps = arguments.steps or STEPS[name]
                results[name] = benchmark(sizes, workers, num_rounds=arguments.rounds, num_steps=num_steps)
                print(describe(name, results[name]), flush=True)
        return results

    return run_benchmark("exact", arguments, measure)


if __name__ == "__main__":
    sys.exit(main())
