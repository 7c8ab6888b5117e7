"""The benchmark of the doctor, at sizes that take moments."""

from __future__ import annotations

import doctor_cost
import pytest
from shared_workers import measured

SIZES = {
    "hidden_size": 64,
    "num_layers": 1,
    "num_heads": 8,
    "ffn_hidden_size": 64,
    "vocab_size": 320,
    "sequence_length": 16,
    "batch_size": 8,
}


@pytest.mark.slow
def test_what_it_measures(tmp_path, monkeypatch, capsys):
    result, printed = measured(doctor_cost, [], SIZES, tmp_path, monkeypatch, capsys)
    assert result["sizes"] == SIZES | {"tie_embeddings": False}
    assert len(result["recording"]["ratio"]["per_round"]) == 2
    assert result["recording"]["bytes_per_step"] > 0
    assert len(result["diagnosis_seconds"]) == 2
    assert "recorded / plain step: " in printed
