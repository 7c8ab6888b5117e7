"""The losses on the GPU against fp64 on the CPU: dtypes, options, strides, vocabularies that divide nothing."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardwise.nn import ColumnLinear
from shardwise.nn.loss.cross_entropy import vocab_parallel_cross_entropy
from shardwise.nn.loss.linear_cross_entropy import vocab_parallel_linear_cross_entropy

pytestmark = pytest.mark.usefixtures("kernels_on_the_device")

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# Of the gradients' largest entries, the result's rounding; and what becomes of a loss, a sum over the vocabulary.
RTOL = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
OPTIONS = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 1e-2},
    "capped": {"softcap": 5.0, "temperature": 0.7},
}


@pytest.fixture
def group():
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def exact(logits, target, label_smoothing=0.0, z_loss=0.0, softcap=None, temperature=1.0):
    """In fp64, from the definition; the target -100 costs nothing."""
    y = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
    normalizer = y.logsumexp(-1)
    size = y.size(-1)
    others = (y.sum(-1) - y.gather(-1, target.clamp(min=0)[..., None])[..., 0]) / max(1, size - 1)
    at_target = y.gather(-1, target.clamp(min=0)[..., None])[..., 0]
    loss = normalizer - (1 - label_smoothing) * at_target - label_smoothing * others + z_loss * normalizer.square()
    return torch.where(target < 0, 0.0, loss)


def assert_near(actual, expected, rtol):
    error = (actual.detach().cpu().double() - expected).abs().max()
    assert error <= rtol * expected.abs().max(), float(error / expected.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_loss_and_its_gradient(group, device, full, dtype, options):
    v, s = (50_257, 64) if full else (37, 5)
    torch.manual_seed(0)
    # Columns of a wider matrix, whose rows begin anywhere.
    wide = (3 * torch.randn(s, 2, v + 3, dtype=torch.float64)).to(dtype)
    target = torch.randint(v, (s, 2))
    target[0, 1] = -100
    given = wide.to(device)[..., 1 : v + 1].detach().requires_grad_()
    # The definition of label smoothing spreads over all other ids; fp64 reads the same rounded logits.
    reference = wide[..., 1 : v + 1].double().requires_grad_()
    expected = exact(reference, target, **options)
    loss = vocab_parallel_cross_entropy(given, target.to(device), group=group, vocab_size=v, **options)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    rtol = RTOL[torch.float64 if dtype == torch.float64 else torch.float32]
    assert_near(loss, expected.detach(), rtol)
    loss.sum().backward()
    expected.sum().backward()
    assert_near(given.grad, reference.grad, RTOL[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_a_wider_dtype_than_their_factors(group, device, full, dtype):
    v, s, h = (50_257, 128, 256) if full else (37, 5, 6)
    torch.manual_seed(0)
    layer = ColumnLinear(h, v, group=group, device=device, dtype=dtype, output_dtype=torch.float32)
    x = torch.randn(s, 2, h, dtype=dtype)
    reference, given = x.double().requires_grad_(), x.to(device).requires_grad_()
    weight, bias = (param.detach().cpu().double().requires_grad_() for param in (layer.weight, layer.bias))
    expected = F.linear(reference, weight, bias)
    output = layer(given)
    assert output.dtype == torch.float32
    assert_near(output, expected.detach(), RTOL[torch.float32])
    incoming = torch.randn(s, 2, v)
    output.backward(incoming.to(device))
    expected.backward(incoming.to(dtype).double())
    for actual, exact_gradient in ((given, reference), (layer.weight, weight), (layer.bias, bias)):
        assert_near(actual.grad, exact_gradient.grad, RTOL[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plan", ["local_logits", "chunked"])
def test_the_loss_with_its_output_layer(group, device, full, dtype, plan):
    v, s, h = (50_257, 128, 256) if full else (37, 5, 6)
    torch.manual_seed(0)
    hidden, weight = (torch.randn(*shape, dtype=torch.float64).to(dtype) for shape in ((s, 2, h), (v, h)))
    weight = weight / h**0.5
    target = torch.randint(v, (s, 2))
    given = [x.to(device, copy=True).requires_grad_() for x in (hidden, weight)]
    reference = [x.to(torch.float64, copy=True).requires_grad_() for x in (hidden, weight)]
    loss = vocab_parallel_linear_cross_entropy(*given, target.to(device), group=group, vocab_size=v, plan=plan)
    loss.sum().backward()
    expected = F.cross_entropy((reference[0] @ reference[1].t()).movedim(-1, 1), target, reduction="none")
    expected.sum().backward()
    # The logits themselves are rounded to the dtype.
    assert_near(loss, expected.detach(), 4 * RTOL[dtype])
    for mine, theirs in zip(given, reference, strict=True):
        assert_near(mine.grad, theirs.grad, 4 * RTOL[dtype])
