"""Rounds and ratios of benchmarks."""

from __future__ import annotations

import json

import pytest
from common import Ratio, alternating_orders, format_table, machine_facts, measure_in_rounds, ratios_of, write_json


def test_orders_alternate():
    assert list(alternating_orders(["a", "b", "c"], 3)) == [("a", "b", "c"), ("c", "b", "a"), ("a", "b", "c")]


def test_warm_up_rounds_do_not_count():
    calls: list[str] = []

    def measure(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    values = measure_in_rounds(["a", "b"], measure, num_rounds=2, num_warmup_rounds=1)

    assert "".join(calls) == "abbaab"
    assert values == {"a": [4.0, 5.0], "b": [3.0, 6.0]}


def test_ratios_are_taken_within_a_round():
    # The second round was twice as slow for both, which no ratio sees.
    ratios = ratios_of({"a": [1.0, 2.0, 3.0], "b": [2.0, 4.0, 3.0]}, [("a", "b"), ("a", "missing")])
    assert ratios == [Ratio("a", "b", [0.5, 0.5, 1.0])]
    assert ratios[0].to_json() == {
        "numerator": "a",
        "denominator": "b",
        "per_round": [0.5, 0.5, 1.0],
        "min": 0.5,
        "median": 0.5,
        "max": 1.0,
    }


def test_table_aligns_its_columns():
    assert (
        format_table(("name", "ms"), [("a", "10.0"), ("longer", "1.0")]) == "name      ms\na       10.0\nlonger   1.0"
    )


def test_machine_facts_are_json(tmp_path):
    write_json(tmp_path / "facts.json", machine_facts())
    assert json.loads((tmp_path / "facts.json").read_text()).keys() >= {"processor", "usable_cores", "torch", "python"}


def test_json_refuses_nan(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "result.json", {"seconds": float("nan")})
    assert not (tmp_path / "result.json").exists()
