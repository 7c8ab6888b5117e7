"""The loss scale falls at an overflow, rises after many steps without, and gives up with its value."""

import pytest

from shardwise.core.errors import ConfigError, DivergenceError
from shardwise.training.optimizer.mixed_precision import DynamicLossScale


def test_it_falls_and_rises():
    scale = DynamicLossScale(scale=1024.0, growth_interval=3)
    for step in range(2):
        scale.skip_(step)
    assert scale.scale == 256.0
    for _ in range(3):
        scale.keep_()
    assert scale.scale == 512.0
    scale.keep_()
    scale.skip_(6)
    for _ in range(2):
        scale.keep_()
    assert scale.scale == 256.0


def test_it_has_limits():
    scale = DynamicLossScale(scale=2.0**32, growth_interval=1)
    scale.keep_()
    assert scale.scale == 2.0**32
    # A loss times 0 has no gradient, and no doubling would ever end that.
    scale.restore_({"scale": 0, "num_good": 0})
    assert scale.scale == 2.0**-64


def test_it_goes_on_from_a_checkpoint():
    scale = DynamicLossScale(growth_interval=4)
    scale.skip_(0)
    scale.keep_()
    other = DynamicLossScale(growth_interval=4)
    other.restore_(scale.to_json())
    for _ in range(3):
        scale.keep_()
        other.keep_()
    assert other.to_json() == scale.to_json() == {"scale": 65536.0, "num_good": 0, "num_skipped_in_a_row": 0}
    for wrong in (None, {}, {"scale": 1}, scale.to_json() | {"scale": "1"}, scale.to_json() | {"scale": float("nan")}):
        with pytest.raises(ConfigError, match="the loss scale of the checkpoint is"):
            other.restore_(wrong)


def test_overflows_in_a_row_are_counted_on():
    scale, other = DynamicLossScale(most_skipped=4), DynamicLossScale(most_skipped=4)
    for step in range(3):
        scale.skip_(step)
    other.restore_(scale.to_json())
    with pytest.raises(DivergenceError, match="each of the last 4 steps"):
        other.skip_(3)
    # Of a version that did not record it.
    other.restore_({"scale": 2.0, "num_good": 5})
    assert other.to_json() == {"scale": 2.0, "num_good": 5, "num_skipped_in_a_row": 0}


def test_overflows_in_a_row_are_an_error_that_names_the_scale():
    scale = DynamicLossScale(scale=8.0, most_skipped=4)
    for step in range(3):
        scale.skip_(step)
    with pytest.raises(DivergenceError, match="each of the last 4 steps, now at loss scale 1, at step 9"):
        scale.skip_(9)
