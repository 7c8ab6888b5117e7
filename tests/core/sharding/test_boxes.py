"""Runs of consecutive elements as boxes."""

from __future__ import annotations

import math

import torch
from hypothesis import given, strategies as st

from shardwise.core.sharding import Box, boxes_of_interval


@given(st.lists(st.integers(0, 5), max_size=4), st.integers(0, 700), st.integers(0, 700))
def test_boxes_hold_the_elements_of_the_interval_in_order(shape, first, second):
    total = math.prod(shape)
    start, stop = sorted((first % (total + 1), second % (total + 1)))
    whole = torch.arange(total).view(shape)
    boxes = boxes_of_interval(shape, (start, stop))
    parts = [
        whole[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))].reshape(-1)
        for box in boxes
    ]
    assert torch.equal(torch.cat([torch.empty(0, dtype=torch.int64), *parts]), torch.arange(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_a_box_between_two_indices():
    box = Box((1, 2), (3, 4))
    assert box.narrowed(0, 2, 9) == Box((2, 2), (2, 4))
    assert box.narrowed(1, 0, 3) == Box((1, 2), (3, 1))
    assert box.narrowed(1, 6, 9) is None
