"""The benchmark of the loss: which errors it refuses to time, and its goals of memory."""

from __future__ import annotations

import pytest
from loss import check_errors, memory_goals
from losses.problem import LossSizes

from shardwise.core.errors import ParityError


def test_our_gradients_must_be_right_and_others_are_told():
    check_errors({"ours": 1e-7, "dtensor": 1.0}, "logits", "fp32")
    for error in (1e-5, float("nan")):
        with pytest.raises(ParityError, match=rf"fp32 gradients of ours \(the loss of given logits.* by {error:.1e}"):
            check_errors({"ours": error, "dtensor": 1.0}, "logits", "fp32")


def test_memory_goals():
    sizes = LossSizes(num_tokens=2048, vocab_size=128_256, hidden_size=1024)
    # Gradients of 2,048 + 64,128 rows of 1,024 in bf16.
    assert memory_goals("head", "bf16", sizes)["ours_chunked"] == pytest.approx(1.05 * 129.25 + 16)
    assert memory_goals("logits", "bf16", sizes) == {"ours": 1.0}
