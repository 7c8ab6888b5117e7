"""The benchmark of data-parallel wrappers, at sizes that take moments."""

from __future__ import annotations

import json
from pathlib import Path

import data_parallel
import pytest
from shared_workers import SharedWorkers, run_script
from steps.replicas import REPLICA_VARIANTS
from workers import WorkerSpec

SIZES = {
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "ffn_hidden_size": 24,
    "vocab_size": 64,
    "sequence_length": 16,
    "batch_size": 2,
}


@pytest.mark.slow
def test_all_wrappers_train_alike_and_zero_keeps_three_quarters(tmp_path, monkeypatch, capsys):
    specs: list[WorkerSpec] = []
    with monkeypatch.context() as patch:
        patch.setattr(data_parallel, "Workers", specs.extend)
        data_parallel.start_workers(tmp_path)
    file = tmp_path / "result.json"
    words = [str(word) for name, value in SIZES.items() for word in ("--" + name.replace("_", "-"), value)]
    arguments = [*words, "--rounds", "2", "--steps", "1", "--json", str(file), "--variants", *REPLICA_VARIANTS]
    shared = SharedWorkers(specs, tmp_path / "log")
    with shared.workers:
        code = run_script(Path(data_parallel.__file__), arguments, shared, monkeypatch)
    printed = capsys.readouterr()
    assert code == 0, printed.err + shared.log.read_text()
    report = json.loads(file.read_text())
    (result,) = report["sizes"]
    assert result["sizes"] == SIZES | {"tie_embeddings": False}
    # They train alike, or there would be no result.
    assert 0 <= result["first_loss_relative_difference"] <= 1e-6
    held, n = result["bytes_per_rank"], result["num_parameters"]
    # Beside 4 bytes of a step for each tensor, and what aligns parameters.
    for variant, each in {"ddp": 16, "buffers": 16, "zero": 12, "fsdp2": 8}.items():
        assert each * n <= held[variant] <= (each + 0.2) * n
    assert held["zero"] <= 0.76 * held["ddp"]
    seconds = result["seconds_per_step"]
    assert list(seconds) == list(REPLICA_VARIANTS)
    assert all(len(values) == 2 and min(values) > 0 for values in seconds.values())
    assert {(ratio["numerator"], ratio["denominator"]) for ratio in result["ratios"]} == set(data_parallel.RATIOS)
    assert "zero / ddp" in printed.out
