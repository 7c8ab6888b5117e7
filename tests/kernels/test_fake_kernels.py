"""Plans allocate what Triton's kernels allocate, and keep on CUDA what the page says."""

from __future__ import annotations

import inspect
from functools import partial

import pytest
import torch
from harness.peaks import LivePeak

from shardwise.kernels import fake_kernels

S, B, D, PER_GROUP, GROUPS = 3, 2, 10, 2, 3


def cases(dtype, random):
    """Names, arguments and options of calls."""
    wide = torch.promote_types(dtype, torch.float32)
    cos, sin = (random(S, 1, 1, 3) for _ in range(2))
    target, numbers = torch.tensor([1, -1, 0, 6]), [torch.rand(4, dtype=wide) for _ in range(4)]
    heads = [random(S, B, number, D) for number in (GROUPS * PER_GROUP, GROUPS, GROUPS)]
    mixed = random(S, B, GROUPS * (PER_GROUP + 2) * D)
    for options in ({}, {"want_sum": True}, {"softcap": 3.0, "temperature": 0.7, "exponentiate_": True}):
        yield "row_statistics", (random(4, 7), target), options
    for given in (numbers, numbers[:3]):
        yield "gradient_", (random(4, 7), random(4, 7), target, *given), {"softcap": 3.0}
    yield "swiglu", (random(S, B, 14),), {}
    yield "swiglu_gradient", (random(S, B, 14), random(S, B, 7)), {}
    for backwards in (False, True):
        yield "rotate", (heads[0], cos, sin, False), {"backwards": backwards}
    yield "split_and_rotate", (mixed, cos, sin, PER_GROUP, D, True), {}
    yield "split_and_rotate_gradient", (*heads, cos, sin, False), {}
    yield "add_rms_norm", (random(S, B, 7), random(S, B, 7), torch.ones(7, dtype=dtype), 1e-5), {}
    scale = torch.rand(S * B, dtype=wide)
    for more, needs_weight in ((None, True), (random(S, B, 7), False)):
        given = (random(S, B, 7), torch.ones(7, dtype=dtype), scale, random(S, B, 7), more)
        yield "add_rms_norm_gradient", given, {"needs_weight": needs_weight}


def contiguous(*shape, dtype):
    return torch.randn(*shape, dtype=dtype)


def transposed(*shape, dtype):
    """Columns that do not lie together."""
    return torch.randn(*shape[::-1], dtype=dtype).permute(*reversed(range(len(shape))))


def parts(*shape, dtype):
    """Rows of a wider tensor."""
    return torch.randn(*shape[:-1], shape[-1] + 3, dtype=dtype)[..., 1:-2]


# Functions in place of PyTorch's kernels, with their own tests.
SEPARATE = ("functions_on_cuda", "attend")


class Unlaunched:
    """In place of a kernel: the function around it allocates, and nothing is computed."""

    def __getitem__(self, grid):
        return lambda *args, **options: None


def made_by(function, args, options):
    """Shapes and dtypes of a call's results, and the most bytes that it makes at one time."""

    def described(result):
        if isinstance(result, tuple):
            return [described(each) for each in result]
        return None if result is None else (result.shape, result.dtype, result.stride(-1))

    with LivePeak() as live:
        live.count(each for each in args if isinstance(each, torch.Tensor))
        before = live.live
        result = function(*args, **options)
    return described(result), live.peak - before


@pytest.mark.parametrize("random", [contiguous, transposed, parts])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_functions_allocate_what_the_kernels_allocate(monkeypatch, random, dtype):
    pytest.importorskip("triton", reason="the kernels need Triton")
    from shardwise.kernels import elementwise_triton, loss_triton, norms_triton

    modules, called = (loss_triton, elementwise_triton, norms_triton), set()
    for module in modules:
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Unlaunched())
    for name, args, options in cases(dtype, partial(random, dtype=dtype)):
        original = next(getattr(module, name) for module in modules if hasattr(module, name))
        found, expected = (made_by(function, args, options) for function in (getattr(fake_kernels, name), original))
        assert found == expected, name
        called.add(name)
    assert fake_kernels._PROGRAMS == norms_triton._PROGRAMS
    functions = inspect.getmembers(fake_kernels, inspect.isfunction)
    assert called == {
        name
        for name, each in functions
        if each.__module__ == fake_kernels.__name__ and name not in SEPARATE and not name.startswith("_")
    }


@pytest.mark.parametrize("has_sums", [False, True])
def test_attention_has_the_results_of_flexible_attention(has_sums):
    """FlexAttention keeps them and its inputs for the backward, as PyTorch's other kernels of attention do."""
    query, key = torch.randn(2, 4, 5, 6, dtype=torch.bfloat16), torch.randn(2, 2, 7, 6, dtype=torch.bfloat16)
    output, sums = fake_kernels.attend(query, key, key, pytest.fail, scale=0.5, has_sums=has_sums)
    assert (output.shape, output.dtype) == (query.shape, query.dtype)
    assert (sums is not None) == has_sums
    if sums is not None:
        assert (sums.shape, sums.dtype) == (query.shape[:3], torch.float32)
