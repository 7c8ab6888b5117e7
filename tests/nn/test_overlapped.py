"""Sequence-parallel linear layers that overlap, against those that do not, and against the dense one."""

import pytest
import torch
from harness.parity import assert_close_to, assert_unmodified
from test_linear import COLUMN_SEQUENCE, ROW_SEQUENCE, Case, Noted, Products

from shardwise.core.communication import overlap
from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.communication.context import context_of
from shardwise.core.sequence_view import SequenceView
from shardwise.exact.strategies import ExactArithmetic
from shardwise.nn import ColumnLinear, RowLinear, linear
from shardwise.nn.recompute import recomputed

MOVING = [COLUMN_SEQUENCE, ROW_SEQUENCE]


def results(case, overlaps):
    """Output and gradients, by name."""
    for tensor in case.own.values():
        tensor.grad = None
    with assert_unmodified(*case.own.values()), CollectiveCounter() as counter:
        output = case.run(overlaps=overlaps)
        output.backward(case.own["output"].to(output.dtype))
    found = {"output": output.detach()}
    return found | {name: own.grad for name, own in case.own.items() if name != "output"}, counter.launches


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("parallelism", MOVING)
def test_the_same_numbers_and_the_same_collectives(group, parallelism):
    for rows, i, o in [
        ((12, 2), 8, 12),
        ((13, 2), 13, 7),
        ((13,), 7, 13),
        ((12, 2, 3), 3, 2),
        ((3, 1), 1, 1),
        ((0, 2), 3, 4),
    ]:
        case = Case(parallelism, group, rows, i, o)
        plain, launched = results(case, overlaps=False)
        found, launched_in_parts = results(case, overlaps=True)
        # Libraries round a product of fewer rows in another order of its terms; what is summed is the same.
        for name, tensor in found.items():
            assert_close_to(tensor, plain[name], rtol_of_norm=1e-15 * i * o)
        assert sorted(launched_in_parts, key=str) == sorted(launched, key=str)
        case.assert_equals_dense(found["output"])
        for context in (torch.no_grad(), torch.inference_mode()):
            with assert_unmodified(*case.own.values()), context:
                torch.testing.assert_close(case.run(overlaps=True).clone(), found["output"], rtol=1e-13, atol=1e-13)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("parallelism", MOVING)
@pytest.mark.parametrize("frozen", ["weight", "input"])
def test_what_needs_no_gradient(group, parallelism, frozen):
    case = Case(parallelism, group, (12, 2), 6, 9)
    case.own[frozen].requires_grad_(False)
    plain, launched = results(case, overlaps=False)
    found, launched_in_parts = results(case, overlaps=True)
    assert found[frozen] is None
    for name in found.keys() - {frozen}:
        torch.testing.assert_close(found[name], plain[name], rtol=1e-13, atol=1e-13)
    assert sorted(launched_in_parts, key=str) == sorted(launched, key=str)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("parallelism", MOVING)
def test_recomputation_adds_no_collective(group, parallelism):
    case = Case(parallelism, group, (13, 2), 6, 9)
    _, launched = results(case, overlaps=True)
    for tensor in case.own.values():
        tensor.grad = None
    with CollectiveCounter() as counter:
        output = recomputed(lambda _: case.run(overlaps=True), case.own["input"])
        output.backward(case.own["output"])
    assert sorted(counter.launches, key=str) == sorted(launched, key=str)
    case.assert_equals_dense(output)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("parallelism", "forward", "backward"),
    [
        (COLUMN_SEQUENCE, ["shift", "mm", "wait", "mm"], ["gather", "mm", "shift", "mm", "wait", "mm", "wait"]),
        (ROW_SEQUENCE, ["mm", "shift", "mm", "wait"], ["shift", "mm", "wait", "mm", "mm"]),
    ],
    ids=["column", "row"],
)
def test_products_and_parts_take_turns(group, monkeypatch, parallelism, forward, backward):
    """Of two ranks: the other's part is under way during the product of this rank's own part (or the other way round).

    In the backward of a column-parallel layer the input gathered again and the sum of its gradient travel beside both
    of its products, and the last wait is for the sum.
    """
    case, seen = Case(parallelism, group, (12, 2), 6, 9), []
    if "bias" in case.own:
        del case.own["bias"], case.whole["bias"]
    choose, gather = overlap.choose_transport, linear.all_gather_async

    class Watched:
        def __init__(self, transport):
            self.transport = transport

        def shift(self, *arguments):
            seen.append("shift")
            return Noted(self.transport.shift(*arguments), seen.append)

    def watched_gather(*arguments, **options):
        seen.append("gather")
        return Noted(gather(*arguments, **options), seen.append)

    monkeypatch.setattr(overlap, "choose_transport", lambda *arguments: Watched(choose(*arguments)))
    monkeypatch.setattr(linear, "all_gather_async", watched_gather)
    with Products(seen.append):
        output = case.run(overlaps=True)
        assert seen == forward
        seen.clear()
        output.backward(case.own["output"])
    assert seen == backward
    case.assert_equals_dense(output)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("parallelism", MOVING)
def test_a_layer_does_so_when_told(group, monkeypatch, parallelism):
    calls = []
    for name in ("gather_and_multiply", "multiply_and_scatter"):
        real = getattr(overlap, name)
        monkeypatch.setattr(
            overlap, name, lambda *a, _real=real, _name=name, **k: calls.append(_name) or _real(*a, **k)
        )
    kind, width = (ColumnLinear, 6) if parallelism is COLUMN_SEQUENCE else (RowLinear, 3)
    for options in ({}, {"overlap": True}, {"overlap": True, "sequence_parallel": False}):
        layer = kind(6, 6, group=group, **({"sequence_parallel": True} | options))
        calls.clear()
        layer(torch.randn(4, 2, width, requires_grad=True)).sum().backward()
        both = ["gather_and_multiply", "multiply_and_scatter"]
        expected = both if parallelism is COLUMN_SEQUENCE else both[::-1]
        assert calls == (expected if options == {"overlap": True} else [])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("parallelism", MOVING)
@pytest.mark.parametrize("options", [{"fuse_weight_gradient": True}, {"delay_weight_gradient": True}], ids=str)
def test_weight_gradients_that_go_elsewhere(group, parallelism, options):
    kind, width = (ColumnLinear, 7) if parallelism is COLUMN_SEQUENCE else (RowLinear, 3)
    found = []
    for overlaps in (False, True):
        torch.manual_seed(1)
        arguments = {"group": group, "sequence_parallel": True, "overlap": overlaps, "dtype": torch.float64}
        layer = kind(7 if kind is ColumnLinear else 6, 6, **arguments, **options)
        layer.weight.main_grad = torch.zeros_like(layer.weight)
        # Five positions on two ranks.
        rows = 5 if kind is RowLinear else 3 - group.rank()
        x = torch.randn(rows, 2, width, dtype=torch.float64, requires_grad=True)
        told = {"sequence": SequenceView(5, group)} if kind is ColumnLinear else {}
        layer(x, **told).square().sum().backward()
        layer.backward_dw()
        gradient = layer.weight.main_grad if layer.fuse_weight_gradient else layer.weight.grad
        found.append([gradient, x.grad, layer.bias.grad])
    for own, expected in zip(*found, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.ranks(2)
def test_fixed_parts_are_left_to_their_own_sums(group, monkeypatch):
    """In a group that sums over parts nothing is overlapped, and the bits are those of the group."""
    monkeypatch.setattr(context_of(group), "exact_parts", 2)
    monkeypatch.setattr(context_of(group), "arithmetic", ExactArithmetic())
    monkeypatch.setattr(overlap, "gather_and_multiply", None)
    outputs = []
    for chosen in (False, True):
        torch.manual_seed(3)
        layer = ColumnLinear(4, 6, group=group, sequence_parallel=True, overlap=chosen)
        outputs.append(layer(torch.ones(2, 1, 4)))
    assert torch.equal(*outputs)


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("parallelism", MOVING)
def test_compiled(group, parallelism):
    """One graph, with the numbers of eager mode."""
    case = Case(parallelism, group, (13, 2), 6, 9)
    compiled = torch.compile(lambda: case.run(overlaps=True), fullgraph=True, backend="aot_eager")
    output = compiled()
    output.backward(case.own["output"])
    case.assert_equals_dense(output)
