"""Attention to parts of the keys, added together, equals attention to all keys, with both implementations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.parity import assert_close_to
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.kernels import partial_attention
from shardwise.kernels.fake_device import planning_for
from shardwise.kernels.partial_attention import attend_to_part, differentiate_part, merge

RTOL = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}
HEADS, GROUPS, QUERIES, KEYS = 6, 2, 7, 13
PARTS = (slice(0, 4), slice(4, 5), slice(5, 13))


def inputs(dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = (HEADS, QUERIES), (GROUPS, KEYS), (GROUPS, KEYS)
    query, key, value = (torch.randn(2, *each, 5, generator=generator).to(dtype) for each in sizes)
    bias = torch.randn(2, 1, QUERIES, KEYS, generator=generator).to(dtype)
    bias = bias.masked_fill(torch.rand(bias.shape, generator=generator) < 0.3, -torch.inf)
    # Queries that see nothing of a part, and nothing at all.
    bias[0, :, 2, PARTS[2]] = bias[1, :, 4] = -torch.inf
    return [query, key, value], bias, torch.randn(2, HEADS, QUERIES, 5, generator=generator).to(dtype)


def definition(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    key, value = (each.repeat_interleave(HEADS // GROUPS, dim=1) for each in (key, value))
    blind = (bias == -torch.inf).all(dim=-1, keepdim=True)
    scores = query @ key.mT * 0.3 + bias.masked_fill(blind, 0.0)
    return scores.softmax(dim=-1).masked_fill(blind, 0.0) @ value


@pytest.mark.parametrize("dtype", RTOL)
@pytest.mark.parametrize("has_flash", [True, False])
def test_parts_add_up(dtype: torch.dtype, has_flash: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_flash:
        monkeypatch.setattr(partial_attention, "has_flash_for_parts", lambda query: False)
    (query, key, value), bias, gradient = inputs(dtype)
    wide = [each.double().requires_grad_() for each in (query, key, value)]
    expected = definition(*wide, bias.double())
    wanted = torch.autograd.grad(expected, wide, gradient.double())

    def options(part: slice) -> dict[str, object]:
        return {"bias": bias[..., part], "is_causal": False, "scale": 0.3}

    found = [attend_to_part(query, key[:, :, part], value[:, :, part], **options(part)) for part in PARTS]
    output, sums = merge(found)
    assert output.dtype == sums.dtype == torch.promote_types(dtype, torch.float32)
    assert_close_to(output.double(), expected, rtol_of_norm=RTOL[dtype], name="output")
    assert (sums[1, :, 4] == -torch.inf).all()
    output = output.to(dtype)
    each = [
        differentiate_part(gradient, query, key[:, :, part], value[:, :, part], output, sums, **options(part))
        for part in PARTS
    ]
    of_query = sum(dq.double() for dq, _, _ in each)
    for name, actual, other in zip(
        ("query", "key", "value"),
        (of_query, torch.cat([dk for _, dk, _ in each], 2), torch.cat([dv for _, _, dv in each], 2)),
        wanted,
        strict=True,
    ):
        assert_close_to(actual.double(), other, rtol_of_norm=RTOL[dtype], name=name)


@pytest.mark.parametrize("has_flash", [True, False])
def test_a_causal_part(has_flash: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_flash:
        monkeypatch.setattr(partial_attention, "has_flash_for_parts", lambda query: False)
    (query, key, value), _, gradient = inputs(torch.float64)
    key, value = key[:, :, :QUERIES], value[:, :, :QUERIES]
    bias = torch.zeros(1, 1, QUERIES, QUERIES, dtype=torch.float64).masked_fill(
        torch.ones(QUERIES, QUERIES, dtype=torch.bool).triu(1), -torch.inf
    )
    wide = [each.clone().requires_grad_() for each in (query, key, value)]
    expected = definition(*wide, bias)
    output, sums = attend_to_part(query, key, value, bias=None, is_causal=True, scale=0.3)
    assert_close_to(output, expected.detach(), rtol_of_norm=1e-13, name="output")
    actual = differentiate_part(
        gradient, query, key, value, output, sums, bias=None, is_causal=True, scale=0.3
    )  # fmt: skip
    for one, other in zip(actual, torch.autograd.grad(expected, wide, gradient), strict=True):
        assert_close_to(one, other, rtol_of_norm=1e-13)


def test_flash_on_cuda_takes_parts_without_bias() -> None:
    """Its operators are called with tensors that have no values; their results have the right shapes."""
    (query, key, value), bias, _ = inputs(torch.bfloat16)
    tensors = [each.to("meta") for each in (query, key, value)]
    with planning_for("cuda"):
        called = []
        for given in (None, bias.to("meta")):
            with Called() as names:
                output, sums = attend_to_part(*tensors, bias=given, is_causal=False, scale=0.3)
                gradients = differentiate_part(
                    output, *tensors, output, sums, bias=given, is_causal=False, scale=0.3
                )  # fmt: skip
            called.append(any("flash" in name for name in names.found))
            assert output.shape == query.shape
            assert sums.shape == query.shape[:-1]
            assert [each.shape for each in gradients] == [each.shape for each in tensors]
        assert called == [True, False]


class Called(TorchDispatchMode):
    """The names of all operators that run in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(str(func))
        return func(*args, **(kwargs or {}))
