"""Parameters that ranks update by shares: gathered while the next forward runs, and never read too early."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from harness.groups import alone
from harness.overlap import ArrivesLater, ProductTime
from harness.parity import assert_bit_equal
from torch import nn

from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.communication.transports.shared_memory import SWITCH
from shardwise.core.communication.trees import sum_in_parts
from shardwise.core.topology import Groups
from shardwise.models import language_model
from shardwise.models.config import ModelConfig
from shardwise.models.gpt import GPT
from shardwise.training.gradients import (
    GradientBuffers,
    GradientTrees,
    ParameterBuffers,
    base as gradients_module,
    gradient_buffers,
    parameter_buffers,
)

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
            parameters.wait()
        assert [each.name for each in counter.launches] == ["all_gather"] * LAYERS
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
        parameters.wait()
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
    """Reads a layer's weight without calling the layer, until it is told otherwise."""

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
        assert len(waiting) == 1
        if step < 2:
            before = model.last.weight.detach().clone()
    # The last layer's was there when the forward began; the first's two when it was called.
    assert seen == [0] * len(seen)
    assert len(seen) == (6 if evaluates else 3)
    assert not torch.equal(before, model.last.weight)
    model(torch.ones(2, WIDTH))
    assert waiting == []


def noted_launches(monkeypatch, parameters, events):
    """Note which bucket's gather starts, counted in the order of the forward."""
    plain = parameter_buffers.all_gather_async
    numbers = {flat.data_ptr(): number for number, flat in enumerate(reversed(parameters._flats))}

    def noted(own, **options):
        events.append(f"gather {numbers[options['buffer'].data_ptr()]}")
        return plain(own, **options)

    monkeypatch.setattr(parameter_buffers, "all_gather_async", noted)


def alternating(number):
    """A gather before each layer, one ahead."""
    events = [f"{what} {each + ahead}" for each in range(number) for what, ahead in (("gather", 1), ("layer", 0))]
    return ["gather 0", *(event for event in events if event != f"gather {number}")]


@pytest.mark.ranks(2)
def test_the_next_gather_is_launched_when_one_is_waited_for(group, monkeypatch):
    """On a GPU with one queue a layer begins behind what was launched before it: its own bucket and one more."""
    model = layered()
    gradients, parameters = buffers_of(model, group)
    events = []
    noted_launches(monkeypatch, parameters, events)
    for number, layer in enumerate(model):
        layer.register_forward_hook(lambda *_, number=number: events.append(f"layer {number}"))
    for _ in range(2):
        model(torch.ones(2, WIDTH)).sum().backward()
        gradients.finish()
        events.clear()
        update_(parameters)
        model(torch.ones(2, WIDTH))
        assert events == alternating(LAYERS)
        assert not any(parameters._pending)
    # What is left starts at once where nothing is computed between.
    update_(parameters)
    events.clear()
    parameters.wait()
    assert events == [f"gather {number}" for number in range(1, LAYERS)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("gradients_of", [GradientBuffers, GradientTrees])
def test_ranks_whose_forwards_differ_gather_in_one_order(group, monkeypatch, gradients_of):
    """Layers in another order on each rank, and one that is left out on one of them: all start before a gradient."""
    own, is_exact = torch.distributed.new_group([0, 1]), gradients_of is GradientTrees
    if is_exact:
        sum_in_parts(own, 2)
    model, plain = layered(), layered()
    monkeypatch.setattr(gradients_module, "DEFAULT_BUCKET_SIZE", 1)
    gradients = gradients_of(model, group=own, scatter=True, **({} if is_exact else {"bucket_size": 1}))
    parameters = ParameterBuffers(model, gradients)
    assert len(parameters._buckets) == 2 * LAYERS
    expected = GradientBuffers(plain, group=group)
    events = []
    noted_launches(monkeypatch, parameters, events)
    order = list(range(LAYERS)) if group.rank() == 0 else list(reversed(range(LAYERS)))
    for step in range(3):
        used = order[:-1] if group.rank() == step % 2 and not is_exact else order
        batch = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step + 10 * group.rank()))
        for each, buffers in ((model, gradients), (plain, expected)):
            if isinstance(buffers, GradientTrees):
                buffers.begin(1)
            else:
                buffers.zero_()
            output = batch
            for number in used:
                output = each[number](output)
            output.square().sum().backward()
            buffers.finish()
        with torch.no_grad():
            for param in plain.parameters():
                param.add_(param.grad, alpha=-1e-3)
        events.clear()
        update_(parameters, 1e-3)
    parameters.wait()
    assert events == [f"gather {number}" for number in range(len(parameters._buckets))]
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert_bit_equal(param.detach(), other.detach())


@pytest.mark.ranks(2)
def test_the_fused_loss_waits_for_the_output_layer_where_it_reads_it(group, monkeypatch):
    """Its weight is in the last bucket: nothing is gathered together before it."""
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
    config = ModelConfig(**sizes, hidden_dropout=0.0, attention_dropout=0.0, fuse_output_layer_and_loss=True)
    options = {"vocab_size": 13, "max_sequence_length": 4, "position_embedding_type": "rope"}
    model = GPT(config, **options, groups=Groups(tp=alone(group)))
    gradients = GradientBuffers(model, group=group, bucket_size=1, scatter=True)
    parameters = ParameterBuffers(model, gradients)
    events = []
    noted_launches(monkeypatch, parameters, events)
    for name, module in (("layer", model.decoder.layers[0]), ("last norm", model.decoder.final_layernorm)):
        module.register_forward_hook(lambda *_, name=name: events.append(name))
    monkeypatch.setattr(
        language_model,
        "vocab_parallel_linear_cross_entropy",
        lambda *args, _plain=language_model.vocab_parallel_linear_cross_entropy, **options: (
            events.append(f"loss, {sum(each is not None for each in parameters._pending)} on the way"),
            _plain(*args, **options),
        )[1],
    )
    ids = torch.arange(8).view(2, 4)
    for _ in range(2):
        events.clear()
        gradients.zero_()
        model(ids, labels=ids).sum().backward()
        gradients.finish()
        update_(parameters)
    last = f"gather {len(parameters._buckets) - 1}"
    assert events.index("layer") < events.index(last)
    assert events[-4:] == [last, "last norm", "loss, 0 on the way", "gather 0"]
