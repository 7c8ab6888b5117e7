"""The benchmark of fine-tuning with adapters, at sizes that take moments."""

from __future__ import annotations

import finetune
import pytest
from shared_workers import measured

SIZES = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "ffn_hidden_size": 48,
    "vocab_size": 64,
    "sequence_length": 16,
    "batch_size": 2,
    "num_groups": 2,
    "lora_rank": 3,
    "prompt_length": 9,
}


@pytest.mark.slow
def test_all_sides_train_alike_on_the_same_files(tmp_path, monkeypatch, capsys):
    report, printed = measured(finetune, ["--steps", "1"], SIZES, tmp_path, monkeypatch, capsys)
    assert report["sizes"] == SIZES | {"tie_embeddings": False}
    # They train alike, or there would be no result.
    assert 0 <= report["first_loss_relative_difference"] <= 1e-6
    seconds = report["seconds_per_step"]
    assert list(seconds) == list(finetune.VARIANTS)
    assert all(len(values) == 2 and min(values) > 0 for values in seconds.values())
    assert {(ratio["numerator"], ratio["denominator"]) for ratio in report["ratios"]} == set(finetune.RATIOS)
    assert "tp_plan / ours" in printed
    assert "tokens per second" in printed
