"""Parameters that ranks update by shares: gathered while the next forward runs, and never read too early."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from harness.overlap import ArrivesLater, ProductTime
from harness.parity import assert_bit_equal
from torch import nn

from shardwise.communication.accounting import CollectiveCounter
from shardwise.communication.transports.shared_memory import SWITCH
from shardwise.data_parallel import GradientBuffers, ParameterBuffers, gradient_buffers, parameter_buffers

LAYERS, WIDTH, SAMPLES = 12, 32, 8


def layered():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def buffers_of(model, group):
    # A layer is a bucket.
    gradients = GradientBuffers(model, group=group, bucket_size=WIDTH * (WIDTH + 1), scatter=True)
    return gradients, ParameterBuffers(model, gradients)


def update_(parameters, rate=0.1):
    with torch.no_grad():
        for share in parameters.shares.values():
            share.data.add_(share.gradient, alpha=-rate)
    parameters.gather_()


@pytest.mark.ranks(2, 3)
def test_shares_are_views_and_together_each_parameter(group):
    model = layered()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    gradients, parameters = buffers_of(model, group)
    assert len(gradients.buckets) == LAYERS
    for name, param in model.named_parameters():
        assert_bit_equal(param.detach(), before[name])
        share = parameters.shares[param]
        assert [start for start, _ in share.intervals[1:]] == [stop for _, stop in share.intervals[:-1]]
        assert (share.intervals[0][0], share.intervals[-1][1]) == (0, param.numel())
        low, high = share.interval
        assert_bit_equal(share.data, param.detach().flatten()[low:high])
        assert_bit_equal(share.gradient, param.main_grad.flatten()[low:high])
        share.data.zero_()
        assert not param.detach().flatten()[low:high].any()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shares_memory", ["1", "0"], ids=["shared memory", "gloo"])
# One message of shared memory, and several; gloo's own gather, and messages between two ranks.
@pytest.mark.parametrize("width", [16, 700])
def test_parameters_are_gathered_where_they_lie(group, monkeypatch, shares_memory, width):
    monkeypatch.setenv(SWITCH, shares_memory)
    own = torch.distributed.new_group(list(range(group.size())))
    model = nn.Linear(width, width)
    parameters = ParameterBuffers(model, GradientBuffers(model, group=own, scatter=True))
    parameters.gather_()
    (flat,), (pending,) = parameters._flats, parameters._pending
    assert pending.wait().data_ptr() == flat.data_ptr() == model.bias.data_ptr()


@pytest.mark.ranks(2)
def test_a_step_is_that_of_sums_and_plain_updates(group):
    plain, model = layered(), layered()
    expected = GradientBuffers(plain, group=group)
    gradients, parameters = buffers_of(model, group)
    for step in range(3):
        batch = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(10 * step + group.rank()))
        for each, buffers in ((plain, expected), (model, gradients)):
            buffers.zero_()
            each(batch).square().sum().backward()
            buffers.finish()
        with torch.no_grad():
            for param in plain.parameters():
                param.add_(param.grad, alpha=-1e-3)
        with CollectiveCounter() as counter:
            update_(parameters, 1e-3)
        assert [each.name for each in counter.launches] == ["all_gather"] * LAYERS
    parameters.wait()
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert_bit_equal(param.detach(), other.detach())


class Delays:
    """Collectives that arrive one after the other, each a while after the one before, by a clock of products."""

    def __init__(self, clock, start, delay):
        self.clock, self.start, self.delay, self.waited, self.free = clock, start, delay, [], 0.0

    def __call__(self, *args, **kwargs):
        self.free = max(self.free, self.clock.now) + self.delay
        return ArrivesLater(self.start(*args, **kwargs), self.clock, self.free - self.clock.now, self.waited)


def time_of_steps(group, monkeypatch, delay_of_sums, delay_of_gathers, late=False):
    """Of two steps and one more forward, by a clock of products."""
    with ProductTime() as clock, monkeypatch.context() as patch:
        sums = Delays(clock, gradient_buffers.reduce_scatter_async, delay_of_sums)
        gathers = Delays(clock, parameter_buffers.all_gather_async, delay_of_gathers)
        patch.setattr(gradient_buffers, "reduce_scatter_async", sums)
        patch.setattr(parameter_buffers, "all_gather_async", gathers)
        model = layered()
        gradients, parameters = buffers_of(model, group)
        # The first layer's backward then takes as long as any other's.
        batch = torch.randn(SAMPLES, WIDTH).requires_grad_()
        for _ in range(2):
            gradients.zero_()
            model(batch).sum().backward()
            gradients.finish()
            update_(parameters)
            if late:
                parameters.wait()
        model(batch)
        parameters.remove_()
        gradients.remove_()
    return clock.now, sums.waited, gathers.waited


@pytest.mark.ranks(2)
def test_delays_hide_behind_the_backward_and_the_next_forward(group, monkeypatch):
    """Each bucket's sum and gather takes three quarters of its layer's backward, or forward."""
    product = SAMPLES * WIDTH * WIDTH
    sums, gathers = 0.75 * 2 * product, 0.75 * product
    without, *_ = time_of_steps(group, monkeypatch, 0.0, 0.0)
    total, waited_sums, waited_gathers = time_of_steps(group, monkeypatch, sums, gathers)
    # Of each step the last sum cannot hide, as there is no backward left, nor the first gather.
    assert [sum(each > 0 for each in waited) for waited in (waited_sums, waited_gathers)] == [2, 2]
    assert total - without == pytest.approx(2 * (sums + gathers))
    assert total - without <= 2 * LAYERS * (sums + gathers) / 10
    # Who waits for all before the forward waits for every gather.
    late, *_ = time_of_steps(group, monkeypatch, 0.0, gathers, late=True)
    assert late - without == pytest.approx(2 * LAYERS * gathers)


class Reading(nn.Module):
    """Reads a layer's weight without calling the layer, from some forward on."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.reads = True

    def forward(self, x):
        x = self.first(x)
        return F.linear(x, self.last.weight) if self.reads else self.last(x)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("evaluates", [False, True])
def test_a_weight_that_is_read_without_a_call_is_waited_for(group, evaluates, monkeypatch):
    torch.manual_seed(0)
    model = Reading()
    gradients = GradientBuffers(model, group=group, bucket_size=1, scatter=True)
    parameters = ParameterBuffers(model, gradients)
    waiting = []
    plain = parameter_buffers.all_gather_async

    class Watched:
        def __init__(self, pending, size):
            self.pending, self.size = pending, size
            waiting.append(size)

        def wait(self):
            waiting.remove(self.size)
            return self.pending.wait()

    monkeypatch.setattr(
        parameter_buffers, "all_gather_async", lambda own, **options: Watched(plain(own, **options), own.numel())
    )
    seen = []
    model.first.register_forward_hook(lambda *_: seen.append(len(waiting)))
    for step in range(3):
        gradients.zero_()
        model(torch.ones(2, WIDTH)).sum().backward()
        gradients.finish()
        if evaluates:
            # The layer was called since the last step, but not in every forward.
            model.reads = False
            model(torch.ones(2, WIDTH))
            model.reads = True
        update_(parameters)
        assert len(waiting) == 3
        if step < 2:
            before = model.last.weight.detach().clone()
    # The last layer's was there when the forward began; the first's two when it was called.
    assert seen == [0] * len(seen)
    assert len(seen) == (6 if evaluates else 3)
    assert not torch.equal(before, model.last.weight)
    model(torch.ones(2, WIDTH))
    assert waiting == []


@pytest.mark.ranks(2)
def test_the_wait_for_a_bucket_is_just_before_the_layer(group):
    """While the first layers run, the gathers of later ones are under way."""
    model = layered()
    gradients, parameters = buffers_of(model, group)
    under_way = []
    for layer in model:
        layer.register_forward_hook(lambda *_: under_way.append(sum(each is not None for each in parameters._pending)))
    model(torch.ones(2, WIDTH)).sum().backward()
    gradients.finish()
    update_(parameters)
    under_way.clear()
    model(torch.ones(2, WIDTH))
    assert under_way == list(reversed(range(LAYERS)))
