"""Products of runs with one matrix each, all at once or one by one, equal a loop in fp64."""

from __future__ import annotations

import pytest
import torch
from harness.parity import assert_close_to
from torch import Tensor

from shardwise.kernels.grouped import grouped_linear, grouped_weight_gradient, why_not_grouped

# A run without rows, and one that is long.
COUNTS = [3, 0, 1, 1000]
RTOL = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-2}


def with_gradients(output: Tensor, grad: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [output.detach(), *torch.autograd.grad(output, inputs, grad)]


@pytest.mark.parametrize("dtype", RTOL)
@pytest.mark.parametrize("with_biases", [False, True])
def test_runs_equal_a_loop(dtype: torch.dtype, with_biases: bool) -> None:
    torch.manual_seed(1)
    sizes = (sum(COUNTS), 16), (len(COUNTS), 24, 16), (len(COUNTS), 24)
    inputs = [torch.randn(size).to(dtype).requires_grad_() for size in sizes[: 3 if with_biases else 2]]
    grad = torch.rand(sizes[0][0], 24).to(dtype)
    assert (why_not_grouped("cpu", dtype, sizes[1][1:]) is None) == (dtype != torch.float64)
    rows, weights, *biases = inputs
    actual = with_gradients(grouped_linear(rows, weights, torch.tensor(COUNTS), *biases), grad, *inputs)
    kept: list[tuple[Tensor, Tensor, Tensor]] = []
    output = grouped_linear(rows, weights, torch.tensor(COUNTS), *biases, delay=lambda *given: kept.append(given))
    others = with_gradients(output, grad, rows, *biases)
    ((input_, grad_output, counts),) = kept
    others.insert(2, grouped_weight_gradient(grad_output, input_, counts))

    wide = [each.detach().double().requires_grad_() for each in inputs]
    products = [run @ weight.T for run, weight in zip(wide[0].split(COUNTS), wide[1], strict=True)]
    if with_biases:
        products = [product + bias for product, bias in zip(products, wide[2], strict=True)]
    expected = with_gradients(torch.cat(products), grad.double(), *wide)
    for name, one, later, other in zip(
        ("output", "input", "weights", "biases"), actual, others, expected, strict=False
    ):
        assert one.dtype == later.dtype == dtype
        assert_close_to(one.double(), other, rtol_of_norm=RTOL[dtype], name=name)
        assert_close_to(later.double(), other, rtol_of_norm=RTOL[dtype], name=f"{name}, delayed")
