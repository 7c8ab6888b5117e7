"""Weight gradients that go into ``main_grad``, or wait: the sums are those of plain autograd."""

import pytest
import torch
from harness.parity import assert_bit_equal, assert_close_to, assert_unmodified

from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.errors import ConfigError, ShardingError, TopologyError
from shardwise.core.initialization import Normal
from shardwise.core.sharding import balanced_range
from shardwise.kernels import products
from shardwise.megatron.config import ModelParallelConfig
from shardwise.nn.recompute import recomputed
from shardwise.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, drain_embedding_wgrad_compute

B = 2


def config_of(group, sequence_parallel=False, dtype=torch.float64, **options):
    options = {"gradient_accumulation_fusion": True} | options
    return ModelParallelConfig(sequence_parallel=sequence_parallel and group.size() > 1, params_dtype=dtype, **options)


def column(group, config, **options):
    return ColumnParallelLinear(7, 13, config=config, init_method=Normal(1.0), tp_group=group, **options)


def row(group, config):
    return RowParallelLinear(
        13,
        7,
        config=config,
        init_method=Normal(1.0),
        bias=True,
        input_is_parallel=True,
        skip_bias_add=False,
        tp_group=group,
    )


def micro_batches(layer, group, s, dtype=torch.float64, count=3):
    """Inputs and output gradients as this rank holds them, the same on each rank where they should be."""
    is_column = isinstance(layer, ColumnParallelLinear)
    local = layer.weight.shape[0 if is_column else 1]
    result = []
    for _ in range(count):
        whole = torch.randn(s, B, 7, dtype=torch.float64).to(dtype)
        own = torch.randn(s, B, 13, dtype=torch.float64).to(dtype)[..., :local].contiguous()
        if layer.sequence_parallel:
            start, stop = balanced_range(s, group.size(), group.rank())
            whole = whole[start:stop].contiguous()
        result.append((whole, own) if is_column else (own, whole))
    return result


def run(layer, x, incoming, s, recompute=False):
    options = {"sequence_length": s} if isinstance(layer, ColumnParallelLinear) else {}
    x = x.clone().requires_grad_()
    with assert_unmodified(x, incoming):
        output = recomputed(layer, x, **options) if recompute else layer(x, **options)[0]
        (output[0] if recompute else output).backward(incoming)
    return x.grad


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("make", [column, row])
@pytest.mark.parametrize(("sequence_parallel", "recompute"), [(False, True), (True, False)], ids=["recompute", "sp"])
def test_main_grad_is_the_sum_over_micro_batches(group, make, sequence_parallel, recompute):
    s = 13
    layer = make(group, config_of(group, sequence_parallel))
    plain = make(group, config_of(group, sequence_parallel, gradient_accumulation_fusion=False))
    plain.load_state_dict(layer.state_dict())
    layer.weight.main_grad = torch.full_like(layer.weight, 0.5, requires_grad=False)
    buffer = layer.weight.main_grad
    for x, incoming in micro_batches(layer, group, s):
        assert_bit_equal(run(layer, x, incoming, s, recompute), run(plain, x, incoming, s))
    assert layer.weight.main_grad is buffer
    assert layer.weight.grad is None
    assert_close_to(buffer - 0.5, plain.weight.grad, rtol_of_norm=1e-12)
    assert_bit_equal(layer.bias.grad, plain.bias.grad)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [column, row])
@pytest.mark.parametrize("tokens", [1 << 20, 5])
def test_a_wider_main_grad_loses_nothing(group, monkeypatch, make, tokens):
    """The sum of bf16 products, in fp32 throughout: closer than any sum of gradients rounded to bf16."""
    monkeypatch.setattr(products, "_MIN_ROWS", tokens)
    monkeypatch.setattr(products, "_TEMPORARY_ELEMENTS", 0)
    layer = make(group, config_of(group, dtype=torch.bfloat16))
    layer.weight.main_grad = torch.zeros(layer.weight.shape)
    expected = torch.zeros(layer.weight.shape, dtype=torch.float64)
    for x, incoming in micro_batches(layer, group, 12, torch.bfloat16, count=4):
        run(layer, x, incoming, 12)
        expected += incoming.double().flatten(0, 1).t() @ x.double().flatten(0, 1)
    assert_close_to(layer.weight.main_grad, expected.float(), rtol_of_norm=1e-6)


@pytest.mark.ranks(2)
def test_under_autocast(group):
    layer = column(group, config_of(group, dtype=torch.float32))
    layer.weight.main_grad = torch.zeros(layer.weight.shape)
    layer.weight.grad_added_to_main_grad = False
    ((x, incoming),) = micro_batches(layer, group, 12, torch.float32, count=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = layer(x.requires_grad_())
    output.backward(incoming.bfloat16())
    expected = incoming.double().flatten(0, 1).t() @ x.detach().double().flatten(0, 1)
    assert_close_to(layer.weight.main_grad, expected.float(), rtol_of_norm=2 * 2**-8)
    assert layer.weight.grad.dtype == torch.float32
    assert not layer.weight.grad.any()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("zero_out", [None, False, True])
def test_what_autograd_is_given_instead(group, zero_out):
    """Zeros where the program asks for something, so that a tied weight's other gradient stays right."""
    layer = column(group, config_of(group), bias=False)
    layer.weight.main_grad = torch.zeros_like(layer.weight, requires_grad=False)
    layer.weight.grad_added_to_main_grad = False
    if zero_out is not None:
        layer.weight.zero_out_wgrad = zero_out
    hooked = []
    layer.weight.register_post_accumulate_grad_hook(lambda weight: hooked.append(weight.grad_added_to_main_grad))
    ((x, incoming),) = micro_batches(layer, group, 12, count=1)
    output, _ = layer(x)
    (output * incoming).sum().add((2.0 * layer.weight).sum()).backward()
    assert hooked == [True]
    assert_bit_equal(layer.weight.grad, torch.full_like(layer.weight, 2.0, requires_grad=False))
    assert layer.weight.main_grad.any()


@pytest.mark.ranks(2)
def test_a_missing_main_grad_is_told(group):
    for make in (column, row):
        layer = make(group, config_of(group))
        ((x, incoming),) = micro_batches(layer, group, 12, count=1)
        shape = rf"\[{layer.weight.size(0)}, {layer.weight.size(1)}\]"
        with pytest.raises(ConfigError, match=rf"weight of shape {shape} has none; set weight.main_grad = torch.zeros"):
            run(layer, x, incoming, 12)


@pytest.mark.ranks(2)
def test_a_frozen_weight_needs_no_main_grad(group):
    layer = column(group, config_of(group))
    layer.weight.requires_grad_(False)
    ((x, incoming),) = micro_batches(layer, group, 12, count=1)
    assert run(layer, x, incoming, 12).any()


def deferring(group, sequence_parallel, limit, fuse=True):
    """An output layer, and the lists that keep what it puts off."""
    config = config_of(group, sequence_parallel, defer_embedding_wgrad_compute=True, wgrad_deferral_limit=limit)
    # The config refuses it, since a schedule would lose the gradient; the function is able to.
    config.gradient_accumulation_fusion = fuse
    activations, gradients = [], []
    layer = column(group, config, bias=False, embedding_activation_buffer=activations, grad_output_buffer=gradients)
    return layer, activations, gradients


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize(
    ("sequence_parallel", "limit", "recompute", "fuse"),
    [(False, 0, True, False), (True, 2, False, True), (True, 0, True, True), (False, 2, True, False)],
)
def test_a_deferred_gradient_is_the_same(group, sequence_parallel, limit, recompute, fuse):
    s, count = 13, 4
    layer, activations, gradients = deferring(group, sequence_parallel, limit, fuse)
    plain = column(group, config_of(group, sequence_parallel, gradient_accumulation_fusion=False), bias=False)
    plain.load_state_dict(layer.state_dict())
    layer.weight.main_grad = torch.zeros_like(layer.weight, requires_grad=False)
    batches = micro_batches(layer, group, s, count=count)
    for x, incoming in batches:
        assert_bit_equal(run(layer, x, incoming, s, recompute), run(plain, x, incoming, s))
    kept = limit or count
    assert len(activations) == len(gradients) == kept
    if kept == count:
        assert not layer.weight.main_grad.any()
        assert layer.weight.grad is None
    with CollectiveCounter() as counter:
        drain_embedding_wgrad_compute(layer.config, activations, gradients, layer.weight, group)
    assert len(counter.launches) == (kept if layer.sequence_parallel else 0)
    assert activations == gradients == []
    total = layer.weight.main_grad if fuse else layer.weight.grad
    assert_close_to(total, plain.weight.grad, rtol_of_norm=1e-12)
    assert (layer.weight.grad is None) == fuse


@pytest.mark.ranks(2)
def test_what_cannot_be(group):
    weight = torch.zeros(3, 2)
    with pytest.raises(ShardingError, match="1 inputs and 0 output gradients were kept") as info:
        drain_embedding_wgrad_compute(ModelParallelConfig(), [weight], [], weight, group)
    assert isinstance(info.value, AssertionError)
    with pytest.raises(TopologyError, match="no group was given"):
        drain_embedding_wgrad_compute(ModelParallelConfig(sequence_parallel=True), [weight], [weight], weight, None)
    drain_embedding_wgrad_compute(ModelParallelConfig(sequence_parallel=True), [], [], weight, None)
    with pytest.raises(ConfigError, match="give both embedding_activation_buffer and grad_output_buffer"):
        column(group, config_of(group), grad_output_buffer=[])


@pytest.mark.ranks(2)
def test_only_an_output_layer_with_buffers_defers(group):
    layer = column(group, config_of(group, defer_embedding_wgrad_compute=True))
    layer.weight.main_grad = torch.zeros_like(layer.weight, requires_grad=False)
    ((x, incoming),) = micro_batches(layer, group, 5, count=1)
    run(layer, x, incoming, 5)
    assert layer.weight.main_grad.any()
