"""Sequence parallelism: each rank holds its part of the positions outside of the layers."""

from typing import Any

import torch
import torch.nn.functional as F

from shardwise.conformance.case import case
from shardwise.conformance.dense import Sizes, batch
from shardwise.conformance.dense_checks import check_layer, check_model, own_part
from shardwise.conformance.dense_comparison import (
    assert_all_close,
    assert_close,
    assert_same_on_ranks,
    grad_of,
    numbers,
    part,
)
from shardwise.core.topology import Groups

B, H = 2, 6


def _check_norm(target: Any, groups: Groups, s: int, *, passes: int = 1) -> None:
    weight, bias = numbers(H), numbers(H)
    leaves = [each.clone().requires_grad_() for each in (weight, bias)]
    norm = target.norm(weight, bias, groups)
    for _ in range(passes):
        x, grad = numbers(s, B, H), numbers(s, B, H)
        norm(part(x, 0, groups.tp, target)).backward(part(grad, 0, groups.tp, target))
        F.layer_norm(x, (H,), leaves[0], leaves[1]).backward(grad)
    target.finalize_gradients(norm, groups)
    expected = {"weight": grad_of(leaves[0]), "bias": grad_of(leaves[1])}
    assert_all_close(target.whole_gradients(norm, groups), expected, "the gradient", target)


def _check_column(target: Any, groups: Groups, s: int, *, frozen: bool = False) -> None:
    x, weight, grad = numbers(s, B, H), numbers(8, H), numbers(s, B, 8)
    layer = target.column_linear(weight, None, groups, sequence_length=s)
    into, out_of = (own_part(target, groups, dim) for dim in (0, -1))
    params = {"weight": weight}
    check_layer(target, groups, layer, F.linear, params, [(x, grad)], into=into, out_of=out_of, frozen=frozen)


def _check_row(target: Any, groups: Groups, s: int) -> None:
    x, params, grad = numbers(s, B, 8), {"weight": numbers(H, 8), "bias": numbers(H)}, numbers(s, B, H)
    layer = target.row_linear(*params.values(), groups, sequence_length=s)
    into, out_of = (own_part(target, groups, dim) for dim in (-1, 0))
    check_layer(target, groups, layer, F.linear, params, [(x, grad)], into=into, out_of=out_of)


@case("NVIDIA/Megatron-LM#1446", "norm", tp=4)
def norm_gradients_are_summed(target: Any, groups: Groups) -> None:
    """The gradients of a norm over parts of the sequence are summed over the ranks."""
    _check_norm(target, groups, 8)


@case("EleutherAI/gpt-neox#1259", "norm", tp=2)
def norm_gradients_are_summed_once(target: Any, groups: Groups) -> None:
    """After several backward passes they are summed once: no average, and no sum of sums."""
    _check_norm(target, groups, 8, passes=3)


@case("NVIDIA/TransformerEngine#530", "column_linear.sequence_length", tp=2)
def column_gathers_the_sequence(target: Any, groups: Groups) -> None:
    """A column-parallel layer gathers the sequence, also for the gradient of its weight."""
    _check_column(target, groups, 8)


@case("NVIDIA/TransformerEngine#373", "column_linear.sequence_length", tp=2)
def frozen_column_gathers_the_sequence(target: Any, groups: Groups) -> None:
    """A frozen layer still gives the gradient of its part of the sequence."""
    _check_column(target, groups, 8, frozen=True)


@case("NVIDIA/Megatron-LM#236", "row_linear.sequence_length", tp=2)
def row_bias_gradient_is_summed(target: Any, groups: Groups) -> None:
    """A row-parallel layer adds its bias to its part of the sequence, and the bias's gradients are summed."""
    _check_row(target, groups, 8)


@case("pytorch/torchtitan#686", "norm", "uneven_sequence", tp=3)
def norm_of_uneven_parts(target: Any, groups: Groups) -> None:
    """A length of 7 on three ranks gives the dense gradients of a norm."""
    _check_norm(target, groups, 7)


@case("pytorch/torchtitan#686", "column_linear.sequence_length", "uneven_sequence", tp=2)
def column_of_uneven_parts(target: Any, groups: Groups) -> None:
    """A length of 7 on two ranks is gathered and scattered in full."""
    _check_column(target, groups, 7)


@case("pytorch/torchtitan#686", "row_linear.sequence_length", "uneven_sequence", tp=2)
def row_of_uneven_parts(target: Any, groups: Groups) -> None:
    """An output of length 7 is split between two ranks without padding."""
    _check_row(target, groups, 7)


@case("awslabs/slapo#20", "gather_sequence", tp=2)
def gather_sums_partial_gradients(target: Any, groups: Groups) -> None:
    """The backward of a gather in front of a split layer sums the ranks' gradients, not only splits them."""
    x, grads = numbers(8, B), numbers(groups.tp.size(), 8, B)
    given = part(x, 0, groups.tp, target).requires_grad_()
    output = target.gather_sequence(given, groups)
    assert_close(output, x, "the gathered sequence", target)
    output.backward(grads[groups.tp.rank()])
    assert_close(grad_of(given), part(grads.sum(0), 0, groups.tp, target), "the gradient", target)


@case("NVIDIA/Megatron-LM#1635", "scatter_sequence", tp=2)
def scatter_gathers_gradients(target: Any, groups: Groups) -> None:
    """The backward of a split of a whole sequence gathers, so that the ranks' gradients are the same."""
    x, grad = numbers(8, B).requires_grad_(), numbers(8, B)
    output = target.scatter_sequence(x, groups)
    assert_close(output, part(x.detach(), 0, groups.tp, target), "this rank's part", target)
    output.backward(part(grad, 0, groups.tp, target))
    assert_close(grad_of(x), grad, "the gradient", target)


@case("ByteDance-Seed/VeOmni#681", "reduce_scatter_sequence", tp=2)
def reduce_scatter_gathers_gradients(target: Any, groups: Groups) -> None:
    """A reduce-scatter sums and splits, and its backward gathers without a factor."""
    every, grad = numbers(groups.tp.size(), 8, B), numbers(8, B)
    x = every[groups.tp.rank()].clone().requires_grad_()
    output = target.reduce_scatter_sequence(x, groups)
    assert_close(output, part(every.sum(0), 0, groups.tp, target), "this rank's part of the sum", target)
    output.backward(part(grad, 0, groups.tp, target))
    assert_close(grad_of(x), grad, "the gradient", target)


@case("NVIDIA-NeMo/RL#3716", "language_model.sequence_parallel", tp=2)
def whole_model(target: Any, groups: Groups) -> None:
    """A model with sequence parallelism has the loss and all gradients of the dense model."""
    check_model(target, groups, Sizes(), sequence_parallel=True)


@case("NVIDIA-NeMo/RL#3716", "language_model.sequence_parallel", "uneven_sequence", tp=3)
def whole_model_of_uneven_parts(target: Any, groups: Groups) -> None:
    """The same holds for a length that the ranks do not divide."""
    sizes = Sizes(hidden=18, heads=3, kv_heads=3)
    check_model(target, groups, sizes, batches=[batch(sizes, s=7)], sequence_parallel=True)


@case("NVIDIA/apex#1686", "norm", "optimizer", tp=2)
def norms_stay_equal(target: Any, groups: Groups) -> None:
    """The ranks' copies of a norm are equal after optimizer steps."""
    norm = target.norm(torch.ones(H, dtype=torch.float64), torch.zeros(H, dtype=torch.float64), groups)
    optimizer = target.optimizer(norm, groups)
    for _ in range(2):
        norm(part(numbers(8, B, H), 0, groups.tp, target)).backward(part(numbers(8, B, H), 0, groups.tp, target))
        target.finalize_gradients(norm, groups)
        optimizer.step()
    for name, value in target.whole_parameters(norm, groups).items():
        assert_same_on_ranks(value, name, groups.tp)
