"""Time of a training step: Shardwise against DTensor and against one process, in alternating rounds of one run.

    python benchmarks/train_step.py --model both --json train_step.json

Two gloo ranks of one thread each alternate with one process of two threads. A step is forward, loss, backward, clipping
by the global norm, fused AdamW and zero_grad. All variants start from the same weights and see the same batch. Losses
and gradient norms must agree before anything is timed.
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
from steps.runner import RANK_VARIANTS, SINGLE_VARIANTS, Runner
from workers import Workers, WorkerSpec

from shardwise.core.errors import ConfigError, ParityError

# Number of steps to compare before anything is timed. The later steps also compare clipping and the optimizer.
NUM_PARITY_STEPS = 3
# A few fp32 roundings, because sums are computed in another order.
LOSS_RTOL = 1e-6
# PyTorch sums the squares of a whole weight in fp32, with an error of up to 2e-4.
GRAD_NORM_RTOL = 1e-3

MODELS = {
    "demo": LlamaSizes(
        hidden_size=128,
        num_layers=2,
        num_heads=4,
        ffn_hidden_size=352,
        vocab_size=4096,
        sequence_length=256,
        batch_size=8,
        tie_embeddings=True,
    ),
    "llama": LlamaSizes(
        hidden_size=512,
        num_layers=4,
        num_heads=8,
        ffn_hidden_size=1376,
        vocab_size=32_000,
        sequence_length=256,
        batch_size=4,
    ),
}
DEFAULT_STEPS = {"demo": 10, "llama": 3}

DEFAULT_VARIANTS = ("ours", "ours_sp", "dtensor", "dtensor_sp", "single", "single_passive")
RATIOS = (
    ("ours", "dtensor"),
    ("ours", "dtensor_fused"),
    ("ours_sp", "dtensor_sp"),
    ("ours_sp", "dtensor_sp_fused"),
    ("ours", "single"),
    ("ours", "single_passive"),
    ("ours", "single_fused"),
    ("ours", "raw"),
    ("ours_sp", "ours"),
    ("by_plan", "by_transformers"),
    ("by_plan", "ours"),
)


def benchmark(
    name: str, sizes: LlamaSizes, variants: Sequence[str], workers: Workers, *, num_rounds: int, num_steps: int
) -> dict[str, Any]:
    """Check and time all variants on one model.

    Args:
        name: name of the model.
        sizes: sizes of the model and its batch.
        variants: names from ``RANK_VARIANTS`` and ``SINGLE_VARIANTS``.
        workers: workers from ``start_workers`` for these variants.
        num_rounds: number of rounds that count.
        num_steps: number of steps to time per variant and round.

    Returns:
        The results of this model for ``--json``.

    Raises:
        ParityError: the results of the variants differ.
        LaunchError: a process failed or died.
    """

    num_parameters = 0
    for names in dict.fromkeys(tuple(_workers_of(variant)) for variant in variants):
        own = [variant for variant in variants if tuple(_workers_of(variant)) == names]
        num_parameters = workers.call(names, "prepare", sizes, own)[0]

    def run_steps(variant: str) -> list[tuple[float, float]]:
        steps: list[tuple[float, float]] = workers.call(_workers_of(variant), "run_steps", variant, NUM_PARITY_STEPS)[0]
        return steps

    def seconds_per_step(variant: str) -> float:
        # A step ends when the last rank ends it.
        slowest: float = max(workers.call(_workers_of(variant), "time_steps", variant, num_steps))
        return slowest / num_steps

    first_steps = {variant: run_steps(variant) for variant in variants}
    difference = check_parity(first_steps)
    seconds = measure_in_rounds(variants, seconds_per_step, num_rounds=num_rounds)
    return {
        "model": name,
        "sizes": dataclasses.asdict(sizes),
        "num_parameters": num_parameters,
        "num_steps": num_steps,
        "first_steps": {
            variant: {"losses": [loss for loss, _ in steps], "grad_norms": [norm for _, norm in steps]}
            for variant, steps in first_steps.items()
        },
        "first_loss_relative_difference": difference,
        "seconds_per_step": seconds,
        "ratios": [ratio.to_json() for ratio in ratios_of(seconds, RATIOS)],
    }


def check_parity(first_steps: Mapping[str, Sequence[tuple[float, float]]], *, loss_rtol: float = LOSS_RTOL) -> float:
    """Compare every variant's first steps with those of the first variant.

    Args:
        first_steps: loss and gradient norm of each step, by variant.
        loss_rtol: largest relative difference of a loss that is rounding.

    Returns:
        The largest relative difference between the losses of the first step.

    Raises:
        ParityError: the steps differ by more than fp32 rounding.
    """
    (reference, expected), *others = first_steps.items()
    largest = 0.0
    for variant, steps in others:
        for number, ((loss, norm), (expected_loss, expected_norm)) in enumerate(zip(steps, expected, strict=True)):
            for what, value, other, rtol in (
                ("loss", loss, expected_loss, loss_rtol),
                ("gradient norm", norm, expected_norm, GRAD_NORM_RTOL),
            ):
                # Written so that a NaN fails.
                if not abs(value - other) <= rtol * abs(other):
                    raise ParityError(
                        f"{what} of step {number + 1} is {value!r} with {variant} and {other!r} with {reference}, more "
                        f"than {rtol:g} of it apart: the variants do not train the same model"
                    )
        largest = max(largest, abs(steps[0][0] - expected[0][0]) / abs(expected[0][0]))
    return largest


def start_workers(variants: Sequence[str], folder: Path, *, keep_freed: bool = False) -> Workers:
    """Start the processes that ``variants`` need; the ranks connect through a file in ``folder``."""
    specs = []
    if any(variant in RANK_VARIANTS for variant in variants):
        store = str(folder / "store")
        specs = [WorkerSpec(f"rank {rank}", 1, Runner, (store, rank, keep_freed)) for rank in range(NUM_RANKS)]
    for variant in variants:
        if variant in SINGLE_VARIANTS:
            # By default a thread that waits for the other spins, which is fastest if each thread has a core. With the
            # passive policy it sleeps, which is faster if other programs run.
            environment = {"OMP_WAIT_POLICY": "passive"} if variant == "single_passive" else {}
            specs.append(WorkerSpec(variant, NUM_RANKS, Runner, (None, 0, keep_freed), environment))
    return Workers(specs)


def _workers_of(variant: str) -> list[str]:
    return [variant] if variant in SINGLE_VARIANTS else [f"rank {rank}" for rank in range(NUM_RANKS)]


def describe(result: dict[str, Any]) -> str:
    """Format the result of one model."""
    sizes = LlamaSizes(**result["sizes"])
    variants = list(result["seconds_per_step"])
    loss = result["first_steps"][variants[0]]["losses"][0]
    times = {name: Spread.of([1e3 * s for s in values]) for name, values in result["seconds_per_step"].items()}
    ratios = [(f"{r['numerator']} / {r['denominator']}", r["min"], r["median"], r["max"]) for r in result["ratios"]]
    lines = [
        f"{result['model']}: {result['num_parameters'] / 1e6:.1f} M parameters, hidden {sizes.hidden_size}, "
        f"{sizes.num_layers} layers, {sizes.num_heads} heads, vocabulary {sizes.vocab_size}, "
        f"sequence {sizes.sequence_length}, batch {sizes.batch_size}",
        f"first loss {loss:.6f}, the same with all variants to {result['first_loss_relative_difference']:.1e} of it",
        "",
    ]
    if ratios:
        rows = [(name, *(f"{value:.3f}" for value in values)) for name, *values in ratios]
        lines += [format_table(("ratio of times", "min", "median", "max"), rows), ""]
    rows = [(name, *(f"{value:.1f}" for value in (t.min, t.median, t.max))) for name, t in times.items()]
    lines.append(format_table(("ms per step", "min", "median", "max"), rows))
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=(*MODELS, "both"), default="both", help="default: both")
    add_common_flags(parser, default_rounds=9)
    parser.add_argument(
        "--steps",
        type=positive_int,
        help="timed steps of each variant in a round; default: "
        + ", ".join(f"{steps} for {name}" for name, steps in DEFAULT_STEPS.items()),
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=(*RANK_VARIANTS, *SINGLE_VARIANTS),
        default=DEFAULT_VARIANTS,
        metavar="VARIANT",
        help=f"of {', '.join((*RANK_VARIANTS, *SINGLE_VARIANTS))}; default: {' '.join(DEFAULT_VARIANTS)}",
    )
    parser.add_argument(
        "--keep-freed-memory",
        action="store_true",
        help="in all processes, keep freed memory as `shardwise train` does; default: the C library's own behaviour",
    )
    add_sizes(parser, LlamaSizes, "in place of those of the one model chosen with --model")
    return parser


def _chosen_models(arguments: argparse.Namespace) -> dict[str, LlamaSizes]:
    """Return the models to measure.

    Raises:
        ConfigError: a size is out of range, or sizes are given for two models at once.
    """
    models = MODELS if arguments.model == "both" else {arguments.model: MODELS[arguments.model]}
    given = given_sizes(arguments, LlamaSizes)
    if given and len(models) > 1:
        raise ConfigError(f"{', '.join(given)} would apply to both models; choose one with --model")
    models = {name: dataclasses.replace(sizes, **given) for name, sizes in models.items()}
    for sizes in models.values():
        sizes.check_split(NUM_RANKS)
    return models


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line and return the exit code."""
    parser = _parser()
    arguments = parse_arguments(parser, argv)
    try:
        models = _chosen_models(arguments)
    except ConfigError as error:
        parser.error(str(error))
    variants = list(dict.fromkeys(arguments.variants))

    def measure() -> dict[str, Any]:
        results = []
        keep_freed = arguments.keep_freed_memory
        with (
            tempfile.TemporaryDirectory() as folder,
            start_workers(variants, Path(folder), keep_freed=keep_freed) as workers,
        ):
            for name, sizes in models.items():
                num_steps = arguments.steps or DEFAULT_STEPS[name]
                result = benchmark(name, sizes, variants, workers, num_rounds=arguments.rounds, num_steps=num_steps)
                print(describe(result), end="\n\n", flush=True)
                results.append(result)
        return {"keep_freed_memory": keep_freed, "models": results}

    return run_benchmark("train_step", arguments, measure)


if __name__ == "__main__":
    sys.exit(main())
