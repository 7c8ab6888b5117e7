"""RMSNorm on a CPU equals PyTorch's, in values and gradients, and saves little."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shardwise.kernels.norms import rms_norm

EPS = 1e-5


def _inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    sizes = (shape, shape[-1:], shape)
    input_, weight, grad = (torch.randn(size, dtype=torch.float64, generator=generator).to(dtype) for size in sizes)
    return input_.requires_grad_(), weight.requires_grad_(), grad


def _is_ours(output: torch.Tensor) -> bool:
    return type(output.grad_fn).__name__ == "_RMSNormBackward"


@pytest.mark.parametrize("shape", [(13, 3, 7), (1,), (5, 1), (257, 101), (2, 3, 4, 5)])
@pytest.mark.parametrize("eps", [EPS, None])
def test_equals_the_formula(shape: tuple[int, ...], eps: float | None) -> None:
    input_, weight, grad = _inputs(shape)
    output = rms_norm(input_, weight, eps)
    assert _is_ours(output)
    exact_eps = torch.finfo(torch.float64).eps if eps is None else eps
    exact = input_ / (input_.square().mean(-1, keepdim=True) + exact_eps).sqrt() * weight
    torch.testing.assert_close(output, exact, rtol=1e-13, atol=1e-14)
    for actual, expected in zip(
        torch.autograd.grad(output, (input_, weight), grad),
        torch.autograd.grad(exact, (input_, weight), grad),
        strict=True,
    ):
        assert (actual - expected).norm() <= 1e-12 * expected.norm() + 1e-14


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e-4, 0.0])
def test_fp32_is_as_near_the_truth_as_pytorch(scale: float) -> None:
    input_, weight, grad = _inputs((256, 8, 128), torch.float32)
    input_ = (input_.detach() * scale).requires_grad_()
    wide = [tensor.detach().double().requires_grad_() for tensor in (input_, weight)]
    exact_output = F.rms_norm(wide[0], (128,), wide[1], EPS)
    exact = (exact_output, *torch.autograd.grad(exact_output, wide, grad.double()))
    errors = []
    for function in (rms_norm, lambda x, w, eps: F.rms_norm(x, w.shape, w, eps)):
        output = function(input_, weight, EPS)
        results = (output, *torch.autograd.grad(output, (input_, weight), grad))
        errors.append([float((a - e).detach().norm()) for a, e in zip(results, exact, strict=True)])
    for ours, theirs, tensor in zip(*errors, exact, strict=True):
        assert ours <= 1.5 * theirs + 1e-9 * float(tensor.detach().norm())


def test_views_and_frozen_parts() -> None:
    input_, weight, grad = _inputs((6, 10))
    view = input_.t()[:, :6].reshape(10, 6).t()[1::2]
    weight = weight[:10]
    output = rms_norm(view, weight, EPS)
    torch.testing.assert_close(output, F.rms_norm(view, (10,), weight, EPS), rtol=1e-13, atol=1e-14)
    # Of another layout in memory than its shape, as what was transposed: so is then what is computed from it.
    across = grad.view(2, 3, 10).permute(1, 0, 2)
    turned = input_.view(2, 3, 10).permute(1, 0, 2)
    gradients, expected = (
        torch.autograd.grad(output, (input_, weight), across)
        for output in (rms_norm(turned, weight, EPS), F.rms_norm(turned, (10,), weight, EPS))
    )
    for actual, exact in zip(gradients, expected, strict=True):
        torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-13)
    frozen = rms_norm(input_, weight.detach(), EPS)
    (only_input,) = torch.autograd.grad(frozen, input_, grad)
    frozen = rms_norm(input_.detach(), weight, EPS)
    (only_weight,) = torch.autograd.grad(frozen, weight, grad)
    both = torch.autograd.grad(rms_norm(input_, weight, EPS), (input_, weight), grad)
    assert torch.equal(only_input, both[0])
    assert torch.equal(only_weight, both[1])


def test_inputs_and_incoming_gradient_are_unmodified_and_the_output_may_be() -> None:
    input_, weight, grad = _inputs((6, 10))
    copies = [tensor.detach().clone() for tensor in (input_, weight, grad)]
    output = rms_norm(input_, weight, EPS)
    # The output is not what the backward needs.
    output.mul_(1.0)
    output.backward(grad)
    for tensor, copy in zip((input_, weight, grad), copies, strict=True):
        assert torch.equal(tensor, copy)


def test_saves_the_input_and_one_number_per_row() -> None:
    input_, weight, _ = _inputs((6, 10))
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.numel()) or tensor, lambda x: x):
        rms_norm(input_, weight, EPS)
    assert sorted(saved) == [6, 10, 60]


def test_gradcheck() -> None:
    input_, weight, _ = _inputs((3, 5))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, EPS), (input_, weight))


def test_what_it_is_not_for_stays_with_pytorch() -> None:
    input_, weight, _ = _inputs((6, 10))
    assert not _is_ours(rms_norm(input_.bfloat16(), weight.bfloat16(), EPS))
    assert rms_norm(input_.bfloat16(), weight.bfloat16(), EPS).dtype == torch.bfloat16
    assert rms_norm(input_[:0], weight, EPS).shape == (0, 10)
    with torch.autocast("cpu", torch.bfloat16):
        assert not _is_ours(rms_norm(input_, weight, EPS))
    with pytest.raises(RuntimeError, match="must match the size"):
        rms_norm(input_, weight[:9], EPS)
