"""The benchmark of the doctor, at sizes that take moments."""

from __future__ import annotations

import json
from pathlib import Path

import doctor
import pytest
from shared_workers import SharedWorkers, run_script
from workers import WorkerSpec

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
    specs: list[WorkerSpec] = []
    with monkeypatch.context() as patch:
        patch.setattr(doctor, "Workers", specs.extend)
        doctor.start_workers(tmp_path)
    file = tmp_path / "result.json"
    words = [str(word) for name, value in SIZES.items() for word in ("--" + name.replace("_", "-"), value)]
    shared = SharedWorkers(specs, tmp_path / "log")
    with shared.workers:
        code = run_script(Path(doctor.__file__), [*words, "--rounds", "2", "--json", str(file)], shared, monkeypatch)
    printed = capsys.readouterr()
    assert code == 0, printed.err + shared.log.read_text()
    result = json.loads(file.read_text())
    assert result["sizes"] == SIZES | {"tie_embeddings": False}
    assert len(result["recording"]["ratio"]["per_round"]) == 2
    assert result["recording"]["bytes_per_step"] > 0
    assert len(result["diagnosis_seconds"]) == 2
    assert "recorded / plain step: " in printed.out
