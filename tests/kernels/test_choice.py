"""Which kernels are chosen, and what is said when they are not the fastest."""

import sys

import pytest
import torch

from shardwise.kernels import choice, loss_reference, main_grad
from shardwise.kernels.choice import choose

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _nothing_is_remembered():
    choice._choose.cache_clear()
    yield
    choice._choose.cache_clear()


def test_a_cpu_has_kernels():
    chosen = choose(torch.device("cpu"), torch.bfloat16)
    assert (chosen.name, chosen.why_not_faster) == ("cpu", None)
    logits, target = torch.randn(3, 5), torch.tensor([0, 4, -1])
    assert torch.equal(chosen.row_statistics(logits, target), loss_reference.row_statistics(logits, target))
    assert choose(torch.device("cpu"), torch.bfloat16) is chosen


def test_an_unknown_device_has_the_reference():
    chosen = choose(torch.device("meta"), torch.bfloat16)
    assert chosen.name == "reference"
    assert chosen.gradient_ is loss_reference.gradient_
    assert chosen.why_not_faster == "there are kernels for CPU and CUDA, none for meta"


@pytest.mark.parametrize("what", ["missing", "broken"])
def test_without_triton_the_reference_runs_and_the_reason_is_told(monkeypatch, what):
    monkeypatch.delitem(sys.modules, "shardwise.kernels.loss_triton", raising=False)
    if what == "missing":
        monkeypatch.setitem(sys.modules, "triton", None)
    else:
        monkeypatch.setitem(sys.modules, "triton", object())
    chosen = choose(CUDA, torch.bfloat16)
    assert chosen.name == "reference"
    assert chosen.why_not_faster.startswith("the triton kernels cannot be imported: ")
    assert ("triton" in chosen.why_not_faster.split(": ", 1)[1]) == (what == "missing")


@pytest.mark.parametrize(
    ("capability", "dtype", "reason"),
    [
        ((9, 0), torch.bfloat16, None),
        ((8, 0), torch.float64, None),
        ((7, 5), torch.float16, "Triton's kernels need compute capability 8.0, and cuda:0 has 7.5"),
        ((9, 0), torch.float8_e4m3fn, "there is no kernel for torch.float8_e4m3fn"),
    ],
)
def test_triton_runs_where_it_can(monkeypatch, capability, dtype, reason):
    pytest.importorskip("triton", reason="the kernels need Triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    chosen = choose(CUDA, dtype)
    assert chosen.why_not_faster == reason
    assert chosen.name == ("triton" if reason is None else "reference")


def test_the_compiler_gets_the_reference(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    chosen = choose(torch.device("cpu"), torch.float32)
    assert chosen.row_statistics is loss_reference.row_statistics
    assert "torch.compile" in chosen.why_not_faster


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float64])
def test_products_are_summed_in_the_wide_type(monkeypatch, out_dtype):
    monkeypatch.setattr(main_grad, "_MIN_ROWS", 3)
    monkeypatch.setattr(main_grad, "_TEMPORARY_ELEMENTS", 1)
    left, right = torch.randn(10, 4).bfloat16(), torch.randn(10, 5).bfloat16()
    before = torch.randn(4, 5, dtype=out_dtype)
    out = before.clone()
    main_grad.add_product_(out, left, right)
    expected = before.double() + left.double().t() @ right.double()
    assert float((out.double() - expected).abs().max()) < 20 * torch.finfo(out_dtype).eps
