"""The learning rate of each step follows the schedule."""

import math

import pytest

from shardwise.core.errors import ConfigError
from shardwise.training.step_settings import OptimizerSettings


def rate(step, *, steps=100, warmup_steps=10, highest=2.0, final_ratio=0.1, **options):
    options |= {"learning_rate": highest, "warmup_steps": warmup_steps, "final_learning_rate_ratio": final_ratio}
    return OptimizerSettings(**options).learning_rate_at(step, steps)


def test_learning_rate_at_its_corners():
    assert rate(0) == pytest.approx(0.2)
    assert rate(8) == pytest.approx(1.8)
    assert rate(9) == 2.0
    # Half-way down: the middle of highest and final.
    assert rate(54) == pytest.approx((2.0 + 0.2) / 2)
    assert rate(99) == pytest.approx(0.2)
    assert rate(98) > rate(99)
    assert rate(1000) == pytest.approx(0.2)
    rates = [rate(step) for step in range(100)]
    assert rates[:10] == sorted(rates[:10])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    # A cosine, not a line.
    assert rate(9 + 30) == pytest.approx(2.0 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 3))))


@pytest.mark.parametrize(
    ("step", "options", "expected"),
    [
        (0, {"warmup_steps": 0}, 2.0 * (0.1 + 0.45 * (1 + math.cos(math.pi / 100)))),
        (99, {"warmup_steps": 0}, 0.2),
        (0, {"warmup_steps": 0, "steps": 1}, 0.2),
        (0, {"warmup_steps": 1, "steps": 1}, 2.0),
        (99, {"warmup_steps": 100}, 2.0),
        (99, {"warmup_steps": 200}, 1.0),
        (100, {"warmup_steps": 100}, 0.2),
        (50, {"final_ratio": 1.0}, 2.0),
        (99, {"final_ratio": 0.0}, 0.0),
    ],
)
def test_learning_rate_of_short_and_odd_plans(step, options, expected):
    assert rate(step, **options) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("schedule", "options", "expected"),
    [
        ("constant", {}, {0: 0.2, 9: 2.0, 10: 2.0, 99: 2.0}),
        ("linear", {}, {0: 0.2, 9: 2.0, 10: 1.98, 54: 1.1, 99: 0.2}),
        ("wsd", {}, {0: 0.2, 9: 2.0, 79: 2.0, 80: 1.91, 89: 1.1, 99: 0.2}),
        ("wsd", {"decay_share": 1.0}, {9: 2.0, 10: 1.98, 54: 1.1, 99: 0.2}),
        ("wsd", {"decay_share": 0.0}, {9: 2.0, 99: 2.0}),
        ("wsd", {"decay_share": 0.1, "final_ratio": 0.0, "warmup_steps": 0}, {0: 2.0, 89: 2.0, 94: 1.0, 99: 0.0}),
        # The warm-up takes what the decay would have had.
        ("wsd", {"decay_share": 0.5, "warmup_steps": 60}, {59: 2.0, 79: 1.1, 99: 0.2}),
        ("linear", {"warmup_steps": 100}, {99: 2.0}),
    ],
)
def test_schedules_at_chosen_steps(schedule, options, expected):
    assert {step: rate(step, schedule=schedule, **options) for step in expected} == pytest.approx(expected, abs=1e-15)


def test_the_settings_choose_the_schedule():
    settings = OptimizerSettings(learning_rate=2.0, warmup_steps=10, schedule="wsd", decay_share=0.1)
    assert settings.learning_rate_at(94, 100) == pytest.approx(1.1)
    assert OptimizerSettings(learning_rate=2.0, schedule="wsd").learning_rate_at(79, 100) == 2.0
    for schedule in ("constant", "linear", "cosine"):
        settings = OptimizerSettings(learning_rate=2.0, warmup_steps=10, schedule=schedule)
        assert settings.learning_rate_at(30, 100) == rate(30, schedule=schedule)
        with pytest.raises(
            ConfigError, match=f"decay-share 0.1 is for --optimizer.schedule wsd, and it is '{schedule}'"
        ):
            OptimizerSettings(schedule=schedule, decay_share=0.1)
    with pytest.raises(ConfigError, match=r"optimizer\.schedule is 'wds'; it must be one of 'constant', 'linear'"):
        OptimizerSettings(schedule="wds")
