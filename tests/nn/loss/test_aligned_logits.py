"""On CUDA the rows of logits begin at multiples of 16 bytes, however many ids a rank has; results are the same."""

import pytest
import torch
from harness.on_pretended_gpu import StepRecorder, fake_tensors, join
from harness.parity import assert_close_to

from shardwise.kernels import products
from shardwise.nn import ColumnLinear
from shardwise.nn.loss import vocab_parallel_cross_entropy
from shardwise.nn.loss.linear_cross_entropy import vocab_parallel_linear_cross_entropy

N, H, V = 6, 10, 51


@pytest.mark.parametrize(
    ("width", "element_size", "padded"), [(25129, 2, 25136), (25128, 2, 25128), (25129, 4, 25132), (7, 8, 8), (0, 2, 0)]
)
def test_rows_are_padded_to_16_bytes(width, element_size, padded):
    assert products.padded_width(width, element_size) == padded


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("plan", ["local_logits", "chunked"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "softcap": 5.0}])
def test_the_loss_of_padded_rows_is_the_same(group, monkeypatch, plan, options):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(N, H, dtype=torch.float64, generator=generator)
    whole = torch.randn(V, H, dtype=torch.float64, generator=generator)
    target = torch.randint(V, (N,), generator=generator)
    own = whole.tensor_split(group.size())[group.rank()] if group.size() > 1 else whole
    strides, results = [], []

    def in_wide_rows(input_, weight, bias=None):
        output = torch.full((input_.size(0), weight.size(0) + 5), torch.nan, dtype=input_.dtype)[:, : weight.size(0)]
        strides.append(output.stride())
        return products._linear_into(output, input_, weight, bias)

    for pads in (False, True):
        if pads:
            monkeypatch.setattr(products, "linear_in_aligned_rows", in_wide_rows)
        x, weight, bias = (
            tensor.clone().requires_grad_() for tensor in (hidden, own, own[:, 0] if own.numel() else own)
        )
        loss = vocab_parallel_linear_cross_entropy(
            x, weight, target, bias=bias, group=group, vocab_size=V, plan=plan, **options
        )
        weights = torch.linspace(0.5, 1.5, N, dtype=torch.float64)
        results.append([loss.detach(), *torch.autograd.grad((loss * weights).sum(), [x, weight, bias])])
    # All of them went there, by one slice or several.
    assert len(strides) == (1 if plan == "local_logits" else 2)
    for actual, expected in zip(*results, strict=True):
        assert_close_to(actual, expected, rtol_of_norm=1e-13)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("bias", [True, False])
def test_an_output_layer_of_padded_rows_is_the_same(group, monkeypatch, bias):
    layer = ColumnLinear(H, V, bias, group=group, align_rows=True, dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(N, 2, H, dtype=torch.float64, generator=generator, requires_grad=True)
    target = torch.randint(V, (N, 2), generator=generator)
    results = []
    for pads in (False, True):
        monkeypatch.setattr(products, "needs_alignment", lambda *_, pads=pads: pads)
        logits = layer(hidden)
        assert logits.stride(1) == (products.padded_width(logits.size(-1), 8) if pads else logits.size(-1))
        loss = vocab_parallel_cross_entropy(logits, target, group=group, vocab_size=V, inplace_=True)
        params = list(layer.parameters())
        results.append([loss.detach(), *torch.autograd.grad(loss.sum(), [hidden, *params])])
        with torch.no_grad():
            assert layer(hidden).is_contiguous()
    for actual, expected in zip(*results, strict=True):
        assert_close_to(actual, expected, rtol_of_norm=1e-13)


def of_an_odd_vocabulary(plain):
    """The strides of logits, and of what lies in their place, in the products of rank 0 of 2 with 25,129 of the ids."""
    group = join("cuda:fake", world_size=2, rank=0)
    seen = []

    class Products(StepRecorder):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func._schema.name in ("aten::mm", "aten::addmm"):
                named = [*args, *(kwargs or {}).values()]
                wide = [x for x in named if isinstance(x, torch.Tensor) and x.dim() == 2 and 25129 in x.shape]
                seen.extend(max(x.stride()) for x in wide if x.size(0) == 64 or x.size(1) == 64)
            return super().__torch_dispatch__(func, types, args, kwargs)

    with fake_tensors(), Products() as recorder:
        hidden = torch.ones(64, 32, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        weight = torch.ones(25129, 32, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        target = torch.zeros(64, dtype=torch.int64, device="cuda")
        if plain:
            layer = ColumnLinear(32, 50257, False, group=group, own_weight=False, align_rows=True)
            options = {"inplace_": True, "vocab_size": 50257, "validate": False}
            loss = vocab_parallel_cross_entropy(layer(hidden, weight), target, group=group, **options)
        else:
            loss = vocab_parallel_linear_cross_entropy(
                hidden, weight, target, group=group, vocab_size=50257, validate=False
            )
        loss.sum().backward()
    return seen, weight.grad.shape, recorder.waits


@pytest.mark.sample(1)
@pytest.mark.parametrize("plain", [False, True], ids=["fused", "plain"])
def test_products_of_an_odd_vocabulary_lie_aligned(pretended_gpu, plain):
    strides, shape, waits = pretended_gpu(of_an_odd_vocabulary, plain)
    # The logits, the hidden gradient's factor, the weight gradient's.
    assert strides == [25136] * 3
    assert tuple(shape) == (25129, 32)
    assert waits == {}
