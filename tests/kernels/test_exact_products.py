"""The products of a layer have the same bits whichever ranks hold its parts, by whichever library they are made."""

import pytest
import torch
import torch.nn.functional as F
from harness.parity import assert_bit_equal

from shardwise.core.communication.trees import tree_sum
from shardwise.core.sharding import ParamLayout, local_parts
from shardwise.exact.products import ExactProducts
from shardwise.exact.strategies import ExactActivation
from shardwise.kernels import products
from shardwise.nn.arithmetic import Activation

PARTS = 8


def products_of(layout, rank):
    own = local_parts(layout, rank, PARTS, what="x")
    dim = layout.dim
    return ExactProducts(own, "input" if dim else "output", layout.global_shape[dim], PARTS)


def three(exact, input_, weight, grad_output):
    return (
        exact.linear(input_, weight, None),
        exact.input_gradient(grad_output, weight),
        exact.weight_gradient(grad_output.flatten(0, 1), input_.flatten(0, 1)),
    )


def columns(tensor, layout, rank):
    return torch.cat([tensor[..., start:stop] for start, stop in layout.intervals[rank]], -1)


# The first is for PyTorch's product of many matrices at once, the next has parts of two sizes, the last are large
# enough for oneDNN.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "out_features", "in_features", "split", "sections"),
    [
        (24, 176, 48, "output", 2),
        (24, 48, 176, "input", 1),
        (24, 81, 48, "output", 1),
        (64, 2048, 512, "output", 1),
        (64, 4096, 256, "output", 2),
        (64, 512, 2048, "input", 1),
        # On Intel's processors these have other bits where ranks multiply parts of different sizes at once.
        pytest.param(1024, 320, 384, "output", 1, marks=pytest.mark.slow),
        pytest.param(512, 2048, 1000, "input", 1, marks=pytest.mark.slow),
    ],
)
def test_the_bits_of_one_rank(rows, out_features, in_features, split, sections, dtype):
    input_, grad_output = (torch.randn(rows // 2, 2, n).to(dtype) for n in (in_features, out_features))
    weight, dim = torch.randn(out_features, in_features).to(dtype), 0 if split == "output" else 1
    whole = ParamLayout.split(weight.shape, dim, 1, stride=sections)
    expected = three(products_of(whole, 0), input_, weight, grad_output)
    for found, dense in zip(
        expected,
        (F.linear(input_, weight), grad_output @ weight, grad_output.flatten(0, 1).t() @ input_.flatten(0, 1)),
        strict=True,
    ):
        wide = dense.abs().max().double()
        assert (found - dense).abs().max() <= (1e-5 if dtype == torch.float32 else 3e-2) * wide
    for ranks in (2, 4, 8):
        layout = ParamLayout.split(weight.shape, dim, ranks, stride=sections)
        found = []
        for rank in range(ranks):
            own = (columns(input_, layout, rank), grad_output) if dim else (input_, columns(grad_output, layout, rank))
            found.append(three(products_of(layout, rank), own[0], layout.take(weight, rank).contiguous(), own[1]))
        outputs, input_gradients, weight_gradients = (list(each) for each in zip(*found, strict=True))
        summed, cut, wanted_sum, wanted = (
            (outputs, input_gradients, *expected[:2]) if dim else (input_gradients, outputs, expected[1], expected[0])
        )
        assert_bit_equal(tree_sum(summed), wanted_sum, name=f"the sum on {ranks} ranks")
        for rank, shard in enumerate(cut):
            assert_bit_equal(shard, columns(wanted, layout, rank), name=f"a shard on {ranks} ranks")
        assert_bit_equal(layout.assemble(weight_gradients), expected[2], name=f"the weight gradient on {ranks} ranks")


def test_a_large_part_is_a_product_of_its_own_library(monkeypatch):
    """Which one, follows from the largest part of all ranks, and never from this rank's."""
    calls = []
    monkeypatch.setattr(products, "onednn_linear", lambda left, right, bias: calls.append(1) or F.linear(left, right))
    monkeypatch.setattr(products, "prefers_onednn", lambda left, right, size: calls.append(size) or size >= 1 << 23)
    rows, weight = torch.randn(64, 2048), torch.randn(2048, 512)
    for ranks in (1, 4):
        layout = ParamLayout.split(weight.shape, 0, ranks)
        products_of(layout, 0).input_gradient(rows[:, : 2048 // ranks], weight[: 2048 // ranks])
        assert calls == [64 * 256 * 512] + [1] * (PARTS // ranks)
        calls.clear()


@pytest.mark.parametrize("width", [8, 16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_heads_are_multiplied_alike_on_any_number_of_ranks(dtype, width):
    """PyTorch multiplies few small matrices in bf16 by another kernel than many, and some results differ."""
    activation, heads, length = ExactActivation(), 8, 16

    def multiplied(left, right, grad):
        leaves = [each.clone().requires_grad_() for each in (left, right)]
        product = activation.matmul(leaves[0], leaves[1].transpose(-1, -2))
        return product.detach(), *torch.autograd.grad(product, leaves, grad)

    for seed in range(40):
        torch.manual_seed(seed)
        left, right = (3 * torch.randn(2, 1, heads, length, width)).to(dtype)
        grad = torch.randn(1, heads, length, length).to(dtype)
        whole = multiplied(left, right, grad)
        for own in (1, 2, 4):
            for first in range(0, heads, own):
                part = slice(first, first + own)
                parts = multiplied(*(each[:, part] for each in (left, right, grad)))
                for found, expected in zip(parts, whole, strict=True):
                    assert_bit_equal(found, expected[:, part])


@pytest.mark.parametrize("width", [1, 8, 17, 40, 48, 60, 257])
def test_softmax_has_the_same_bits_on_any_number_of_threads(width):
    """PyTorch's own gradient has other bits on two threads, unless whole vectors make a row."""
    logits, incoming = torch.randn(2, 4096, width)

    def scored(softmax):
        leaf = logits.clone().requires_grad_()
        scores = softmax(leaf)
        return scores.detach(), *torch.autograd.grad(scores, leaf, incoming)

    def on(threads, softmax):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return scored(softmax)
        finally:
            torch.set_num_threads(before)

    exact, plain = ExactActivation().softmax, Activation().softmax
    for found, expected in zip(on(1, exact), on(2, exact), strict=True):
        assert_bit_equal(found, expected)
    for found, expected in zip(on(1, exact), on(1, plain), strict=True):
        torch.testing.assert_close(found, expected)
        if width in (1, 8, 48):
            # Whole vectors, or a single one, have the bits of earlier versions.
            assert_bit_equal(found, expected)
