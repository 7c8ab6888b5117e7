"""Low-rank adapters of split layers."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.conformance.case import case
from shardwise.conformance.dense_comparison import (
    assert_all_close,
    assert_close,
    assert_same_on_ranks,
    grad_of,
    numbers,
    part,
)
from shardwise.core.topology import Groups

S, B, I, O, R, SCALING = 4, 2, 6, 8, 3, 0.5  # noqa: E741 - the letters of the shapes


def _layer(target: Any, groups: Groups, kind: str, *, sequence: bool) -> tuple[Any, list[Tensor]]:
    """Return the target's layer, and weight, A and B of the dense one."""
    weight, a, b = numbers(O, I), numbers(R, I), numbers(O, R)
    layer = target.lora(weight, a, b, SCALING, groups, kind=kind, sequence_length=S if sequence else None)
    return layer, [weight, a.clone().requires_grad_(), b.clone().requires_grad_()]


def _apply(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, weight) + SCALING * F.linear(F.linear(x, a), b)


def _check(target: Any, groups: Groups, kind: str, *, sequence: bool = False, passes: int = 1) -> None:
    layer, leaves = _layer(target, groups, kind, sequence=sequence)
    for _ in range(passes):
        x, grad = numbers(S, B, I), numbers(S, B, O)
        whole = x.clone().requires_grad_()
        expected = _apply(whole, *leaves)
        expected.backward(grad)
        positions = (lambda each: part(each, 0, groups.tp, target)) if sequence else (lambda each: each)
        features = lambda each: part(each, -1, groups.tp, target)  # noqa: E731
        into, out_of = (positions, features) if kind == "column" else (features, positions)
        given = into(x).clone().requires_grad_()
        output = layer(given)
        assert_close(output, out_of(expected), "the output", target)
        output.backward(out_of(grad).clone())
        assert_close(grad_of(given), into(grad_of(whole)), "the gradient of the input", target)
    target.finalize_gradients(layer, groups)
    actual = target.whole_gradients(layer, groups)
    assert_all_close(actual, {"a": grad_of(leaves[1]), "b": grad_of(leaves[2])}, "the gradient", target)
    for name in ("a", "b"):
        assert_same_on_ranks(actual[name], f"the gradient of {name}", groups.tp)


@case("ISEEKYAN/Megatron-LM#131", "lora", tp=2)
def column_factors(target: Any, groups: Groups) -> None:
    """An adapter of a column-parallel layer has the dense output, and its whole factor A the sum of the gradients."""
    _check(target, groups, "column")


@case("NVIDIA-NeMo/Megatron-Bridge#6089", "lora", tp=2)
def row_factors(target: Any, groups: Groups) -> None:
    """An adapter of a row-parallel layer adds its product once, and has the dense gradients."""
    _check(target, groups, "row")


@case("modelscope/mcore-bridge#173", "lora", tp=2)
def column_factors_with_sequence_parallelism(target: Any, groups: Groups) -> None:
    """The factor A sees one part of the sequence on each rank, and its gradients are summed."""
    _check(target, groups, "column", sequence=True)


@case("modelscope/mcore-bridge#173", "lora", tp=2)
def row_factors_with_sequence_parallelism(target: Any, groups: Groups) -> None:
    """The factor B sees one part of the sequence on each rank, and its gradients are summed."""
    _check(target, groups, "row", sequence=True)


@case("NVIDIA-NeMo/Automodel#3477", "lora", tp=2)
def factors_under_accumulation(target: Any, groups: Groups) -> None:
    """After three micro-batches the factors' gradients are summed over the ranks once."""
    _check(target, groups, "column", passes=3)


@case("huggingface/peft, class of bug", "lora", "merge", tp=2)
def merged_equals_unmerged(target: Any, groups: Groups) -> None:
    """The merged weight gives the output that weight and adapter gave."""
    for kind in ("column", "row"):
        layer, leaves = _layer(target, groups, kind, sequence=False)
        x = numbers(S, B, I)
        with torch.no_grad():
            target.merge(layer)
            expected = _apply(x, *leaves)
            if kind == "column":
                assert_close(layer(x), part(expected, -1, groups.tp, target), "the output after merging", target)
            else:
                assert_close(layer(part(x, -1, groups.tp, target)), expected, "the output after merging", target)


@case("huggingface/peft, class of bug", "lora", tp=2)
def base_has_no_gradient(target: Any, groups: Groups) -> None:
    """The frozen weight gets no gradient, and is unchanged by a backward."""
    layer, leaves = _layer(target, groups, "column", sequence=False)
    layer(numbers(S, B, I).requires_grad_()).sum().backward()
    names = {name for name, param in layer.named_parameters() if param.grad is not None}
    shapes = {tuple(param.shape) for name, param in layer.named_parameters() if name in names}
    assert (O // groups.tp.size(), I) not in shapes, f"the frozen weight has a gradient; those with one are {names}"
    assert leaves[0].grad is None
