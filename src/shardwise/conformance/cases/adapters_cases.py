"""Low-rank adapters of split layers."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.conformance.case import case
from shardwise.conformance.dense_checks import check_layer, own_part, whole_of
from shardwise.conformance.dense_comparison import assert_close, assert_same_on_ranks, numbers, part
from shardwise.core.topology import Groups

S, B, I, O, R, SCALING = 4, 2, 6, 8, 3, 0.5  # noqa: E741 - the letters of the shapes


def _layer(target: Any, groups: Groups, kind: str, *, sequence: bool) -> tuple[Any, dict[str, Tensor]]:
    """Return the target's layer, and weight, A and B of the dense one."""
    params = {"weight": numbers(O, I), "a": numbers(R, I), "b": numbers(O, R)}
    layer = target.lora(*params.values(), SCALING, groups, kind=kind, sequence_length=S if sequence else None)
    return layer, params


def _apply(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, weight) + SCALING * F.linear(F.linear(x, a), b)


def _check(target: Any, groups: Groups, kind: str, *, sequence: bool = False, passes: int = 1) -> None:
    layer, params = _layer(target, groups, kind, sequence=sequence)
    positions = own_part(target, groups, 0) if sequence else whole_of
    features = own_part(target, groups, -1)
    into, out_of = (positions, features) if kind == "column" else (features, positions)
    batches = [(numbers(S, B, I), numbers(S, B, O)) for _ in range(passes)]
    dense = functools.partial(_apply, weight=params.pop("weight"))
    gradients = check_layer(target, groups, layer, dense, params, batches, into=into, out_of=out_of)
    for name in params:
        assert_same_on_ranks(gradients[name], f"the gradient of {name}", groups.tp)


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
        layer, params = _layer(target, groups, kind, sequence=False)
        x = numbers(S, B, I)
        with torch.no_grad():
            target.merge(layer)
            expected = _apply(x, **params)
            if kind == "column":
                assert_close(layer(x), part(expected, -1, groups.tp, target), "the output after merging", target)
            else:
                assert_close(layer(part(x, -1, groups.tp, target)), expected, "the output after merging", target)


@case("huggingface/peft, class of bug", "lora", tp=2)
def base_has_no_gradient(target: Any, groups: Groups) -> None:
    """The frozen weight gets no gradient, and is unchanged by a backward."""
    layer, _ = _layer(target, groups, "column", sequence=False)
    layer(numbers(S, B, I).requires_grad_()).sum().backward()
    names = {name for name, param in layer.named_parameters() if param.grad is not None}
    shapes = {tuple(param.shape) for name, param in layer.named_parameters() if name in names}
    assert (O // groups.tp.size(), I) not in shapes, f"the frozen weight has a gradient; those with one are {names}"
