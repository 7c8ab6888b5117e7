"""Column- and row-parallel linear layers."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.conformance.case import case
from shardwise.conformance.dense_checks import check_layer, own_part, whole_of
from shardwise.conformance.dense_comparison import assert_close, grad_of, numbers, part
from shardwise.core.topology import Groups

S, B = 5, 2


def _params(i: int, o: int) -> dict[str, Tensor]:
    return {"weight": numbers(o, i), "bias": numbers(o)}


def _check_column(target: Any, groups: Groups, i: int, o: int, **options: bool) -> None:
    x, params, grad = numbers(S, B, i), _params(i, o), numbers(S, B, o)
    layer = target.column_linear(*params.values(), groups, **options)
    own = whole_of if options else own_part(target, groups, -1)
    check_layer(target, groups, layer, F.linear, params, [(x, grad)], out_of=own)


def _check_row(target: Any, groups: Groups, i: int, o: int, **options: bool) -> None:
    x, params, grad = numbers(S, B, i), _params(i, o), numbers(S, B, o)
    layer = target.row_linear(*params.values(), groups, **options)
    own = whole_of if options else own_part(target, groups, -1)
    check_layer(target, groups, layer, F.linear, params, [(x, grad)], into=own)


@case("Dao-AILab/flash-attention#201", "column_linear", tp=2)
def column_equals_dense(target: Any, groups: Groups) -> None:
    """A column-parallel layer has the output and the gradients of the dense layer."""
    _check_column(target, groups, 6, 8)


@case("Dao-AILab/flash-attention#201", "row_linear", tp=2)
def row_equals_dense(target: Any, groups: Groups) -> None:
    """A row-parallel layer has the output and the gradients of the dense layer."""
    _check_row(target, groups, 6, 8)


@case("Wenyueh/MinivLLM#80", "row_linear", tp=2)
def bias_is_added_once(target: Any, groups: Groups) -> None:
    """A row-parallel layer adds its bias once, not once per rank."""
    bias = torch.full((4,), 100.0, dtype=torch.float64)
    layer = target.row_linear(numbers(4, 6), bias, groups)
    output = layer(torch.zeros(S, B, 3, dtype=torch.float64))
    assert_close(output, bias.expand(S, B, 4), "the output for zeros", target)


@case("PaddlePaddle/Paddle#35186", "row_linear", tp=2)
def bias_gradient_is_counted_once(target: Any, groups: Groups) -> None:
    """The gradient of a row-parallel layer's bias is that of the dense layer, on every rank."""
    layer, grad = target.row_linear(numbers(4, 6), numbers(4), groups), numbers(S, B, 4)
    layer(part(numbers(S, B, 6), -1, groups.tp, target)).backward(grad)
    target.finalize_gradients(layer, groups)
    actual = target.whole_gradients(layer, groups)["bias"]
    assert_close(actual, grad.sum((0, 1)), "the gradient of bias", target)


@case("fangwei123456/spikingjelly#704", "column_linear", tp=4)
def input_gradient_is_summed(target: Any, groups: Groups) -> None:
    """The gradient of a column-parallel layer's input is the sum over the ranks."""
    weight, x = numbers(8, 3), numbers(S, B, 3).requires_grad_()
    target.column_linear(weight, None, groups)(x).sum().backward()
    assert_close(grad_of(x), weight.sum(0).expand(S, B, 3), "the gradient of the input", target)


@case("pytorch/pytorch#105213", "column_linear", tp=2)
def output_is_this_ranks_part(target: Any, groups: Groups) -> None:
    """Without gather_output each rank returns its own features, in the order of the ranks."""
    weight, x = numbers(6, 3), numbers(S, B, 3)
    output = target.column_linear(weight, None, groups)(x)
    assert_close(output, part(F.linear(x, weight), -1, groups.tp, target), "the output", target)


@case("hpcaitech/ColossalAI#579", "column_linear.gather_output", tp=2)
def gathered_output_equals_dense(target: Any, groups: Groups) -> None:
    """With gather_output a layer returns all features, and the gradient is split, not summed."""
    _check_column(target, groups, 6, 8, gather_output=True)


@case("hpcaitech/ColossalAI#579", "row_linear.input_is_parallel", tp=2)
def whole_input_is_split(target: Any, groups: Groups) -> None:
    """A row-parallel layer splits an input that is not parallel, and gathers the gradient."""
    _check_row(target, groups, 6, 8, input_is_parallel=False)


@case("pytorch/pytorch#150336", "column_linear", "uneven", tp=3)
def uneven_output_features(target: Any, groups: Groups) -> None:
    """Seven output features on three ranks give the dense result."""
    _check_column(target, groups, 5, 7)


@case("pytorch/pytorch#150336", "row_linear", "uneven", tp=3)
def uneven_input_features(target: Any, groups: Groups) -> None:
    """Seven input features on three ranks give the dense result."""
    _check_row(target, groups, 7, 5)


@case("pytorch/pytorch#150336", "column_linear.gather_output", "uneven", tp=3)
def uneven_gathered_output(target: Any, groups: Groups) -> None:
    """Parts of different sizes are gathered in full."""
    _check_column(target, groups, 5, 7, gather_output=True)


@case("pytorch/pytorch#108869", "column_linear", "uneven", tp=4)
def rank_without_features(target: Any, groups: Groups) -> None:
    """A rank with no output feature takes part, and the sum of gradients is right."""
    _check_column(target, groups, 5, 3)


@case("NVIDIA/apex#1517", "column_linear", tp=2)
def frozen_column_keeps_input_gradient(target: Any, groups: Groups) -> None:
    """A frozen column-parallel layer still sums the gradient of its input."""
    weight, x, grad = numbers(8, 3), numbers(S, B, 3), numbers(S, B, 8)
    layer, own = target.column_linear(weight, None, groups), own_part(target, groups, -1)
    check_layer(target, groups, layer, F.linear, {"weight": weight}, [(x, grad)], out_of=own, frozen=True)


@case("NVIDIA/Megatron-LM#670", "row_linear", tp=2)
def frozen_row_keeps_input_gradient(target: Any, groups: Groups) -> None:
    """A frozen row-parallel layer still gives the gradient of its input."""
    params, x, grad = _params(6, 4), numbers(S, B, 6), numbers(S, B, 4)
    layer, own = target.row_linear(*params.values(), groups), own_part(target, groups, -1)
    check_layer(target, groups, layer, F.linear, params, [(x, grad)], into=own, frozen=True)


@case("NVIDIA/Megatron-LM, class of bug", "row_linear.skip_bias_add", tp=2)
def skipped_bias_is_returned(target: Any, groups: Groups) -> None:
    """With skip_bias_add a row-parallel layer returns the bias instead of adding it, and the bias gets its gradient."""
    x, weight, bias, grad = numbers(S, B, 6), numbers(4, 6), numbers(4), numbers(S, B, 4)
    layer = target.row_linear(weight, bias, groups, skip_bias_add=True)
    output, returned = layer(part(x, -1, groups.tp, target))
    assert_close(output, F.linear(x, weight), "the output without bias", target)
    assert_close(returned, bias, "the bias", target)
    (output + returned).backward(grad)
    target.finalize_gradients(layer, groups)
    assert_close(target.whole_gradients(layer, groups)["bias"], grad.sum((0, 1)), "the gradient of bias", target)


@case("NVIDIA/Megatron-LM, class of bug", "column_linear.skip_bias_add", tp=2)
def skipped_column_bias_is_this_ranks(target: Any, groups: Groups) -> None:
    """With skip_bias_add a column-parallel layer returns its own part of the bias."""
    x, weight, bias = numbers(S, B, 6), numbers(4, 6), numbers(4)
    output, returned = target.column_linear(weight, bias, groups, skip_bias_add=True)(x)
    assert_close(output, part(F.linear(x, weight), -1, groups.tp, target), "the output without bias", target)
    assert_close(returned, part(bias, 0, groups.tp, target), "the bias", target)


@case("NVIDIA/Megatron-LM, class of bug", "column_linear", "row_linear", tp=2)
def gradients_accumulate(target: Any, groups: Groups) -> None:
    """After three backward passes the gradients are the sum of three, not the last or a sum of partial sums."""
    first, second = numbers(8, 6), numbers(4, 8)
    up, down = target.column_linear(first, None, groups), target.row_linear(second, numbers(4), groups)
    leaves = [each.clone().requires_grad_() for each in (first, second)]
    for _ in range(3):
        x = numbers(S, B, 6)
        down(up(x).tanh()).square().sum().backward()
        # The bias is in both outputs alike.
        bias = target.whole_parameters(down, groups)["bias"].detach()
        F.linear(F.linear(x, leaves[0]).tanh(), leaves[1], bias).square().sum().backward()
    for layer, leaf in ((up, leaves[0]), (down, leaves[1])):
        target.finalize_gradients(layer, groups)
        assert_close(target.whole_gradients(layer, groups)["weight"], grad_of(leaf), "the gradient of weight", target)


@case("NovaSky-AI/SkyRL#1886", "column_linear", tp=2)
def transposed_gradient_is_summed(target: Any, groups: Groups) -> None:
    """A layer sums the input's gradient also if input and output gradient are transposed views."""
    weight, x, grad = numbers(8, 3), numbers(B, S, 3), numbers(B, S, 8)
    given, whole = x.clone().requires_grad_(), x.clone().requires_grad_()
    target.column_linear(weight, None, groups)(given.transpose(0, 1)).backward(
        part(grad, -1, groups.tp, target).transpose(0, 1)
    )
    F.linear(whole, weight).backward(grad)
    assert_close(grad_of(given), grad_of(whole), "the gradient of the input", target)


@case("NovaSky-AI/SkyRL#1886", "copy", tp=2)
def copied_input_sums_a_transposed_gradient(target: Any, groups: Groups) -> None:
    """The copy into a parallel region sums its gradient also if that is not contiguous."""
    x, grad = numbers(3, 4).requires_grad_(), numbers(groups.tp.size(), 4, 3)
    target.copy(x, groups).backward(grad[groups.tp.rank()].t())
    assert_close(grad_of(x), grad.sum(0).t(), "the gradient", target)


@case("NovaSky-AI/SkyRL#1886", "reduce", tp=2)
def reduced_output_sums_a_transposed_tensor(target: Any, groups: Groups) -> None:
    """The sum at the end of a parallel region is right for a tensor that is not contiguous."""
    every = numbers(groups.tp.size(), 4, 3)
    assert_close(target.reduce(every[groups.tp.rank()].t(), groups), every.sum(0).t(), "the sum", target)


@case("PyTorch, class of bug", "column_linear", "row_linear", tp=2)
def inputs_are_unmodified(target: Any, groups: Groups) -> None:
    """Layers modify neither their input nor the gradient of their output."""
    x, grad = numbers(S, B, 6), numbers(S, B, 4)
    given, given_grad = x.clone(), grad.clone()
    up, down = target.column_linear(numbers(8, 6), None, groups), target.row_linear(numbers(4, 8), numbers(4), groups)
    down(up(given.requires_grad_())).backward(given_grad)
    assert_close(given, x, "the input after the call", target)
    assert_close(given_grad, grad, "the output's gradient after the backward", target)
