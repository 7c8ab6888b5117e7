"""Gradients in buffers are those that plain all-reduces give, and travel while the backward goes on."""

import contextlib

import pytest
import torch
from harness.overlap import ArrivesLater, ProductTime
from harness.parity import assert_bit_equal, assert_close_to
from torch import nn

from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.communication.collectives import all_reduce
from shardwise.core.errors import ConfigError, DesyncError
from shardwise.core.topology import Groups, Topology
from shardwise.kernels.fake_device import planning_for
from shardwise.models.config import ModelConfig
from shardwise.models.gpt import GPT
from shardwise.nn import ColumnLinear
from shardwise.training.gradients import GradientBuffers, default_bucket_size, gradient_buffers
from shardwise.training.gradients.finalize import finalize_gradients_
from shardwise.training.optimizer.clipping import clip_grad_norm_


def make_model(*, dtype=torch.float64, unused=False):
    """Parameters of sizes that nothing divides, one of them frozen."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(7, 13), nn.GELU(), nn.LayerNorm(13), nn.Linear(13, 5, bias=False)).to(dtype)
    model[2].bias.requires_grad_(False)
    if unused:
        model.register_parameter("unused", nn.Parameter(torch.ones(3, 2, dtype=dtype)))
    return model


def micro_batches(rank, number, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(4, 7, generator=generator, dtype=torch.float64).to(dtype) for _ in range(number)]


def accumulate(model, batches, no_sync=contextlib.nullcontext):
    for index, batch in enumerate(batches):
        with no_sync() if index < len(batches) - 1 else contextlib.nullcontext():
            model(batch).square().sum().backward()


def plainly_reduced(group, *, average, **options):
    """By name, the gradients after a plain backward and an all-reduce each."""
    model = make_model(**options)
    accumulate(model, micro_batches(group.rank(), 3, next(model.parameters()).dtype))
    result = {}
    for name, param in model.named_parameters():
        if param.grad is not None:
            grad = param.grad / group.size() if average else param.grad
            result[name] = all_reduce(grad, group=group)
    return result


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("average", [False, True], ids=["sum", "mean"])
@pytest.mark.parametrize("bucket_size", [1, 100, None])
def test_gradients_are_those_of_plain_all_reduces_bit_for_bit(group, bucket_size, average):
    expected = plainly_reduced(group, average=average)
    model = make_model()
    buffers = GradientBuffers(model, group=group, bucket_size=bucket_size, average=average)
    assert len(buffers.buckets) == {1: 4, 100: 3, None: 1}[bucket_size]
    # A second step is as good as the first, whichever way the first's gradients are forgotten.
    for forget in (buffers.zero_, lambda: model.zero_grad(set_to_none=True), lambda: model.zero_grad(False), None):
        accumulate(model, micro_batches(group.rank(), 3), buffers.no_sync)
        buffers.finish()
        for name, param in model.named_parameters():
            if param.requires_grad:
                assert param.grad is param.main_grad
                # In the same order: one all-reduce of a buffer adds the ranks as one of a tensor does, up to where
                # three ranks begin in a ring.
                if average and group.size() == 3:
                    assert_close_to(param.grad, expected[name], rtol_of_norm=1e-15)
                else:
                    assert_bit_equal(param.grad, expected[name])
        if forget is not None:
            forget()
    assert model[2].bias.grad is None


@pytest.mark.ranks(2)
def test_buckets_travel_once_and_before_finish(group):
    model = make_model()
    buffers = GradientBuffers(model, group=group, bucket_size=100)
    batches = micro_batches(group.rank(), 3)
    with CollectiveCounter() as counter:
        for batch in batches[:-1]:
            with buffers.no_sync():
                model(batch).sum().backward()
        assert counter.launches == []
        model(batches[-1]).sum().backward()
        during = list(counter.launches)
        buffers.finish()
    assert during == counter.launches
    assert [(each.name, each.num_bytes) for each in during] == [
        ("all_reduce", 8 * bucket.data.numel()) for bucket in buffers.buckets
    ]
    # The last layer's first.
    assert buffers.buckets[0].params[0] is model[3].weight
    # Without overlap the same ones, at finish.
    model = make_model()
    buffers = GradientBuffers(model, group=group, bucket_size=100, overlap=False)
    with CollectiveCounter() as counter:
        model(batches[0]).sum().backward()
        assert counter.launches == []
        buffers.finish()
    assert counter.launches == during


@pytest.mark.ranks(2)
def test_a_wider_buffer_loses_nothing_of_many_micro_batches(group):
    number, dtype = 40, torch.bfloat16
    model = make_model(dtype=dtype)
    batches = micro_batches(group.rank(), number, dtype)
    expected = {name: torch.zeros_like(param, dtype=torch.float32) for name, param in model.named_parameters()}
    for batch in batches:
        accumulate(model, [batch])
        for name, param in model.named_parameters():
            if param.grad is not None:
                expected[name] += param.grad
        model.zero_grad()
    buffers = GradientBuffers(model, group=group, dtype=torch.float32)
    accumulate(model, batches, buffers.no_sync)
    buffers.finish()
    for name, param in model.named_parameters():
        if param.requires_grad:
            assert param.grad is None
            assert param.main_grad.dtype == torch.float32
            assert_bit_equal(param.main_grad, all_reduce(expected[name], group=group))


@pytest.mark.ranks(2)
def test_a_parameter_that_one_rank_does_not_use(group):
    """Its bucket waits for finish on that rank, and those behind it too; the calls are the same."""

    def run(model, buffers=None):
        hidden = model(micro_batches(0, 1)[0])
        loss = hidden.sum() + (model.unused.sum() if group.rank() else 0.0)
        loss.backward()
        if buffers is not None:
            buffers.finish()

    model = make_model(unused=True)
    model.register_parameter("never", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    buffers = GradientBuffers(model, group=group, bucket_size=1)
    for _ in range(2):
        run(model, buffers)
        # What rank 1 computed, and zeros.
        assert_bit_equal(model.unused.grad, torch.ones_like(model.unused))
        assert_bit_equal(model.never.grad, torch.zeros_like(model.never))
        model.zero_grad(set_to_none=True)


@pytest.mark.ranks(2)
def test_overlap_hides_what_the_backward_leaves_time_for(group, monkeypatch):
    """Every bucket arrives three quarters of a layer's backward late; by a clock of products, whatever the machine."""
    layers = 12
    batch = torch.randn(8, 32)
    delay = 0.75 * 2 * 8 * 32 * 32

    def time_of_step(overlap, delay):
        waited = []
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(layers)))
        with ProductTime() as clock, monkeypatch.context() as patch:
            start = gradient_buffers.all_reduce_async
            patch.setattr(
                gradient_buffers,
                "all_reduce_async",
                lambda *args, **kwargs: ArrivesLater(start(*args, **kwargs), clock, delay, waited),
            )
            buffers = GradientBuffers(model, group=group, bucket_size=32 * 33, overlap=overlap)
            assert len(buffers.buckets) == layers
            model(batch).sum().backward()
            buffers.finish()
        assert len(waited) == layers
        return clock.now

    without = time_of_step(True, 0.0)
    assert time_of_step(True, delay) - without <= layers * delay / 10
    # The last one cannot hide: there is nothing left to hide behind. Without overlap all arrive after the backward.
    assert time_of_step(True, delay) - without == pytest.approx(delay)


def gpt_gradients(group, *, buffers, tied, **config):
    """Complete gradients of a small GPT at tp 2 x dp 2, by name, and their norm."""
    topology = Topology.create(tp=2)
    tp_group, dp_group = topology.group("tp"), topology.group("dp")
    torch.manual_seed(5)
    options = {
        "sequence_parallel": True,
        "num_query_groups": 1,
        "normalization": "RMSNorm",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        **config,
    }
    sizes = ModelConfig(num_layers=2, hidden_size=12, num_attention_heads=4, params_dtype=torch.float64, **options)
    model = GPT(sizes, 23, 9, groups=Groups.of(topology), share_embeddings_and_output_weights=tied)
    made = GradientBuffers(model, group=dp_group, bucket_size=200) if buffers else None
    generator = torch.Generator().manual_seed(dp_group.rank())
    for index in range(2):
        ids = torch.randint(23, (2, 9), generator=generator)
        with made.no_sync() if made and index == 0 else contextlib.nullcontext():
            model(ids, labels=ids).sum().backward()
            for layer in model.modules():
                if getattr(layer, "delays_weight_gradients", False):
                    layer.backward_dw()
    if made:
        assert made._num_started > len(made.buckets) / 2
        made.finish()
    finalize_gradients_(model, tp_group=tp_group, dp_group=None if made else dp_group)
    norm = clip_grad_norm_(model, 1.0, tp_group=tp_group)
    return {
        name: param.main_grad if config.get("gradient_accumulation_fusion") else param.grad
        for name, param in model.named_parameters()
    }, norm


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("delayed", [False, True], ids=["", "delayed"])
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_a_split_model_with_partial_sums_copies_ties_and_deferred_gradients(group, tied, delayed, fused):
    expected, expected_norm = gpt_gradients(group, buffers=False, tied=tied)
    actual, norm = gpt_gradients(
        group, buffers=True, tied=tied, delay_wgrad_compute=delayed, gradient_accumulation_fusion=fused
    )
    assert_close_to(norm, expected_norm, rtol_of_norm=1e-13)
    for name, gradient in expected.items():
        assert_close_to(actual[name], gradient, rtol_of_norm=1e-12, name=name)


@pytest.mark.ranks(1)
def test_late_parameters_and_others_of_their_bucket_start_at_finish(group):
    model = make_model()
    buffers = GradientBuffers(model, group=group, bucket_size=1, late=[model[0].weight])
    model(micro_batches(0, 1)[0]).sum().backward()
    # Last in the model, so all but one.
    assert buffers._num_started == len(buffers.buckets) - 1
    model[0].weight.grad.add_(1.0)
    expected = model[0].weight.grad.clone()
    buffers.finish()
    assert_bit_equal(model[0].weight.main_grad, expected)


@pytest.mark.ranks(1)
def test_buckets_are_larger_on_gpus_and_grow_with_the_ranks(group):
    assert [default_bucket_size("cpu", ranks) for ranks in (1, 512)] == [1 << 23, 1 << 23]
    assert [default_bucket_size("cuda", ranks) for ranks in (1, 40, 41, 512)] == [40e6, 40e6, 41e6, 512e6]
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(3)))
    assert len(GradientBuffers(model, group=group).buckets) == 2
    # A plan's CPU tensors stand for tensors of a GPU.
    with planning_for("cuda"):
        assert len(GradientBuffers(model, group=group).buckets) == 1


@pytest.mark.ranks(1)
def test_what_goes_wrong_is_said(group):
    model = make_model()
    with pytest.raises(ConfigError, match="bucket_size is 0; it must be at least 1"):
        GradientBuffers(model, group=group, bucket_size=0)
    buffers = GradientBuffers(model, group=group)
    batch = micro_batches(0, 1)[0]
    model(batch).sum().backward()
    with pytest.raises(ConfigError, match=r"a gradient of 3\.weight came when its bucket .* inside no_sync\(\)"):
        model(batch).sum().backward()
    # zero_ begins anew, whatever happened before.
    buffers.zero_()
    model(batch).sum().backward()
    buffers.finish()
    layer = ColumnLinear(4, 6, group=group, fuse_weight_gradient=True)
    buffers = GradientBuffers(layer, group=group)
    layer(torch.randn(2, 1, 4)).sum().backward()
    buffers.finish()
    layer.zero_grad()
    with pytest.raises(ConfigError, match=r"still held the step before; .* call zero_ "):
        layer(torch.randn(2, 1, 4)).sum().backward()


@pytest.mark.ranks(2)
def test_ranks_with_different_parameters_hear_of_it(group):
    model = nn.Linear(4, 5 + 16 * group.rank())
    with pytest.raises(DesyncError, match="ranks disagree on their trained parameters"):
        GradientBuffers(model, group=group)
