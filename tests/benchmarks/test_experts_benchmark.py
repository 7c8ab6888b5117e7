"""The benchmark of experts, at sizes that take moments."""

from __future__ import annotations

import dataclasses

import experts
import pytest
from shared_workers import measured
from steps.expert_steps import EXPERT_VARIANTS, ExpertSizes

SIZES = {
    "hidden_size": 32,
    "num_layers": 1,
    "num_heads": 4,
    "num_experts": 4,
    "expert_ffn_hidden_size": 16,
    "vocab_size": 320,
    "sequence_length": 16,
    "batch_size": 2,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_losses_are_those_of_transformers_and_steps_are_timed(tmp_path, monkeypatch, capsys):
    result, printed = measured(experts, [], SIZES, tmp_path, monkeypatch, capsys)
    assert result["sizes"] == dataclasses.asdict(ExpertSizes(**SIZES))
    assert list(result["seconds_per_step"]) == list(EXPERT_VARIANTS)
    assert [(each["numerator"], each["denominator"]) for each in result["ratios"]] == list(experts.RATIOS)
    assert "balanced / dense" in printed
