"""Recomputation: the same gradients from fewer kept values, random numbers included."""

import pytest
import torch
import torch.nn.functional as F
from harness.live_bytes import LiveBytes
from harness.parity import assert_bit_equal

from shardwise.core.communication import collectives
from shardwise.core.random import DATA_PARALLEL_STREAM, TENSOR_PARALLEL_STREAM, seed_streams, streams
from shardwise.nn.recompute import is_checkpointing, is_recomputing, recomputed


def stochastic(x, weight, *, scale=1.0):
    """Draws from the default generator and two streams, one of them inside the other."""
    x = F.dropout(x @ weight, 0.3)
    with streams().fork():
        x = F.dropout(torch.tanh(x), 0.3)
        with streams().fork(DATA_PARALLEL_STREAM):
            x = F.dropout(x.exp(), 0.3)
        x = F.dropout(x.sin(), 0.3)
    return x * scale


def inputs():
    torch.manual_seed(3)
    return [torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]


def random_state():
    """All that decides what will be drawn, as tensors."""
    return {"default": torch.get_rng_state(), **streams().get_states()}


def assert_same_states(actual, expected):
    assert actual.keys() == expected.keys()
    for name, state in actual.items():
        assert_bit_equal(state, expected[name], name=name)


def run(call, between=lambda: None):
    """Output, gradients, and the random state after the forward and after the backward."""
    seed_streams(5, 0)
    x, weight = inputs()
    output = call(x, weight)
    between()
    before = random_state()
    output.sum().backward()
    assert_same_states(random_state(), before)
    return output, x.grad, weight.grad, before


@pytest.mark.parametrize("outside", [None, DATA_PARALLEL_STREAM, TENSOR_PARALLEL_STREAM])
def test_gradients_and_random_numbers_are_those_of_a_plain_call(outside):
    def call(function):
        def inside(x, weight):
            if outside is None:
                return function(x, weight)
            with streams().fork(outside):
                return function(x, weight)

        return inside

    def disturb():
        torch.rand(7)
        with streams().fork():
            torch.rand(3)

    plain = run(call(lambda x, w: stochastic(x, w, scale=2.5)), disturb)
    again = run(call(lambda x, w: recomputed(stochastic, x, w, scale=2.5)), disturb)
    for actual, expected in zip(again[:3], plain[:3], strict=True):
        assert_bit_equal(actual, expected)
    assert_same_states(again[3], plain[3])


def test_a_backward_inside_a_stream():
    plain, again = run(stochastic), None
    seed_streams(5, 0)
    x, weight = inputs()
    output = recomputed(stochastic, x, weight)
    with streams().fork(DATA_PARALLEL_STREAM):
        before = random_state()
        output.sum().backward()
        assert_same_states(random_state(), before)
        again = x.grad
    assert_bit_equal(again, plain[1])


class RecomputationError(Exception):
    """What a function raises the second time."""


def test_an_error_in_the_recomputation_leaves_the_random_numbers_alone():
    seed_streams(5, 0)
    x, weight = inputs()

    def failing(x, weight):
        with streams().fork():
            result = stochastic(x, weight)
            if is_recomputing():
                raise RecomputationError
            return result.exp()

    output = recomputed(failing, x, weight)
    # Further than the recomputation gets.
    stochastic(x, weight)
    before = random_state()
    with pytest.raises(RecomputationError):
        output.sum().backward()
    assert_same_states(random_state(), before)
    assert not is_recomputing()
    assert not is_checkpointing()


def test_arguments_and_outputs_of_any_kind():
    x, weight = inputs()

    def function(x, flag, pair, *, table, power=1):
        assert flag is None
        y = (x @ table["weight"]) ** power
        return {"y": y, "n": pair[0], "rest": (y.exp(), "text", pair)}

    plain = function(x, None, [2, "a"], table={"weight": weight}, power=2)
    again = recomputed(function, x, None, [2, "a"], table={"weight": weight}, power=2)
    assert again["n"] == 2
    assert again["rest"][1:] == ("text", [2, "a"])
    gradients = [torch.autograd.grad(r["y"].sum() + r["rest"][0].sum(), [x, weight]) for r in (plain, again)]
    for actual, expected in zip(*reversed(gradients), strict=True):
        assert_bit_equal(actual, expected)


def test_names_of_pytorch_s_own_options_belong_to_the_function():
    x, _ = inputs()
    options = {"debug": 2.0, "use_reentrant": 3.0, "context_fn": 4.0, "determinism_check": 5.0}
    output = recomputed(lambda x, **kwargs: x.exp() * sum(kwargs.values()), x, **options)
    assert_bit_equal(output, x.exp() * 14.0)


def test_nested_phases_and_gradients():
    seen = []

    def note(where):
        seen.append((where, is_checkpointing(), is_recomputing()))

    def inner(x):
        note("inner")
        return x.sin().exp()

    def outer(x):
        note("outer")
        y = recomputed(inner, x * 2)
        note("after")
        return y.tanh().exp()

    x, _ = inputs()
    plain = torch.autograd.grad((x * 2).sin().exp().tanh().exp().sum(), x)[0]
    output = recomputed(outer, x)
    first = (("outer", True, False), ("inner", True, False), ("after", True, False))
    assert tuple(seen) == first
    seen.clear()
    assert_bit_equal(torch.autograd.grad(output.sum(), x)[0], plain)
    # The inner function runs again as a part of the outer one, what it saves being dropped once more, and then itself.
    assert seen == [("outer", False, True), ("inner", True, False), ("after", False, True), ("inner", False, True)]
    assert not is_checkpointing()
    seen.clear()
    with torch.no_grad():
        recomputed(outer, x)
    assert {phase for _, *phases in seen for phase in phases} == {False}


def test_a_second_backward():
    x, weight = inputs()
    seed_streams(5, 0)
    output = recomputed(stochastic, x, weight).sum()
    first = torch.autograd.grad(output, [x, weight], retain_graph=True)
    second = torch.autograd.grad(output, [x, weight])
    for actual, expected in zip(second, first, strict=True):
        assert_bit_equal(actual, expected)


def test_it_keeps_nothing_but_the_arguments():
    def function(x, weight):
        return (x @ weight).tanh().exp().sum()

    kept = {}
    for call in (function, lambda *args: recomputed(function, *args)):
        x, weight = inputs()
        with LiveBytes() as made:
            output = call(x, weight)
        kept[call] = made.count()
        assert_bit_equal(output, function(x, weight))
    # Of the plain call the results of tanh and exp stay, of the other one only the output.
    assert list(kept.values()) == [2 * 16 * 8 + 8, 8]


class _Save(torch.autograd.Function):
    """Multiplies, and saves what it needs for backward."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class _Sum(torch.autograd.Function):
    """An all-reduce that saves nothing."""

    @staticmethod
    def forward(ctx, x, group):
        return collectives.all_reduce(x, group=group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@pytest.mark.ranks(2)
@pytest.mark.parametrize("early_stop", [True, False])
def test_recomputation_ends_before_the_last_collective(group, monkeypatch, early_stop):
    calls = 0
    reduce = collectives.all_reduce

    def counted(*args, **kwargs):
        nonlocal calls
        calls += 1
        return reduce(*args, **kwargs)

    monkeypatch.setattr(collectives, "all_reduce", counted)
    x, weight = inputs()
    expected = torch.autograd.grad((x.exp() @ weight).sum(), [x, weight])
    output = recomputed(lambda x, w: _Sum.apply(_Save.apply(x.exp(), w), group), x, weight, early_stop=early_stop)
    assert calls == 1
    gradients = torch.autograd.grad(output.sum(), [x, weight])
    assert calls == (1 if early_stop else 2)
    for actual, wanted in zip(gradients, expected, strict=True):
        assert_bit_equal(actual, wanted)


def test_compiled():
    x, weight = inputs()

    def block(x, weight):
        # What a layer does where it is checkpointed must not break the graph.
        product = recomputed(lambda x, w: (x @ w) if is_checkpointing() else (x @ w).tanh(), x, weight)
        return product.exp().sum()

    expected = torch.autograd.grad((x @ weight).tanh().exp().sum(), [x, weight])
    actual = torch.autograd.grad(torch.compile(block, fullgraph=True, backend="aot_eager")(x, weight), [x, weight])
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-12, atol=0)
