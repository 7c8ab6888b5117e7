"""A step on a long sample that two ranks share, against one process; and attention of a packed row.

    python benchmarks/context.py --json context.json
    python benchmarks/context.py --sequence-length 32768 --num-layers 1

Two context-parallel ranks of one thread each, and one process of two threads, in alternating rounds. Before anything is
timed, all must agree on the first loss and gradient norm, and both attentions of the packed row on the sums of squares
of their output and gradients.
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
from steps.context_steps import PACKED_VARIANTS, WAYS, ContextRunner, ContextSizes
from train_step import check_parity
from workers import Workers, WorkerSpec

RANKS = [f"rank {rank}" for rank in range(NUM_RANKS)]
RATIOS = (*((way, "single") for way in WAYS), PACKED_VARIANTS)
LOSS_RTOL = 1e-5


def start_workers(folder: Path) -> Workers:
    """Start the ranks, which connect through a file in ``folder``, and the single process."""
    ranks = [(name, 1, "store", rank, NUM_RANKS) for rank, name in enumerate(RANKS)]
    return Workers(
        [
            WorkerSpec(name, threads, ContextRunner, (str(folder / store), rank, world))
            for name, threads, store, rank, world in (*ranks, ("single", NUM_RANKS, "alone", 0, 1))
        ]
    )


def benchmark(sizes: ContextSizes, workers: Workers, num_rounds: int) -> dict[str, Any]:
    """Compare the first results, and time all variants.

    Raises:
        ParityError: results differ.
    """
    variants = (*WAYS, "single", *PACKED_VARIANTS)
    names = {variant: RANKS if variant in WAYS else ["single"] for variant in variants}
    workers.call([*RANKS, "single"], "prepare", sizes)
    first = {variant: workers.call(names[variant], "first", variant)[0] for variant in variants}
    for variants_alike in (("single", *WAYS), PACKED_VARIANTS[::-1]):
        check_parity({variant: [first[variant]] for variant in variants_alike}, loss_rtol=LOSS_RTOL)
    seconds = measure_in_rounds(
        variants, lambda variant: max(workers.call(names[variant], "time_step", variant)), num_rounds=num_rounds
    )
    ratios = [ratio.to_json() for ratio in ratios_of(seconds, RATIOS)]
    return {"sizes": dataclasses.asdict(sizes), "seconds_per_step": seconds, "ratios": ratios}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_common_flags(parser, default_rounds=7)
    add_sizes(parser, ContextSizes, "of the model, of its sample, and of the packed row")
    arguments = parse_arguments(parser, argv)
    sizes = ContextSizes(**given_sizes(arguments, ContextSizes))

    def measure() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder, start_workers(Path(folder)) as workers:
            result = benchmark(sizes, workers, arguments.rounds)
        print_result(result)
        return result

    return run_benchmark("context", arguments, measure)


if __name__ == "__main__":
    sys.exit(main())
