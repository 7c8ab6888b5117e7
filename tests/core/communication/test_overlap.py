"""What is gathered and summed part by part, against the collectives that do it at once: the same bits, and in time."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from harness.parity import assert_bit_equal, assert_unmodified
from harness.watchdog import wait_until
from torch.distributed import _symmetric_memory

from shardwise.core.communication import overlap, symmetric_memory
from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.communication.collectives import all_gather, reduce_scatter
from shardwise.core.communication.context import GlobalMemoryBuffer, context_of, validated_calls
from shardwise.core.communication.overlap import PASSES, OverlapMethod, choose_overlap, overlap_methods
from shardwise.core.communication.trees import sum_in_parts
from shardwise.core.errors import DesyncError, ShardingError
from shardwise.core.sharding import balanced_sizes
from shardwise.nn import ColumnLinear, RowLinear

CPU = torch.device("cpu")


def same(rows, out):
    """The product by 1: what is moved is seen to the bit."""
    return rows.clone() if out is None else out.copy_(rows)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_bits_of_the_collectives(group, dtype):
    t, rank = group.size(), group.rank()
    # Sizes that all ranks share alike, that nobody can, of which some get none, and of several chunks of shared memory.
    for shape in [(6 * t, 3), (3 * t + 1, 2, 5), (1, 4), (2 * t + 1, 300_000 if dtype is torch.bfloat16 else 2)]:
        sizes = balanced_sizes(shape[0], t)
        whole = torch.stack([torch.randn(shape) for _ in range(t)]).to(dtype)
        shard = whole[0].split(sizes)[rank].clone()
        buffer = GlobalMemoryBuffer()
        with assert_unmodified(shard, whole), CollectiveCounter() as parts:
            output, gathered = overlap.gather_and_multiply(
                shard, same, shape[-1], group=group, sizes=sizes, buffer=buffer
            )
            summed = overlap.multiply_and_scatter(whole[rank], same, group=group).wait()
        with CollectiveCounter() as at_once:
            expected = all_gather(shard, group=group, sizes=sizes)
            total = reduce_scatter(whole[rank], group=group)
        assert_bit_equal(output, expected)
        assert_bit_equal(gathered, expected)
        assert_bit_equal(summed, total)
        # A collective in parts is one, of as many bytes.
        assert parts.launches == at_once.launches
        alone, nothing = overlap.gather_and_multiply(
            shard, same, shape[-1], group=group, sizes=sizes, needs_whole=False
        )
        assert nothing is None
        assert_bit_equal(alone, expected)


class Noted:
    """A transport that notes what is sent and what is waited for, each step by its number."""

    def __init__(self, transport, note):
        self.transport, self.note = transport, note

    def shift(self, tensor, group, step, counts, out):
        self.note(f"send {step}")
        return NotedPending(self.transport.shift(tensor, group, step, counts, out), step, self.note)


class NotedPending:
    def __init__(self, pending, step, note):
        self.pending, self.step, self.note = pending, step, note

    def wait(self):
        self.note(f"receive {self.step}")
        return self.pending.wait()


# A GPU with one queue starts a product when all that was launched before it has started.
GATHERED = ["send 1", "product", "send 2", "receive 1", "product", "receive 2", "product"]
SUMMED = ["product", "send 1", "product", "send 2", "product", "receive 1", "receive 2"]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("order", [GATHERED, SUMMED], ids=["gathered", "summed"])
def test_a_part_is_multiplied_while_the_next_ones_travel(group, monkeypatch, tmp_path, order):
    """The others send only when rank 0 has done all that needs nothing of them, so that it cannot have waited before.

    What rank 0 gathers it gets when its own part is multiplied; what it sums, when all of its products are made.
    """
    seen, done = [], tmp_path / "rank 0 has multiplied"

    def note(event):
        if group.rank() > 0 and event == "send 1":
            wait_until(done.exists, done.name)
        seen.append(event)
        if group.rank() == 0 and seen.count("product") == (1 if order == GATHERED else 3):
            done.touch()

    def multiply(rows, out):
        result = torch.mm(rows, matrix) if out is None else torch.mm(rows, matrix, out=out)
        note("product")
        return result

    choose = overlap.choose_transport
    monkeypatch.setattr(overlap, "choose_transport", lambda *args: Noted(choose(*args), note))
    matrix = torch.randn(4, 5, dtype=torch.float64)
    if order == GATHERED:
        rows = torch.randn(2, 4, dtype=torch.float64)
        result = overlap.gather_and_multiply(rows, multiply, 5, group=group)[0]
        expected = all_gather(rows, group=group) @ matrix
    else:
        rows = torch.randn(7, 4, dtype=torch.float64)
        result = overlap.multiply_and_scatter(rows, multiply, group=group).wait()
        expected = reduce_scatter(rows @ matrix, group=group)
    assert seen == order
    torch.testing.assert_close(result, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.ranks(2)
def test_disagreement_and_wrong_sizes_are_told(group):
    with pytest.raises(ShardingError, match=r"sizes \[1, 1, 1\] do not fit a shard of 1"):
        overlap.gather_and_multiply(torch.ones(1, 2), same, 2, group=group, sizes=[1, 1, 1])
    with pytest.raises(ShardingError, match=r"7.*\[1, 1\]|\[1, 1\].*7"):
        overlap.multiply_and_scatter(torch.ones(7, 2), same, group=group, sizes=[1, 1])
    own = dist.new_group([0, 1])
    rows = torch.ones(2, 3 + own.rank())
    with validated_calls([own]), pytest.raises(DesyncError):
        overlap.gather_and_multiply(rows, same, rows.size(1), group=own)


@pytest.mark.ranks(2)
def test_the_way_and_why(group, monkeypatch):
    refused = "symmetric memory is memory of CUDA devices, and this is a cpu"
    expected = {pass_: OverlapMethod("parts", refused) for pass_ in PASSES}
    expected["column backward"] = choose_overlap("column backward", group=group, device=CPU)
    assert "weight's gradient" in expected["column backward"].why
    found = overlap_methods(group=group, device=CPU, even=False, column_has_bias=True)
    assert dict(found) == expected

    own = dist.new_group([0, 1])
    cuda = torch.device("cuda", 0)
    context_of(own).symmetric_refusals[cuda] = None
    options = {"group": own, "device": cuda}
    fused = OverlapMethod("symmetric memory", "always")
    names = {pass_: way.name for pass_, way in overlap_methods(**options, even=True, column_has_bias=True)}
    fused_names = dict.fromkeys(("row forward", "row backward"), "symmetric memory")
    assert names == dict.fromkeys(("column forward", "column backward"), "parts") | fused_names
    assert choose_overlap("column forward", **options) == fused
    assert choose_overlap("column forward", **options, even=False).why == "the ranks do not divide the sequence"
    assert choose_overlap("column forward", **options, has_bias=True).why == "the fused operator adds no bias"
    with validated_calls([own]):
        assert choose_overlap("row forward", **options).name == "parts"
    sum_in_parts(own, 2)
    assert choose_overlap("row forward", **options).name == "whole"


@pytest.mark.ranks(2)
def test_ranks_of_one_gpu_have_no_symmetric_memory(group, monkeypatch):
    own = dist.new_group([0, 1])
    monkeypatch.setattr(symmetric_memory, "_gpu", lambda device: "GPU-1")
    way = choose_overlap("row forward", group=own, device=torch.device("cuda", 0))
    assert way == OverlapMethod("parts", "ranks share a GPU")


@contextlib.contextmanager
def fused_operators_on_a_cpu():
    """PyTorch's own fallbacks of its operators, which say what they compute, stand in for CUDA's."""
    library = torch.library.Library("symm_mem", "IMPL")
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        library.impl(name, getattr(_symmetric_memory, f"_{name}"), "CPU")
    with _symmetric_memory._test_mode():
        yield
    library._destroy()


@pytest.mark.ranks(2)
def test_layers_through_symmetric_memory_are_those_without(group, monkeypatch):
    calls = []
    for name in ("gather_and_multiply_fused", "multiply_and_scatter_fused"):
        real = getattr(overlap, name)
        monkeypatch.setattr(
            overlap, name, lambda *a, _real=real, _name=name, **k: calls.append(_name) or _real(*a, **k)
        )
    monkeypatch.setattr(overlap, "why_not_symmetric", lambda group, device: None)
    found = []
    for overlaps in (False, True):
        torch.manual_seed(5)
        options = {"group": group, "sequence_parallel": True, "overlap": overlaps, "dtype": torch.float64}
        column, row = ColumnLinear(5, 8, False, **options), RowLinear(8, 5, **options)
        x = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
        with fused_operators_on_a_cpu():
            output = row(column(x).square())
            output.sum().backward()
        found.append([output.detach(), x.grad, column.weight.grad, row.weight.grad, row.bias.grad])
    # The forward of both, the row layer's backward.
    assert calls == ["gather_and_multiply_fused", "multiply_and_scatter_fused", "gather_and_multiply_fused"]
    for own, expected in zip(*found, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.ranks(2)
def test_a_fused_operator_that_fails_in_its_first_call_is_left_by_all_ranks(group, monkeypatch):
    own = dist.new_group([0, 1])
    options = {"group": own, "sequence_parallel": True, "overlap": True, "dtype": torch.float64}
    calls, results = [], []

    def fails_on_the_second_rank(rows, matrix, *, group, needs_whole=True):
        calls.append("gathered")
        if group.rank() == 1:
            raise RuntimeError("no such operator\nsecond line")
        return torch.full((6, 2, 8), torch.nan, dtype=torch.float64), None

    monkeypatch.setattr(overlap, "gather_and_multiply_fused", fails_on_the_second_rank)
    monkeypatch.setattr(overlap, "multiply_and_scatter_fused", None)
    for refusal in ("ordinary memory", None):
        context_of(own).symmetric_refusals[CPU] = refusal
        torch.manual_seed(5)
        column, row = ColumnLinear(5, 8, False, **options), RowLinear(8, 5, **options)
        x = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
        expectation = pytest.warns(
            UserWarning, match="symmetric memory: off on all ranks of the group, since fused_all"
        )
        with expectation if refusal is None and own.rank() == 0 else contextlib.nullcontext():
            row(column(x)).sum().backward()
        results.append([x.grad, column.weight.grad, row.weight.grad])
    for found, expected in zip(*results, strict=True):
        assert_bit_equal(found, expected)
    assert calls == ["gathered"]
    way = choose_overlap("row forward", group=own, device=CPU)
    assert way == OverlapMethod("parts", "fused_all_gather_matmul failed on rank 1: RuntimeError: no such operator")


@pytest.mark.ranks(2)
def test_the_fused_operators_are_called_for_these_products(group):
    torch.manual_seed(group.rank())
    shard, rows, weight = (torch.randn(*shape, dtype=torch.float64) for shape in ((3, 2, 4), (6, 2, 4), (5, 4)))
    with fused_operators_on_a_cpu(), CollectiveCounter() as counter:
        output, whole = overlap.gather_and_multiply_fused(shard, weight.t(), group=group)
        summed = overlap.multiply_and_scatter_fused(rows, weight.t(), group=group)
    gathered = all_gather(shard, group=group)
    assert_bit_equal(whole, gathered)
    torch.testing.assert_close(output, gathered @ weight.t(), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(summed, reduce_scatter(rows @ weight.t(), group=group), rtol=1e-14, atol=1e-14)
    assert [(launch.name, launch.num_bytes) for launch in counter.launches] == [
        ("all_gather", shard.nbytes),
        ("reduce_scatter", 6 * 2 * 5 * 8),
    ]
