"""The benchmark of exact runs, at sizes that take moments."""

from __future__ import annotations

import exact
import pytest
from shared_workers import measured
from steps.exact_steps import EXACT_VARIANTS

from shardwise.cli.arguments import parse_command
from shardwise.cli.trainings import TrainArguments

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
def test_the_cost_is_measured_where_bits_are_the_same(tmp_path, monkeypatch, capsys):
    arguments = ["--model", "llama", "--steps", "1"]
    results, printed = measured(exact, arguments, SIZES, tmp_path, monkeypatch, capsys)
    result = results["llama"]
    assert result["sizes"] == SIZES | {"tie_embeddings": False}
    assert exact.GOALS.keys() == exact.STEPS.keys() == exact.MODELS.keys()
    for place in exact.PLACES:
        assert result["check_seconds"][place] > 0
        seconds = result[place]["seconds_per_step"]
        assert list(seconds) == list(EXACT_VARIANTS)
        assert all(len(values) == 2 and min(values) > 0 for values in seconds.values())
        assert [(r["numerator"], r["denominator"]) for r in result[place]["ratios"]] == list(exact.RATIOS)
    assert "tp 2: exact / plain" in printed


@pytest.mark.parametrize("name", exact.RUNS)
def test_what_is_to_be_proved_can_be_run(name):
    layouts = [layout for layout in exact.LAYOUTS if name != "demo" or exact.fits_the_demo(layout)]
    assert len(layouts) == len(set(layouts)) >= 13
    for ranks, flags in layouts:
        argv = f"{exact.COMMON} {exact.RUNS[name]} {flags} --exact --nproc {ranks}".split()
        parse_command(TrainArguments, argv, "train").check_world(ranks)
