"""A step with experts at ep 2, against a dense model of the same active work and transformers' expert parallelism.

    python benchmarks/experts.py --json experts.json

Two data-parallel ranks of one thread each, in alternating rounds. Before anything is timed, our first loss and gradient
norm must be those of transformers, whose weights we load. The dense model is ours, with an MLP as wide as a token's
experts together; with it we compare a step in which each expert gets as many tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import (
    add_common_flags,
    add_sizes,
    given_sizes,
    measure_in_rounds,
    parse_arguments,
    print_result,
    ratios_of,
    run_benchmark,
)
from ranks import NUM_RANKS
from steps.expert_steps import EXPERT_VARIANTS, ExpertRunner, ExpertSizes
from train_step import check_parity
from workers import Workers, WorkerSpec

RANKS = [f"rank {rank}" for rank in range(NUM_RANKS)]
RATIOS = (("balanced", "dense"), ("experts", "transformers"), ("experts", "transformers_tp"))
# Tokens whose two best experts are nearly tied may choose others in another order of sums.
LOSS_RTOL = 1e-4


def start_workers(folder: Path) -> Workers:
    """Start the ranks, which connect through a file in ``folder``."""
    store = str(folder / "store")
    return Workers([WorkerSpec(name, 1, ExpertRunner, (store, rank)) for rank, name in enumerate(RANKS)])


def benchmark(sizes: ExpertSizes, workers: Workers, folder: Path, num_rounds: int) -> dict[str, Any]:
    """Compare the first losses, and time all variants.

    Raises:
        ParityError: our first loss or gradient norm is not that of transformers.
    """
    sizes.folder(str(folder / "model"))
    workers.call(RANKS, "prepare", sizes, str(folder / "model"))
    first = {}
    for variant in ("transformers", "transformers_tp", "experts"):
        losses, norms = zip(*workers.call(RANKS, "first_step", variant), strict=True)
        first[variant] = [(statistics.mean(losses), norms[0])]
    check_parity(first, loss_rtol=LOSS_RTOL)
    seconds = measure_in_rounds(
        EXPERT_VARIANTS, lambda variant: max(workers.call(RANKS, "time_step", variant)), num_rounds=num_rounds
    )
    ratios = [ratio.to_json() for ratio in ratios_of(seconds, RATIOS)]
    return {"sizes": dataclasses.asdict(sizes), "seconds_per_step": seconds, "ratios": ratios}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_common_flags(parser, default_rounds=7)
    add_sizes(parser, ExpertSizes, "of the model, and of the batch on a rank")
    arguments = parse_arguments(parser, argv)
    sizes = ExpertSizes(**given_sizes(arguments, ExpertSizes))

    def measure() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder, start_workers(Path(folder)) as workers:
            result = benchmark(sizes, workers, Path(folder), arguments.rounds)
        print_result(result)
        return result

    return run_benchmark("experts", arguments, measure)


if __name__ == "__main__":
    sys.exit(main())
