"""What is computed alike at any number of threads, in sizes that PyTorch's threads share."""

from __future__ import annotations

import pytest
import torch
from harness.parity import assert_bit_equal

from shardwise.core.communication.trees import deterministic_sum
from shardwise.kernels.loss_reference import row_statistics


@pytest.fixture
def at_threads():
    """A function that computes with one thread, two and five."""
    before = torch.get_num_threads()

    def results(function):
        found = []
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            found.append(function())
        return found

    yield results
    torch.set_num_threads(before)


def assert_all_equal(results):
    for other in results[1:]:
        assert_bit_equal(other, results[0])


def test_a_sum_of_all_elements(at_threads):
    numbers = torch.randn(3, 85_333, generator=torch.Generator().manual_seed(0))
    found = at_threads(lambda: deterministic_sum(numbers))
    assert_all_equal(found)
    torch.testing.assert_close(found[0].double(), numbers.double().sum(), rtol=1e-5, atol=1e-3)
    assert_all_equal(at_threads(lambda: deterministic_sum(numbers, torch.float64)))
    plain = at_threads(numbers.sum)
    assert any(not torch.equal(other, plain[0]) for other in plain), "PyTorch's own sum would do"


@pytest.mark.parametrize("columns", [140_001, 3])
def test_statistics_of_a_row_longer_than_a_block(at_threads, columns):
    logits = torch.randn(2, columns, generator=torch.Generator().manual_seed(1)) * 4
    target = torch.tensor([columns - 1, -1])
    found = at_threads(lambda: row_statistics(logits.clone(), target, want_sum=True))
    assert_all_equal(found)
    torch.testing.assert_close(found[0][:, 1].log() + found[0][:, 0], logits.logsumexp(1))
