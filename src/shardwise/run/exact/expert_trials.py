"""Trials of the products of experts and routers that exact runs rely on; see ``layer_trials``.

Two experts on several threads are compared with each of them alone on one thread, as on ranks that hold one expert.
The numbers of tokens are one, a quarter of a micro-batch, and all. A router's softmax is compared on one thread and on
several.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.exact.expert_products import linear_by_source
from shardwise.models.experts.exact_moe import ExactExperts, ExactRouter
from shardwise.run.exact.layer_trials import MOST_MULTIPLICATIONS, ResultPair, TrialRun, on_several_threads, on_threads


class ExpertKind(NamedTuple):
    """A matrix ``[rows, columns]`` of an expert or a router; if ``transposed``, its input has ``rows`` features."""

    what: str
    rows: int
    columns: int
    transposed: bool
    has_bias: bool
    dtype: torch.dtype


def expert_kinds(run: TrialRun) -> set[ExpertKind]:
    """Return the kinds of matrices of a model's experts and routers."""
    kinds = set()
    for layer in run.layers(ExactExperts):
        for what, weight, bias in (("up", layer.up, layer.up_bias), ("down", layer.down, layer.down_bias)):
            rows, columns = weight.size(0) // layer.num_own, weight.size(1)
            kinds.add(ExpertKind(f"an expert's {what}", rows, columns, what == "down", bias is not None, run.dtype))
    wide = torch.promote_types(run.dtype, torch.float32)
    for router in run.layers(ExactRouter):
        rows, columns = router.weight.shape
        kinds.add(ExpertKind("a router's", rows, columns, False, router.bias is not None, wide))
    return kinds


def try_experts(run: TrialRun, kind: ExpertKind, parts: int) -> Iterator[ResultPair]:
    """Compare the output and all gradients of two matrices with those of each."""
    widths = (kind.rows, kind.columns) if kind.transposed else (kind.columns, kind.rows)
    most = max(1, min(run.rows, MOST_MULTIPLICATIONS // (kind.rows * kind.columns)))
    params = [run.numbers(2, kind.rows, kind.columns)] + [run.numbers(2, widths[1])] * kind.has_bias
    for number in sorted({1, -(-most // 4), most}):
        tensors = [each.to(kind.dtype) for each in (*(run.numbers(2, number, width) for width in widths), *params)]
        multiplied = partial(_multiplied, *tensors, transposed=kind.transposed)
        whole = on_several_threads(partial(multiplied, slice(0, 2)))
        each = [on_threads(1, partial(multiplied, slice(place, place + 1))) for place in range(2)]
        names = ("output", "input gradient", "weight gradient", "bias gradient")
        shapes = f"{[number, widths[0]]} by {[widths[1], widths[0]]}"
        for name, expected, *found in zip(names, whole, *each, strict=False):
            yield ResultPair(torch.cat(found), expected, f"the {name} of {kind.what} product, {shapes}, on one thread,")


def router_softmaxes(run: TrialRun) -> dict[int, ExactRouter]:
    """Return a router for each number of experts."""
    return {len(router.weight): router for router in run.layers(ExactRouter)}


def try_router_softmax(run: TrialRun, num: int, _: int) -> Iterator[ResultPair]:
    """Compare the softmax of a micro-batch's tokens over ``num`` experts, and its gradient."""
    logits, incoming = (
        each.to(torch.promote_types(run.dtype, torch.float32)) for each in run.numbers(2, run.rows, num)
    )
    activation = router_softmaxes(run)[num]._activation

    def scored() -> tuple[Tensor, Tensor]:
        leaf = logits.clone().requires_grad_()
        with torch.enable_grad():
            scores = activation.softmax(leaf)
            (gradient,) = torch.autograd.grad(scores, leaf, incoming)
        return scores.detach(), gradient

    each = zip(("softmax", "gradient of the softmax"), on_threads(1, scored), on_several_threads(scored), strict=True)
    for name, found, expected in each:
        yield ResultPair(found, expected, f"the {name} of {run.rows:,} tokens over {num} experts, on one thread,")


def _multiplied(*given: Any, transposed: bool) -> list[Tensor]:
    """Return output and gradients of some of the matrices; ``given`` are input, output gradient, parameters, slice."""
    *tensors, matrices = given
    input_, incoming, *params = (each[matrices].flatten(0, 1).clone() for each in tensors)
    leaves = [each.requires_grad_() for each in (input_, *params)]
    counts = [[tensors[0].size(1)] * (matrices.stop - matrices.start)]
    with torch.enable_grad():
        bias = leaves[2] if len(leaves) > 2 else None
        output = linear_by_source(leaves[0], leaves[1], bias, counts, transposed=transposed)
        return [output.detach(), *torch.autograd.grad(output, leaves, incoming)]
