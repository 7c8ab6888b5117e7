"""Run as a program under TRITON_INTERPRET=1: the kernel against its definition, as JSON of what failed.

The ranks are emulated in this process: their buffers lie side by side in its memory, and each rank's kernel is given
all of their addresses, as those of a group are given each other's. A process of its own, since Triton reads the
variable when it is imported.
"""

import torch
from failing_cases import print_failures

from shardwise.core.sharding import balanced_range
from shardwise.kernels import norms_triton
from shardwise.kernels.norms import reduce_norm_

# Sums in another order, and the result's rounding; the interpreter cuts bf16 off where the GPU rounds.
RTOL = {torch.float64: 1e-13, torch.float32: 4e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}


def check(dtype, num_ranks, num_rows, num_columns, *, bias, layer_norm):
    def random(*shape):
        return torch.randn(*shape, dtype=torch.float64).to(dtype)

    residual = random(num_rows, num_columns)
    buffers = [random(num_rows, num_columns) for _ in range(num_ranks)]
    expected_buffers = [buffer.clone() for buffer in buffers]
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
    added, weight = random(num_columns) if bias else None, random(num_columns)
    norm_bias = random(num_columns) if layer_norm else None
    for rank in range(num_ranks):
        start, stop = balanced_range(num_rows, num_ranks, rank)
        own = residual[start:stop].clone()
        arguments = (start, own, added, weight, norm_bias, 1e-5)
        expected = reduce_norm_(expected_buffers, *arguments)
        check_close(norms_triton.reduce_norm_(addresses, *arguments), expected)
        assert torch.equal(own, residual[start:stop])
    for buffer, expected in zip(buffers, expected_buffers, strict=True):
        check_close(buffer, expected)
        # All ranks hold the same bits.
        assert torch.equal(buffer, buffers[0])


def check_close(actual, expected):
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    if actual.numel():
        error = (actual.double() - expected.double()).abs().max()
        assert error <= RTOL[actual.dtype] * expected.double().abs().max().clamp(min=1.0), float(error)


def check_definition():
    """On one rank it is PyTorch's own norm of the sum."""
    buffer, residual, bias, weight, norm_bias = (
        torch.randn(*n, dtype=torch.float64) for n in ((5, 7), (5, 7), (7,), (7,), (7,))
    )
    expected = residual + buffer + bias
    normed = torch.nn.functional.layer_norm(expected, (7,), weight, norm_bias, 1e-5)
    check_close(reduce_norm_([buffer], 0, residual, bias, weight, norm_bias, 1e-5), expected)
    check_close(buffer, normed)
    buffer = expected - residual
    reduce_norm_([buffer], 0, residual, None, weight, None, 1e-5)
    check_close(buffer, torch.nn.functional.rms_norm(expected, (7,), weight, 1e-5))


def named(*sizes, **options):
    return f"{sizes}, {options}", lambda: check(*sizes, **options)


def cases():
    for dtype in RTOL:
        for bias, layer_norm in ((False, False), (True, True)):
            yield named(dtype, 3, 5, 41, bias=bias, layer_norm=layer_norm)
    # Fewer rows than ranks; one column, whole blocks and one more.
    for num_ranks, num_rows, num_columns in ((2, 1, 17), (4, 3, 1), (2, 3, 16), (1, 2, 1025)):
        yield named(torch.float32, num_ranks, num_rows, num_columns, bias=True, layer_norm=num_columns != 16)


def main():
    torch.manual_seed(0)
    print_failures(cases())
    check_definition()


if __name__ == "__main__":
    main()
