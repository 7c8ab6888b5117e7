"""Cosines and sines of a sequence from its beginning are computed once for each device and dtype."""

import copy

import pytest
import torch
from harness.parity import assert_bit_equal

from shardwise.kernels.elementwise import rotate
from shardwise.models.transformer.rotary import RotaryEmbedding, RotaryScaling

CPU = torch.device("cpu")


@pytest.mark.parametrize("scaling", [None, RotaryScaling("yarn", 8.0, 16)])
def test_tables_are_what_the_positions_have(scaling):
    rotary = RotaryEmbedding(8, rope_scaling=scaling)
    for count in (5, 9, 3):
        for dtype in (torch.float32, torch.bfloat16):
            for own, expected in zip(rotary.first(count, dtype, CPU), rotary(torch.arange(count), dtype), strict=True):
                assert_bit_equal(own, expected)
    # Of the longest so far.
    assert {cos.size(0) for cos, _ in rotary._tables.values()} == {9}
    assert rotary.first(3, torch.float32, CPU)[0].data_ptr() == rotary.first(9, torch.float32, CPU)[0].data_ptr()
    assert rotary.state_dict() == {}
    copied = copy.deepcopy(rotary)
    assert_bit_equal(copied.first(3, torch.float32, CPU)[1], rotary.first(3, torch.float32, CPU)[1])
    assert rotary.to("meta")._tables == {}


def test_a_model_that_generated_first_can_be_trained():
    rotary = RotaryEmbedding(8)
    with torch.inference_mode():
        rotary.first(4, torch.float32, CPU)
    x = torch.ones(4, 1, 2, 8, requires_grad=True)
    rotate(x, *rotary.first(4, torch.float32, CPU)).sum().backward()
    assert x.grad is not None


def test_a_compiled_program_computes_them_itself():
    rotary = RotaryEmbedding(8)
    compiled = torch.compile(lambda: rotary.first(4, torch.float32, CPU), backend="eager", fullgraph=True)
    assert_bit_equal(compiled()[0], rotary(torch.arange(4), torch.float32)[0])
    assert rotary._tables == {}
