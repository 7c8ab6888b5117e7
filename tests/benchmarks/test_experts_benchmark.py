"""The benchmark of experts, at sizes that take moments."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import experts
import pytest
from shared_workers import SharedWorkers, run_script
from steps.expert_steps import EXPERT_VARIANTS, ExpertSizes
from workers import WorkerSpec

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
    specs: list[WorkerSpec] = []
    with monkeypatch.context() as patch:
        patch.setattr(experts, "Workers", specs.extend)
        experts.start_workers(tmp_path)
    file = tmp_path / "result.json"
    words = [str(word) for name, value in SIZES.items() for word in ("--" + name.replace("_", "-"), value)]
    shared = SharedWorkers(specs, tmp_path / "log")
    with shared.workers:
        code = run_script(Path(experts.__file__), [*words, "--rounds", "2", "--json", str(file)], shared, monkeypatch)
    printed = capsys.readouterr()
    assert code == 0, printed.err + shared.log.read_text()
    result = json.loads(file.read_text())
    assert result["sizes"] == dataclasses.asdict(ExpertSizes(**SIZES))
    assert list(result["seconds_per_step"]) == list(EXPERT_VARIANTS)
    assert [(each["numerator"], each["denominator"]) for each in result["ratios"]] == list(experts.RATIOS)
    assert "balanced / dense" in printed.out
