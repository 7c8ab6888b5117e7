"""What programs written for Megatron do with its linear layers beyond calling them."""

import contextlib
import copy
import os
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from harness.on_pretended_gpu import fake_tensors, join
from harness.parity import assert_bit_equal, assert_close_to, gather_shards
from torch.autograd import Function

from shardwise.core.communication.collectives import split_for_rank
from shardwise.core.initialization import Normal
from shardwise.megatron.config import ModelParallelConfig
from shardwise.megatron.errors import AssertedConfigError
from shardwise.nn.column import ColumnLinear
from shardwise.nn.recompute import recomputed
from shardwise.tensor_parallel.layers import (
    ColumnParallelLinear,
    LinearWithFrozenWeight,
    LinearWithGradAccumulationAndAsyncCommunication,
    RowParallelLinear,
    drain_embedding_wgrad_compute,
    linear_with_frozen_weight,
    linear_with_grad_accumulation_and_async_allreduce,
)

I, O, S, B = 7, 13, 5, 2  # noqa: E741


def config_of(**settings):
    return ModelParallelConfig(params_dtype=torch.float64, **settings)


def column(group, kind=ColumnParallelLinear, config=None, **options):
    return kind(I, O, config=config or config_of(), init_method=Normal(1.0), tp_group=group, **options)


def row(group, kind=RowParallelLinear, config=None, **options):
    options = {"bias": True, "input_is_parallel": True, "skip_bias_add": False} | options
    return kind(O, I, config=config or config_of(), init_method=Normal(1.0), tp_group=group, **options)


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def dense(layer, x, incoming):
    """Output, input gradient and weight gradient of the whole layer."""
    weight = gather_shards(layer.weight.detach(), layer.param_layouts["weight"], layer.group).requires_grad_()
    bias = layer.bias.detach()
    if layer.param_layouts["bias"].dim is not None:
        bias = gather_shards(bias, layer.param_layouts["bias"], layer.group)
    x = x.clone().requires_grad_()
    output = F.linear(x, weight, bias)
    output.backward(incoming)
    return output.detach(), x.grad, layer.param_layouts["weight"].take(weight.grad, layer.group.rank())


class TestDeferredInputs:
    def layer(self, group, limit, kind=ColumnParallelLinear):
        config = config_of(defer_embedding_wgrad_compute=True, wgrad_deferral_limit=limit)
        return column(group, kind, config, bias=False, embedding_activation_buffer=[], grad_output_buffer=[])

    @pytest.mark.ranks(2)
    @pytest.mark.parametrize("limit", [0, 2])
    def test_are_there_from_the_forward_on(self, group, limit):
        layer = self.layer(group, limit)
        inputs, gradients = layer.embedding_activation_buffer, layer.grad_output_buffer
        xs = [drawn(S, B, I) for _ in range(3)]
        with torch.no_grad():
            layer(xs[0])
        outputs = [layer(x)[0] for x in xs]
        assert [id(x) for x in inputs] == [id(x) for x in (xs[:2] if limit else xs)]
        assert gradients == []
        incoming = [drawn(*output.shape) for output in outputs]
        for i in (1, 2, 0):
            outputs[i].backward(incoming[i])
        # Those whose output gradient waits are in its order.
        order = (1, 2) if limit else (1, 2, 0)
        assert [id(x) for x in inputs] == [id(xs[i]) for i in order]
        for gradient, i in zip(gradients, order, strict=True):
            assert_bit_equal(gradient, incoming[i])
        drain_embedding_wgrad_compute(layer.config, inputs, gradients, layer.weight, group)
        expected = sum(g.flatten(0, 1).t() @ x.flatten(0, 1) for g, x in zip(incoming, xs, strict=True))
        assert_close_to(layer.weight.grad, expected, rtol_of_norm=1e-12)

    @pytest.mark.ranks(2)
    def test_of_what_is_recomputed_come_with_the_backward(self, group):
        layer = self.layer(group, 0)
        output = recomputed(layer, drawn(S, B, I).requires_grad_())[0]
        assert layer.embedding_activation_buffer == []
        output.sum().backward()
        assert len(layer.embedding_activation_buffer) == len(layer.grad_output_buffer) == 1
        copied = copy.deepcopy(layer)
        copied(drawn(S, B, I))
        assert (len(copied.embedding_activation_buffer), len(layer.embedding_activation_buffer)) == (1, 1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("deferred", [False, True])
def test_megatron_fsdp_hands_out_a_new_main_grad_for_each_backward(group, deferred):
    config = config_of(gradient_accumulation_fusion=True)
    layer = column(group, config=config, bias=False, embedding_activation_buffer=[], grad_output_buffer=[])
    handed_out = []

    def get_main_grad():
        handed_out.append(torch.full_like(layer.weight, torch.nan, requires_grad=False))
        return handed_out[-1]

    layer.weight.__fsdp_param__ = True
    layer.weight.get_main_grad = get_main_grad
    xs, incoming = [drawn(S, B, I) for _ in range(2)], drawn(S, B, layer.weight.size(0))
    each = [incoming.flatten(0, 1).t() @ x.flatten(0, 1) for x in xs]
    if deferred:
        # One for all that waited.
        drain_embedding_wgrad_compute(config, list(xs), [incoming] * 2, layer.weight, group)
        assert len(handed_out) == 1
        assert_close_to(layer.weight.main_grad, sum(each), rtol_of_norm=1e-12)
        return
    for i, x in enumerate(xs):
        layer(x)[0].backward(incoming)
        assert layer.weight.main_grad is handed_out[i]
        assert_close_to(layer.weight.main_grad, each[i], rtol_of_norm=1e-12)
    assert layer.weight.grad is None


class Doubling:
    """A program's layer that replaces the product, as adapters and quantised layers do."""

    def _forward_impl(self, input, weight, *args, **kwargs):
        self.seen = kwargs
        return 2 * super()._forward_impl(input, weight, *args, **kwargs)


class DoublingColumn(Doubling, ColumnParallelLinear):
    pass


class DoublingRow(Doubling, RowParallelLinear):
    pass


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_a_product_of_a_program_s_own(group, sequence_parallel, frozen):
    config = config_of(sequence_parallel=sequence_parallel)
    up, down = column(group, DoublingColumn, config), row(group, DoublingRow, config)
    plain_up, plain_down = column(group, config=config), row(group, config=config)
    for own, plain in ((up, plain_up), (down, plain_down)):
        plain.load_state_dict(own.state_dict())
        for layer in (own, plain):
            layer.weight.requires_grad_(not frozen)
            torch.nn.init.ones_(layer.bias)
    whole = drawn(S, B, I)
    results = []
    for first, second, factor in ((up, down, 1), (plain_up, plain_down, 2)):
        shard = split_for_rank(whole, group=group, dim=0) if sequence_parallel else whole
        x = shard.clone().requires_grad_()
        options = {"sequence_length": S} if sequence_parallel else {}
        hidden = factor * first(x, **options)[0]
        output = factor * (second(hidden)[0] - second.bias) + second.bias
        output.square().sum().backward()
        results.append([output, x.grad, first.bias.grad, second.bias.grad])
        results[-1] += [] if frozen else [first.weight.grad, second.weight.grad]
    for actual, expected in zip(*results, strict=True):
        assert_close_to(actual, expected, rtol_of_norm=1e-12)
    reduces = not sequence_parallel
    assert (up.seen["allreduce_dgrad"], up.seen["sequence_parallel"]) == (reduces, sequence_parallel)
    # The sum over the ranks comes after the row layer's product, and the bias after that.
    assert (down.seen["allreduce_dgrad"], down.seen["sequence_parallel"], down.seen["bias"]) == (False, False, None)
    assert up.seen["grad_output_buffer"] is up.seen["wgrad_deferral_limit"] is None
    assert "output_dtype" not in up.seen
    up.output_dtype = torch.float32
    assert up(x.detach(), **options)[0].dtype is torch.float32
    assert up.seen["output_dtype"] is torch.float32


@pytest.mark.ranks(2)
def test_a_product_of_its_own_defers_too_and_may_be_set_on_one_layer(group):
    layer = TestDeferredInputs().layer(group, 0, DoublingColumn)
    x = drawn(S, B, I)
    output = layer(x)[0]
    assert [id(each) for each in layer.embedding_activation_buffer] == [id(x)]
    output.backward(torch.ones_like(output))
    drain_embedding_wgrad_compute(
        layer.config, layer.embedding_activation_buffer, layer.grad_output_buffer, layer.weight, group
    )
    expected = (2 * torch.ones_like(output)).flatten(0, 1).t() @ x.flatten(0, 1)
    assert_close_to(layer.weight.grad, expected, rtol_of_norm=1e-12)
    other = column(group)
    whole = other(x)[0]
    other._forward_impl = lambda input, weight, **kwargs: 3 * F.linear(input, weight, kwargs["bias"])
    assert_close_to(other(x)[0], 3 * whole, rtol_of_norm=1e-12)


@pytest.mark.ranks(2)
def test_a_frozen_weight_has_no_gradient_that_could_wait(group):
    x, weight = drawn(S, B, I), drawn(4, I)
    for arguments in (([], None), (None, 0)):
        with pytest.raises(AssertedConfigError, match="a frozen weight has no gradient that could be put off"):
            linear_with_frozen_weight(x, weight, None, False, True, False, group, *arguments)


@pytest.mark.ranks(2)
def test_activations_are_not_taken_to_the_cpu(group):
    with pytest.warns(UserWarning, match="cpu_offloading changes nothing"):
        config = config_of(cpu_offloading=True)
    layers = column(group, config=config), row(group, config=config)
    x = {ColumnParallelLinear: drawn(S, B, I), RowParallelLinear: drawn(S, B, layers[1].weight.size(1))}
    expected = [layer(x[type(layer)])[0] for layer in layers]
    config._cpu_offloading_context = types.SimpleNamespace(inside_context=True)
    for layer in layers:
        with pytest.raises(AssertedConfigError, match=r"_cpu_offloading_context with cpu_offloading=True"):
            layer(x[type(layer)])
    for context in (types.SimpleNamespace(inside_context=False), contextlib.nullcontext()):
        config._cpu_offloading_context = context
        for layer, output in zip(layers, expected, strict=True):
            assert_bit_equal(layer(x[type(layer)])[0], output)


def told_of_connections():
    """Which calls warn, on a rank of two GPUs."""
    group = join(world_size=2)
    function, told = linear_with_grad_accumulation_and_async_allreduce, []

    def call(*flags, device="cuda"):
        x, weight = torch.ones(4, 2, I, device=device), torch.ones(3, I, device=device)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            function(x, weight, None, False, *flags, tp_group=group)
        told.append([str(each.message).split(" is ")[0] for each in found])

    with fake_tensors():
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        call(True, False)
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
        call(False, False)
        call(True, False, device="cpu")
        before = function.warned
        call(False, True)
        call(True, False)
        after = function.warned
        function.warned = False
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            column(group)
            column(group)
            row(group)
    return told, (before, after), len(found)


def test_what_hides_collectives_is_told_once_where_there_is_something_to_hide(pretended_gpu):
    told, warned, by_layers = pretended_gpu(told_of_connections)
    assert told == [[], [], [], ["CUDA_DEVICE_MAX_CONNECTIONS"], []]
    assert warned == (False, True)
    assert by_layers == 1


@pytest.mark.ranks(2)
def test_the_functions_are_autograd_s(group):
    """Their forward and backward work in a function of a program's own, as Megatron's do."""
    layer = column(group)
    whole, incoming = drawn(4, B, I), drawn(4, B, O)
    output, grad_input, grad_weight = dense(layer, whole, incoming)
    local = ColumnLinear.gather  # What is compared lies on every rank.
    incoming = split_for_rank(incoming, group=group, dim=-1).contiguous()
    both = LinearWithGradAccumulationAndAsyncCommunication, LinearWithFrozenWeight
    assert all(issubclass(function, Function) for function in both)
    flags = {both[0]: (False, True, False, None, 0, group), both[1]: (True, group)}
    for function in both:

        class Own(Function):
            @staticmethod
            def forward(ctx, *args, function=function):
                return function.forward(ctx, *args)

            @staticmethod
            def backward(ctx, grad_output, function=function):
                return function.backward(ctx, grad_output)

        for apply in (function.apply, Own.apply):
            x = whole.clone().requires_grad_()
            weight, bias = (param.detach().clone().requires_grad_() for param in (layer.weight, layer.bias))
            result = apply(x, weight, bias, *flags[function])
            result.backward(incoming)
            assert_close_to(local(layer, result.detach()), output, rtol_of_norm=1e-12)
            assert_close_to(x.grad, grad_input, rtol_of_norm=1e-12)
            assert_close_to(bias.grad, incoming.sum((0, 1)), rtol_of_norm=1e-12)
            assert (weight.grad is None) == (function is LinearWithFrozenWeight)
            if weight.grad is not None:
                assert_close_to(weight.grad, grad_weight, rtol_of_norm=1e-12)

        # A context that a program makes itself says nothing but what it was given.
        class Context(types.SimpleNamespace):
            def save_for_backward(self, *tensors):
                self.saved_tensors = tensors

        ctx = Context()
        function.forward(ctx, whole, layer.weight.detach(), layer.bias.detach(), *flags[function])
        gradients = function.backward(ctx, incoming)
        assert len(gradients) == 3 + len(flags[function])
        assert_close_to(gradients[0], grad_input, rtol_of_norm=1e-12)


@pytest.mark.ranks(2)
def test_apply_with_sequence_parallelism_fusion_a_buffer_and_autocast(group):
    layer = column(group, bias=False)
    weight = layer.weight
    whole, incoming = drawn(4, B, I), drawn(4, B, weight.size(0))
    x = split_for_rank(whole, group=group, dim=0).requires_grad_()
    expected = incoming.flatten(0, 1).t() @ whole.flatten(0, 1)
    apply = LinearWithGradAccumulationAndAsyncCommunication.apply
    weight.main_grad = torch.zeros_like(weight, requires_grad=False)
    apply(x, weight, None, True, False, True, None, 0, group).backward(incoming)
    assert_close_to(weight.main_grad, expected, rtol_of_norm=1e-12)
    assert weight.grad is None
    buffer = []
    apply(x, weight, None, False, False, True, buffer, 1, group).backward(incoming)
    apply(x, weight, None, False, False, True, buffer, 1, group).backward(incoming)
    assert_bit_equal(buffer.pop(), incoming)
    assert buffer == []
    assert_close_to(weight.grad, expected, rtol_of_norm=1e-12)
    narrow = [tensor.detach().float().requires_grad_() for tensor in (whole, weight)]
    with torch.autocast("cpu", torch.bfloat16):
        output = apply(*narrow, None, False, True, False, None, 0, group)
    assert output.dtype is torch.bfloat16
    output.sum().backward()
    assert narrow[1].grad.dtype is torch.float32
    assert_close_to(
        narrow[1].grad, whole.flatten(0, 1).sum(0).float().expand_as(narrow[1]).contiguous(), rtol_of_norm=2e-2
    )
