"""Runs of a tiny model by the command line, at any layout, whose results a test compares."""

from __future__ import annotations

from pathlib import Path

from run.run_processes import run_command

# It never changes: with other data, a choice of experts may be nearly tied, and rounding decide it.
TEXT = Path(__file__).with_name("english.txt")


def sizes(sequence_length: int, *more: str) -> tuple[str, ...]:
    """Arguments of a model and of six steps, with a checkpoint after three."""
    return (
        *("--model.num-layers", "2", "--model.hidden-size", "32", "--model.num-heads", "4", "--device", "cpu"),
        *("--model.sequence-length", str(sequence_length), "--model.vocab-size", "301"),
        *("--training.global-batch-size", "4", "--training.steps", "6", "--training.save-every", "3"),
        *("--training.keep-checkpoints", "9", *more),
    )


def run(folder: Path, *arguments: str) -> str:
    """Run ``shardwise ARGUMENTS`` on as many ranks as ``--nproc`` says, to its end, and return its output."""
    words, ranks = list(arguments), 1
    if "--nproc" in words:
        place = words.index("--nproc")
        ranks = int(words[place + 1])
        del words[place : place + 2]
    return run_command(folder, ranks, *words)[0]


def train(folder: Path, name: str, *arguments: str) -> Path:
    """Train on this project's README, and return the run's folder, ``folder/name``."""
    run(folder, "train", "--data", str(TEXT), "--out", str(folder / name), *arguments)
    return folder / name
