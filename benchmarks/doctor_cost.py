"""Cost of the doctor: a recorded step against a plain one, and the time of a whole diagnosis.

    python benchmarks/doctor_cost.py --json doctor.json

The first is measured on two tensor-parallel ranks of one thread each, in alternating rounds. The second starts
``shardwise doctor train`` at tp 2 on a model of the same sizes, with its imports and three recordings of two steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import (
    Spread,
    add_common_flags,
    add_sizes,
    given_sizes,
    measure_in_rounds,
    parse_arguments,
    ratios_of,
    run_benchmark,
)
from ranks import NUM_RANKS
from steps.problem import LlamaSizes
from steps.recorded_steps import RECORDED_VARIANTS, RecordedRunner
from workers import Workers, WorkerSpec

from shardwise.core.errors import LaunchError

SIZES = LlamaSizes(
    hidden_size=384,
    num_layers=12,
    num_heads=8,
    ffn_hidden_size=1024,
    vocab_size=2048,
    sequence_length=256,
    batch_size=4,
)
RANKS = [f"rank {rank}" for rank in range(NUM_RANKS)]


def start_workers(folder: Path) -> Workers:
    """Start the ranks, which connect through a file in ``folder``."""
    store = str(folder / "store")
    return Workers([WorkerSpec(name, 1, RecordedRunner, (store, rank)) for rank, name in enumerate(RANKS)])


def cost_of_recording(sizes: LlamaSizes, workers: Workers, num_rounds: int) -> dict[str, Any]:
    """Time steps with the recorder and without."""
    workers.call(RANKS, "prepare", sizes)
    seconds = measure_in_rounds(
        RECORDED_VARIANTS, lambda variant: max(workers.call(RANKS, "time_step", variant)), num_rounds=num_rounds
    )
    (ratio,) = ratios_of(seconds, [RECORDED_VARIANTS])
    num_bytes = max(workers.call(RANKS, "recorded_bytes"))
    return {"seconds_per_step": seconds, "ratio": ratio.to_json(), "bytes_per_step": num_bytes}


def seconds_of_diagnosis(sizes: LlamaSizes) -> float:
    """Return the seconds of ``shardwise doctor train`` at tp 2.

    Raises:
        LaunchError: it failed, or found a fault.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--data stdlib --out {folder} --device cpu --tp {NUM_RANKS} --training.steps 2"
        flags += f" --training.global-batch-size {sizes.batch_size} --corpus.held-out-fraction 0.0001"
        for name in ("hidden_size", "num_layers", "num_heads", "ffn_hidden_size", "vocab_size", "sequence_length"):
            flags += f" --model.{name.replace('_', '-')} {getattr(sizes, name)}"
        start = time.perf_counter()
        run = subprocess.run(
            [sys.executable, "-m", "shardwise", "doctor", "train", *flags.split()],
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            raise LaunchError(f"shardwise doctor train ended with {run.returncode}: {run.stdout}{run.stderr}")
        return time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_common_flags(parser, default_rounds=7)
    add_sizes(parser, LlamaSizes, "of the model and the batch")
    arguments = parse_arguments(parser, argv)
    sizes = dataclasses.replace(SIZES, **given_sizes(arguments, LlamaSizes))

    def measure() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder, start_workers(Path(folder)) as workers:
            cost = cost_of_recording(sizes, workers, arguments.rounds)
        # The first of two makes the cache of the data.
        diagnoses = [seconds_of_diagnosis(sizes) for _ in range(2)]
        spread = Spread(*(cost["ratio"][key] for key in ("min", "median", "max")))
        print(f"recorded / plain step: {spread.median:.2f} ({spread.min:.2f} to {spread.max:.2f}); goal: at most 2")
        print(f"recorded bytes a rank and step: {cost['bytes_per_step']:,}; goal: at most {256 << 20:,} in all")
        print(f"whole diagnosis: {diagnoses[1]:.1f} s, {diagnoses[0]:.1f} s with the tokenizer; goal: under 60 s")
        return {"sizes": dataclasses.asdict(sizes), "recording": cost, "diagnosis_seconds": diagnoses}

    return run_benchmark("doctor", arguments, measure)


if __name__ == "__main__":
    sys.exit(main())
