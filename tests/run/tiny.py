"""A run small enough for tests: real text, a few thousand weights."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from shardwise.core.atomic_files import write_atomically
from shardwise.run.settings import (
    CorpusSettings,
    ModelSettings,
    OptimizerSettings,
    ParallelSettings,
    Settings,
    TrainingSettings,
)


def tiny_settings(
    folder: Path,
    *,
    tp: int = 1,
    sequence_parallel: bool = False,
    zero: int = 0,
    resume: str = "never",
    model: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    **training: Any,
) -> Settings:
    """Settings of a run into ``folder/run`` on the source of a module of the standard library."""
    text = folder / "text.txt"
    if not text.exists():
        # Every rank does it, and none must find the file of another half written.
        write_atomically(text, lambda file: file.write(Path(argparse.__file__).read_bytes()))
    sizes = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_heads": 4,
        "ffn_hidden_size": 44,
        "vocab_size": 301,
        "sequence_length": 24,
    }
    return Settings(
        data=(str(text),),
        out=str(folder / "run"),
        resume=resume,
        device="cpu",
        model=ModelSettings(**(sizes | (model or {}))),
        parallel=ParallelSettings(tp=tp, sequence_parallel=sequence_parallel, zero=zero),
        optimizer=OptimizerSettings(**({"learning_rate": 1e-2, "warmup_steps": 3} | (optimizer or {}))),
        training=TrainingSettings(**({"steps": 8, "global_batch_size": 4, "eval_every": 0} | training)),
        corpus=CorpusSettings(held_out_fraction=0.05),
    )
