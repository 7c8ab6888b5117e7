"""Rounds and ratios of benchmarks."""

from __future__ import annotations

from common import Ratio, alternating_orders, measure_in_rounds, ratios_of


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
