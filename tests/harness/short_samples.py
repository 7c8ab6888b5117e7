"""Shorter samples at the end of runs: with 200 tokens they would take longer than the steps of most tests' runs."""

from __future__ import annotations

import importlib
import sys

NUM_TOKENS = 32
"""More than the length of most tests' models, which read only the last tokens of a longer text."""


def shorten_samples() -> None:
    """Let runs of this process end with a sample of ``NUM_TOKENS``, if it has imported ``shardwise.run``."""
    if "shardwise.run" in sys.modules:
        writer = importlib.import_module("shardwise.run.checkpoint_writer")
        assert writer._SAMPLE_TOKENS >= NUM_TOKENS
        writer._SAMPLE_TOKENS = NUM_TOKENS
