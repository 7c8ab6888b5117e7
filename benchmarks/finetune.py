"""Tokens per second of fine-tuning with LoRA: Shardwise against peft and transformers, in alternating rounds.

    python benchmarks/finetune.py --json finetune.json

Two gloo ranks of one thread each alternate with one process of two threads. The ranks compare Shardwise's tensor
parallelism with transformers' ``tp_plan`` and peft's adapters; the single process compares Shardwise with peft. A step
is forward, loss, backward, clipping by the global norm and fused AdamW of the adapters, in fp32. All variants start
from the same files and see the same samples, half of whose tokens are masked prompts. Losses and gradient norms must
agree before anything is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adapters.problem import Files, FinetuneSizes, write_files
from adapters.runner import RANK_VARIANTS, SEED, SINGLE_VARIANTS, FinetuneRunner
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
from train_step import check_parity
from workers import Workers, WorkerSpec

from shardwise.core.errors import ConfigError

NUM_PARITY_STEPS = 3
SIZES = FinetuneSizes(
    hidden_size=512,
    num_layers=4,
    num_heads=8,
    ffn_hidden_size=1376,
    vocab_size=8192,
    sequence_length=256,
    batch_size=4,
)
DEFAULT_STEPS = 3
VARIANTS = (*RANK_VARIANTS, *SINGLE_VARIANTS)
# Their time over ours: how many times more tokens Shardwise trains on per second.
RATIOS = (("tp_plan", "ours"), ("peft_single", "ours_single"))

_RANKS = [f"rank {rank}" for rank in range(NUM_RANKS)]
_SINGLE = ["single"]


def benchmark(
    sizes: FinetuneSizes, files: Files, workers: Workers, *, num_rounds: int, num_steps: int
) -> dict[str, Any]:
    """Check and time all variants.

    Args:
        sizes: sizes of the model and the batch.
        files: folders of the model and the adapters.
        workers: workers from ``start_workers``.
        num_rounds: number of rounds that count.
        num_steps: number of steps to time per variant and round.

    Returns:
        The results for ``--json``.

    Raises:
        ParityError: the results of the variants differ.
        LaunchError: a process failed or died.
    """
    workers_of = dict.fromkeys(RANK_VARIANTS, _RANKS) | dict.fromkeys(SINGLE_VARIANTS, _SINGLE)
    workers.call(_RANKS, "prepare", sizes, files, RANK_VARIANTS)
    workers.call(_SINGLE, "prepare", sizes, files, SINGLE_VARIANTS)
    first_steps = {
        variant: workers.call(workers_of[variant], "run_steps", variant, NUM_PARITY_STEPS)[0] for variant in VARIANTS
    }
    difference = check_parity(first_steps)

    def seconds_per_step(variant: str) -> float:
        # A step ends when the last rank ends it.
        slowest: float = max(workers.call(workers_of[variant], "time_steps", variant, num_steps))
        return slowest / num_steps

    seconds = measure_in_rounds(VARIANTS, seconds_per_step, num_rounds=num_rounds)
    return {
        "sizes": dataclasses.asdict(sizes),
        "num_steps": num_steps,
        "first_loss_relative_difference": difference,
        "seconds_per_step": seconds,
        "ratios": [ratio.to_json() for ratio in ratios_of(seconds, RATIOS)],
    }


def start_workers(folder: Path) -> Workers:
    """Start the ranks and the single process, which connect through files in ``folder``."""
    specs = [
        WorkerSpec(name, 1, FinetuneRunner, (str(folder / "ranks"), rank, NUM_RANKS))
        for rank, name in enumerate(_RANKS)
    ]
    return Workers([*specs, WorkerSpec("single", 2, FinetuneRunner, (str(folder / "single"), 0, 1))])


def describe(result: dict[str, Any]) -> str:
    """Format the result."""
    sizes = FinetuneSizes(**result["sizes"])
    tokens = sizes.batch_size * sizes.sequence_length
    times = {name: Spread.of([1e3 * s for s in values]) for name, values in result["seconds_per_step"].items()}
    rates = {name: Spread.of([tokens / s for s in values]) for name, values in result["seconds_per_step"].items()}
    ratios = [
        (f"{r['numerator']} / {r['denominator']}", *(f"{r[value]:.3f}" for value in ("min", "median", "max")))
        for r in result["ratios"]
    ]
    rows = [
        (name, *(f"{value:.1f}" for value in (t.min, t.median, t.max)), f"{rates[name].median:.0f}")
        for name, t in times.items()
    ]
    return "\n".join(
        [
            f"hidden {sizes.hidden_size}, {sizes.num_layers} layers, vocabulary {sizes.vocab_size}, {sizes.batch_size} "
            f"samples of {sizes.sequence_length} tokens, {sizes.prompt_length} of them prompt; rank {sizes.lora_rank}",
            "",
            format_table(("ratio of times", "min", "median", "max"), ratios),
            "",
            format_table(("ms per step", "min", "median", "max", "tokens per second"), rows),
        ]
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_common_flags(parser, default_rounds=9)
    parser.add_argument(
        "--steps",
        type=positive_int,
        default=DEFAULT_STEPS,
        help=f"timed steps of each variant in a round; default: {DEFAULT_STEPS}",
    )
    add_sizes(parser, FinetuneSizes, "in place of the usual ones")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line and return the exit code."""
    parser = _parser()
    arguments = parse_arguments(parser, argv)
    try:
        sizes = dataclasses.replace(SIZES, **given_sizes(arguments, FinetuneSizes))
        sizes.check_split(NUM_RANKS)
    except ConfigError as error:
        parser.error(str(error))

    def measure() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as temporary, start_workers(Path(temporary)) as workers:
            files = write_files(sizes, Path(temporary), SEED)
            result = benchmark(sizes, files, workers, num_rounds=arguments.rounds, num_steps=arguments.steps)
        print(describe(result), flush=True)
        return result

    return run_benchmark("finetune", arguments, measure)


if __name__ == "__main__":
    sys.exit(main())
