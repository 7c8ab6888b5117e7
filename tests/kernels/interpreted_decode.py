"""Run as a program under TRITON_INTERPRET=1: attention to a cache against its definition, as JSON of what failed.

A process of its own, since Triton reads the variable when it is imported.
"""

import numpy
import torch
import torch.nn.functional as F
import triton.language as tl
from failing_cases import print_failures
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from shardwise.kernels import decode_attention_triton, dispatch
from shardwise.kernels.decode_attention import attend_to_cache

RTOL = {torch.float32: 4e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}


def inputs(b, groups, per_group, capacity, d, dtype):
    query = torch.randn(b, groups * per_group, 1, d).to(dtype)
    # As the layers of a cache lie, with what was never written.
    keys, values = torch.full((2, b, groups, capacity, d), torch.nan, dtype=dtype)
    return query, keys, values


def check(dtype, sizes, positions, **options):
    query, keys, values = inputs(*sizes, dtype)
    for position in positions:
        keys[:, :, : position + 1] = torch.randn_like(keys[:, :, : position + 1], dtype=torch.float32).to(dtype)
        values[:, :, : position + 1] = torch.randn_like(keys[:, :, : position + 1], dtype=torch.float32).to(dtype)
        where = torch.tensor([position])
        dispatch.DECODE_TRITON.device_type = "cuda"
        wide = (query.double(), keys.double(), values.double())
        expected = attend_to_cache(*wide, where, **options)
        dispatch.DECODE_TRITON.device_type = "cpu"
        assert dispatch.DECODE_TRITON.runs(query, keys, values)
        actual = attend_to_cache(query, keys, values, where, **options)
        assert (actual.dtype, actual.shape) == (dtype, query.shape)
        error = float((actual.double() - expected).abs().max())
        assert error <= RTOL[dtype] * float(expected.abs().max()), (position, error)


def check_definition():
    """It is PyTorch's attention to what is filled."""
    query, keys, values = inputs(2, 3, 2, 20, 6, torch.float64)
    keys[:, :, :8], values[:, :, :8] = torch.randn(2, 2, 3, 8, 6, dtype=torch.float64)
    actual = attend_to_cache(query, keys, values, torch.tensor([7]), scale=0.3)
    filled = keys[:, :, :8], values[:, :, :8]
    expected = F.scaled_dot_product_attention(query, *filled, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)
    sinks = torch.randn(6, dtype=torch.float64)
    actual = attend_to_cache(query, keys, values, torch.tensor([7]), scale=0.3, sinks=sinks)
    scores = (query @ filled[0].repeat_interleave(2, 1).transpose(-1, -2)) * 0.3
    weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + sinks.exp().view(6, 1, 1))
    expected = weights @ filled[1].repeat_interleave(2, 1)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)


def cases():
    for dtype in RTOL:
        yield f"{dtype}", lambda d=dtype: check(d, (2, 2, 3, 100, 20), (0, 31, 32, 99), scale=0.3)
    others = {"slopes": torch.tensor([0.5, 0.1, 0.02, 0.3])}, {"sinks": torch.tensor([-3.0, 0.0, 2.0, 100.0])}
    for options in ({"before": 0}, {"before": 40}, {"softcap": 2.0}, *others):
        yield f"{options}", lambda o=options: check(torch.float32, (1, 2, 2, 130, 16), (5, 129), scale=1.0, **o)
    yield "definition", check_definition


def multiply_bf16_in_fp32():
    """The interpreter keeps bf16 as the integers of its bits, and would multiply those."""
    dot = InterpreterBuilder.create_dot

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(numpy.uint32) << 16).view(numpy.float32), tl.float32)

    InterpreterBuilder.create_dot = lambda self, a, b, *rest: dot(self, widened(a), widened(b), *rest)


def main():
    torch.manual_seed(0)
    multiply_bf16_in_fp32()
    dispatch.DECODE_TRITON.missing = lambda call: None
    # Some of them without keys, and few for the interpreter.
    decode_attention_triton._MAX_SPLITS = 8
    print_failures(cases())


if __name__ == "__main__":
    main()
