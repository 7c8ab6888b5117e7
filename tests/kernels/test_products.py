"""The matrix products of a linear layer, whichever library computes them, equal PyTorch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from harness.operators import Operators
from torch._subclasses import FakeTensorMode

from shardwise.core.errors import ConfigError
from shardwise.kernels import host_memory, products

# n, i, o, and how many of the forward's, input gradient's and weight gradient's products oneDNN computes; dividing
# nothing.
SHAPES = [
    (131, 257, 301, (2, 1, 0)),
    (1, 3001, 3011, (2, 1, 0)),
    # The output alone is 34 MiB; then the weight gradient is narrow.
    pytest.param(64, 1, 140_001, (0, 1, 0), marks=pytest.mark.slow),
    pytest.param(4099, 67, 2051, (0, 1, 1), marks=pytest.mark.slow),
    (140, 67, 12_289, (2, 1, 1)),
    # Its temporary would be too large.
    (14, 67, 22_289, (2, 1, 0)),
    # Large, but a sum of many terms.
    pytest.param(4099, 513, 2051, (2, 1, 0), marks=pytest.mark.slow),
]


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the products that oneDNN computed."""
    calls: list[int] = []
    original = products.onednn_linear

    def counted(input_, weight, bias):
        calls.append(input_.numel() * weight.size(0))
        return original(input_, weight, bias)

    monkeypatch.setattr(products, "onednn_linear", counted)
    return calls


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN, on whichever processor these tests run."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this PyTorch was built without oneDNN")
    monkeypatch.setattr(products, "why_not_onednn", lambda: None)


def _matrices(n: int, i: int, o: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((n, i), (o, i), (n, o), (o,))
    return tuple(torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes)


def _assert_close(actual: torch.Tensor, exact: torch.Tensor, num_terms: int) -> None:
    assert actual.is_contiguous()
    assert actual.shape == exact.shape
    # fp32 sums of normal products: their error grows with the root of the number of terms.
    assert (actual.double() - exact).abs().max() < 8e-7 * num_terms**0.5 * exact.std().clamp(min=1.0)


@pytest.mark.usefixtures("onednn")
@pytest.mark.parametrize(("n", "i", "o", "by_onednn"), SHAPES)
def test_products_equal_the_exact_ones(used: list[int], n: int, i: int, o: int, by_onednn: tuple[int, ...]) -> None:
    x, weight, grad, bias = _matrices(n, i, o, torch.float32)
    copies = [tensor.clone() for tensor in (x, weight, grad, bias)]
    wide_x, wide_weight, wide_grad, wide_bias = (tensor.double() for tensor in (x, weight, grad, bias))
    with torch.no_grad():
        _assert_close(products.linear(x, weight), F.linear(wide_x, wide_weight), i)
        _assert_close(
            products.linear(x.unsqueeze(1), weight, bias), F.linear(wide_x, wide_weight, wide_bias).unsqueeze(1), i
        )
    assert len(used) == by_onednn[0]
    _assert_close(products.input_gradient(grad, weight), wide_grad @ wide_weight, o)
    _assert_close(products.weight_gradient(grad, x), wide_grad.t() @ wide_x, n)
    assert used == [n * i * o] * sum(by_onednn)
    for tensor, copy in zip((x, weight, grad, bias), copies, strict=True):
        assert torch.equal(tensor, copy)


@pytest.mark.usefixtures("onednn")
def test_views_are_multiplied_as_their_copies(used: list[int]) -> None:
    x, weight, grad, _ = _matrices(140, 260, 300, torch.float32)
    half, part = x[::2], weight[:, 1:257]
    with torch.no_grad():
        _assert_close(
            products.linear(half[:, :256].repeat(2, 1), part),
            x[::2, :256].repeat(2, 1).double() @ part.t().double(),
            256,
        )
    exact = grad[:, :250].double() @ weight[:250].double()
    _assert_close(products.input_gradient(grad[:, :250], weight[:250]), exact, 250)
    _assert_close(products.weight_gradient(grad[:, 3:], x), grad[:, 3:].t().double() @ x.double(), 140)
    # Not oneDNN: for what lies neither by rows nor by columns it may be a thousand times slower.
    assert used == []
    with torch.no_grad():
        _assert_close(products.linear(x, weight[7:]), x.double() @ weight[7:].t().double(), 260)
    assert len(used) == 1


@pytest.mark.usefixtures("onednn")
def test_what_onednn_is_not_for_stays_with_pytorch(used: list[int]) -> None:
    x, weight, grad, _ = _matrices(140, 260, 300, torch.float64)
    assert torch.equal(products.weight_gradient(grad, x), grad.t() @ x)
    small = torch.ones(8, 8)
    assert torch.equal(products.input_gradient(small, small), small @ small)
    x, weight = x.float(), weight.float().requires_grad_()
    # Autograd knows no derivative of oneDNN's operator.
    products.linear(x, weight).sum().backward()
    assert weight.grad is not None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert products.linear(x, weight).dtype == torch.bfloat16
    assert used == []


def test_a_large_weight_gradient_lies_in_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    advised: list[tuple[int, int, int]] = []
    monkeypatch.setattr(host_memory, "_c_function", lambda *_: lambda *call: advised.append(call) or 0)
    grad, x = torch.ones(3, 3000), torch.full((3, 1500), 2.0)
    gradient = products.weight_gradient(grad, x)
    ((start, length, _),) = advised
    assert start % (2 << 20) == 0
    assert gradient.data_ptr() <= start
    assert gradient.data_ptr() + gradient.nbytes - (2 << 20) < start + length <= gradient.data_ptr() + gradient.nbytes
    assert bool((gradient == 6.0).all())
    products.weight_gradient(grad[:, :300], x)
    assert len(advised) == 1


@pytest.mark.parametrize("biased", [False, True])
def test_a_large_output_lies_in_huge_pages(biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    advised: list[int] = []
    monkeypatch.setattr(host_memory, "_c_function", lambda *_: lambda *call: advised.append(call[1]) or 0)
    x, weight = torch.ones(3, 5, 2), torch.full((600_001, 2), 3.0)
    bias = torch.full((600_001,), 0.5) if biased else None
    with torch.no_grad():
        output = products.linear(x, weight, bias)
    assert output.shape == (3, 5, 600_001)
    assert bool((output == (6.5 if biased else 6.0)).all())
    assert sum(advised) > output.nbytes - (4 << 20)
    with torch.no_grad():
        products.linear(x, weight[:400_000], None)
        # Recorded by autograd, which takes no output tensor.
        torch.set_grad_enabled(True)
        assert products.linear(x, weight.requires_grad_(), bias).requires_grad
    assert len(advised) == 1


def test_a_switch_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_ONEDNN", "0")
    assert products.why_not_onednn.__wrapped__() == "SHARDWISE_ONEDNN is 0"
    monkeypatch.setenv("SHARDWISE_ONEDNN", "maybe")
    with pytest.raises(ConfigError, match="SHARDWISE_ONEDNN=maybe, which must be 0 or 1"):
        products.why_not_onednn.__wrapped__()


def test_the_reason_names_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_vendor", lambda: "GenuineIntel")
    assert "AMD" in (products.why_not_onednn.__wrapped__() or "")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_wide_output_of_narrow_factors(dtype):
    x, weight, _, bias = (matrix.to(dtype) for matrix in _matrices(6, 37, 13, torch.float32))
    exact = F.linear(x.double(), weight.double(), bias.double())
    output = products.ProductsIn(torch.float32).linear(x.view(3, 2, 37), weight, bias)
    assert (output.dtype, output.shape) == (torch.float32, (3, 2, 13))
    _assert_close(output.view(6, 13), exact, 37)
    # On CUDA one operator multiplies, and neither factor is widened.
    with FakeTensorMode(), Operators() as operators, torch.no_grad():
        x, weight, bias = (torch.empty(shape, device="cuda", dtype=dtype) for shape in ((3, 2, 37), (13, 37), (13,)))
        output = products.ProductsIn(torch.float32).linear(x, weight, bias)
    assert (output.dtype, output.shape, output.device.type) == (torch.float32, (3, 2, 13), "cuda")
    assert "aten::mm.dtype" in operators.names
    assert "aten::_to_copy" not in operators.names
