"""The benchmark of long samples, at sizes that take moments."""

from __future__ import annotations

import dataclasses

import context
import pytest
from shared_workers import measured
from steps.context_steps import PACKED_VARIANTS, WAYS, ContextSizes

SIZES = {
    "hidden_size": 32,
    "num_layers": 1,
    "num_heads": 4,
    "num_groups": 2,
    "vocab_size": 320,
    "sequence_length": 24,
    "packed_length": 32,
    "num_documents": 4,
}


@pytest.mark.slow
def test_losses_are_those_of_one_process_and_steps_are_timed(tmp_path, monkeypatch, capsys):
    result, printed = measured(context, [], SIZES, tmp_path, monkeypatch, capsys)
    assert result["sizes"] == dataclasses.asdict(ContextSizes(**SIZES))
    assert list(result["seconds_per_step"]) == [*WAYS, "single", *PACKED_VARIANTS]
    assert [(each["numerator"], each["denominator"]) for each in result["ratios"]] == list(context.RATIOS)
    assert "packed / dense mask" in printed
