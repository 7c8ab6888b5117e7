"""The compiled elementwise functions equal their formulas, in values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shardwise.kernels import compiled, dispatch
from shardwise.kernels.elementwise import rotate, swiglu
from shardwise.kernels.norms import rms_norm
from shardwise.models.transformer.rotary import RotaryEmbedding


@pytest.fixture(autouse=True)
def always_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    if (reason := compiled.why_not("elementwise_cpu.c")) is not None:
        pytest.skip(reason)
    monkeypatch.setattr(dispatch.ELEMENTWISE, "min_size", 1)


def _randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).requires_grad_()


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().double().requires_grad_()


def _assert_close(actual: torch.Tensor, exact: torch.Tensor, terms: torch.Tensor | None = None) -> None:
    assert actual.shape == exact.shape
    assert actual.dtype == torch.float32
    # A few roundings of fp32, each of the size of what is rounded: of the terms, if they may cancel.
    assert (actual.double() - exact).norm() <= 2e-7 * (exact if terms is None else terms).norm()


def _swiglu(inner: torch.Tensor) -> torch.Tensor:
    gate, up = inner.chunk(2, dim=-1)
    return F.silu(gate) * up


@pytest.mark.parametrize("shape", [(13, 3, 14), (2,), (257, 2), (1, 4098)])
@pytest.mark.parametrize("scale", [1.0, 30.0, 1e-3])
def test_swiglu(shape: tuple[int, ...], scale: float) -> None:
    inner = _randn(*shape, scale=scale)
    copy = inner.detach().clone()
    output = swiglu(inner)
    assert type(output.grad_fn).__name__ == "_SwiGLUBackward"
    wide = _wide(inner)
    exact = _swiglu(wide)
    _assert_close(output, exact)
    # An expanded gradient, as a sum gives it, and one that is not.
    for grad in (torch.ones(()).expand(output.shape), _randn(*output.shape).detach()):
        (actual,) = torch.autograd.grad(output, inner, grad, retain_graph=True)
        (expected,) = torch.autograd.grad(exact, wide, grad.double(), retain_graph=True)
        _assert_close(actual, expected)
    assert torch.equal(inner, copy)


def test_swiglu_of_extreme_gates() -> None:
    gates = torch.tensor([0.0, -0.0, 88.0, -88.0, 1e4, -1e4, torch.inf, torch.nan])
    inner = torch.cat((gates, torch.full_like(gates, 2.0))).requires_grad_()
    output = swiglu(inner)
    # Not even -inf times 0 is in it: exp(-88) times 88 is under the smallest normal number.
    torch.testing.assert_close(output.detach(), _swiglu(inner).detach(), rtol=1e-6, atol=1e-35, equal_nan=True)
    output[:6].sum().backward()
    expected = torch.autograd.grad(_swiglu(inner)[:6].sum(), inner)[0]
    assert inner.grad is not None
    torch.testing.assert_close(inner.grad[:6], expected[:6], rtol=1e-6, atol=1e-35)


@pytest.mark.parametrize(("batch", "heads", "width"), [(1, 1, 2), (3, 7, 10), (2, 5, 64)])
@pytest.mark.parametrize("layout", ["whole", "part", "transposed", "expanded"])
def test_rotary(batch: int, heads: int, width: int, layout: str) -> None:
    sequence = 13
    if layout == "part":
        leaf = _randn(sequence, batch, heads, 3 * width)
        input_ = leaf[..., width : 2 * width]
    elif layout == "transposed":
        leaf = _randn(batch, heads, sequence, width)
        input_ = leaf.permute(2, 0, 1, 3)
    elif layout == "expanded":
        # The strides of batch and head have nothing to do with each other.
        leaf = _randn(sequence, 1, heads, width)
        input_ = leaf.expand(sequence, batch, heads, width)
    else:
        input_ = leaf = _randn(sequence, batch, heads, width)
    embedding = RotaryEmbedding(width)
    rotary = embedding(torch.arange(sequence), torch.float32)
    exact_rotary = embedding(torch.arange(sequence), torch.float64)
    direct = compiled.rotate_halves(input_.detach(), *rotary)
    assert (direct is None) == (layout == "expanded" and batch > 1)
    output = rotate(input_, *rotary)
    wide = _wide(input_)
    exact = rotate(wide, *exact_rotary)
    _assert_close(output, exact)
    grad = _randn(*output.shape).detach()
    (actual,) = torch.autograd.grad(output, input_, grad)
    (expected,) = torch.autograd.grad(exact, wide, grad.double())
    _assert_close(actual, expected)


def test_rotary_of_a_part_of_each_head_is_not_for_it() -> None:
    rotary = RotaryEmbedding(8, rotary_percent=0.5)(torch.arange(5), torch.float32)
    assert compiled.rotate_halves(_randn(5, 1, 2, 8).detach(), *rotary) is None
    # Nor are positions that differ from text to text.
    rotary = RotaryEmbedding(8)(torch.arange(10).view(2, 5), torch.float32)
    assert compiled.rotate_halves(_randn(5, 2, 2, 8).detach(), *rotary) is None


@pytest.mark.parametrize("shape", [(13, 3, 7), (1,), (257, 101), (3, 64), (2, 1030)])
@pytest.mark.parametrize("needs", ["both", "input", "weight"])
def test_rms_norm(shape: tuple[int, ...], needs: str) -> None:
    input_, weight = _randn(*shape), _randn(shape[-1])
    grad = _randn(*shape, scale=2.0).detach()
    # Of no particular layout.
    grad = grad.unsqueeze(-1).repeat(*[1] * len(shape), 2)[..., 0]
    wide = [_wide(input_), _wide(weight)]
    exact = F.rms_norm(wide[0], shape[-1:], wide[1], 1e-5)
    expected = torch.autograd.grad(exact, wide, grad.double())
    chosen = {"both": (0, 1), "input": (0,), "weight": (1,)}[needs]
    arguments = [tensor if k in chosen else tensor.detach() for k, tensor in enumerate((input_, weight))]
    output = rms_norm(*arguments, 1e-5)
    _assert_close(output, exact)
    actual = torch.autograd.grad(output, [arguments[k] for k in chosen], grad)
    terms = grad.double() * wide[1] / (wide[0].square().mean(-1, keepdim=True) + 1e-5).sqrt()
    for k, gradient in zip(chosen, actual, strict=True):
        _assert_close(gradient, expected[k], terms if k == 0 else None)


def test_threads_share_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_MIN_ELEMENTS_PER_THREAD", 10)
    inner, weight = _randn(7, 3, 10), _randn(10)

    def results() -> list[torch.Tensor]:
        rotary = RotaryEmbedding(10)(torch.arange(7), torch.float32)
        outputs = [swiglu(inner), rms_norm(inner, weight, 1e-5), rotate(inner.unsqueeze(2), *rotary)]
        return [*outputs, *(torch.autograd.grad(sum(x.square().sum() for x in outputs), (inner, weight)))]

    alone = results()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    first, second = results(), results()
    for one, of_three, again in zip(alone, first, second, strict=True):
        assert torch.equal(of_three, again)
        torch.testing.assert_close(of_three, one, rtol=1e-6, atol=1e-6)


def test_what_they_are_not_for_stays_with_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_kernel", None)
    inner = _randn(5, 6)
    for other in (inner.double(), inner.bfloat16(), inner[:0], inner.t()[:4].t()):
        assert torch.equal(swiglu(other), _swiglu(other))
    with torch.autocast("cpu", torch.bfloat16):
        swiglu(inner)
    monkeypatch.setattr(compiled, "compile_c", lambda *file: "no compiler")
    assert torch.equal(swiglu(inner), _swiglu(inner))
    monkeypatch.setattr(dispatch.ELEMENTWISE, "min_size", 100)
    assert torch.equal(swiglu(inner), _swiglu(inner))
