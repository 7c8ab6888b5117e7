"""Whether what every rank holds whole has the bits on which exact runs rely; see ``exact_check``.

Norms, biases of row-parallel layers and the factors of adapters that are not split: their gradients are sums over
tokens, part by part of the sequence. Compared are all parts on several threads, and each rank's on one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from shardwise.core.communication.trees import tree_sum
from shardwise.models.adapters.lora_layers import LoraLinear
from shardwise.nn import RowLinear
from shardwise.nn.exact import add_bias_by_parts, linear_by_parts, norm_by_parts
from shardwise.nn.parallel_linear import ParallelLinear
from shardwise.run.exact_trials.exact_trials import (
    Trials,
    compare,
    how_split,
    on_one_thread,
    on_several_threads,
    powers_of_two,
)

# Of some of the sequence's tokens, and the number of parts that they are.
_ByParts = Callable[[Tensor, int], Tensor]


def try_rows(trials: Trials, model: nn.Module, *, batch: int, length: int) -> None:
    """Try each kind of norm, bias and factor of a model; arguments as ``try_attention``'s."""

    def run(what: str, function: _ByParts, params: Sequence[Tensor], in_features: int, out_features: int) -> None:
        input_, incoming = (trials.numbers(length, batch, width) for width in (in_features, out_features))
        trials.run(partial(_try, what, function, params, input_, incoming))

    for norm in map(copy.deepcopy, _norms(model).values()):
        params = list(norm.parameters())
        for param in params:
            param.copy_(trials.numbers(*param.shape)).requires_grad_()
        width = params[0].numel()
        run(f"a {type(norm).__name__} of {width} features", partial(norm_by_parts, norm), params, width, width)

    def biased(bias: Tensor, part: Tensor, number: int) -> Tensor:
        return add_bias_by_parts(part, bias, number)

    def multiplied(factor: Tensor, part: Tensor, number: int) -> Tensor:
        return linear_by_parts(part, factor, number)

    for width in sorted(_biases(model)):
        bias = trials.numbers(width).requires_grad_()
        run(f"a bias of {width} features", partial(biased, bias), [bias], width, width)
    for out_features, in_features in sorted(_factors(model)):
        factor = trials.numbers(out_features, in_features).requires_grad_()
        what = f"the product with an adapter's factor {[out_features, in_features]}"
        run(what, partial(multiplied, factor), [factor], in_features, out_features)


def _norms(model: nn.Module) -> dict[object, nn.Module]:
    kinds = (nn.LayerNorm, nn.RMSNorm)
    return {(type(each), each.normalized_shape): each for each in model.modules() if isinstance(each, kinds)}


def _biases(model: nn.Module) -> set[int]:
    rows = (layer for layer in model.modules() if isinstance(layer, RowLinear) and layer._exact is not None)
    return {layer.out_features for layer in rows if layer.bias is not None}


def _factors(model: nn.Module) -> set[tuple[int, int]]:
    """Shapes of the factors that every rank holds: ``A`` of column-parallel layers, and ``B`` of row-parallel ones."""
    shapes = set()
    for layer in model.modules():
        if not isinstance(layer, LoraLinear) or not isinstance(layer, ParallelLinear) or layer._exact is None:
            continue
        for few in layer.lora_widths:
            shapes.add((few, layer.in_features) if layer._exact.split == "output" else (layer.out_features, few))
    return shapes


def _try(what: str, function: _ByParts, params: Sequence[Tensor], input_: Tensor, incoming: Tensor, parts: int) -> None:
    def by_ranks(ranks: int) -> list[Tensor]:
        outputs, gradients, sums = [], [], []
        for part, grad in zip(input_.chunk(ranks), incoming.chunk(ranks), strict=True):
            leaf = part.detach().clone().requires_grad_()
            with torch.enable_grad():
                output = function(leaf, parts // ranks)
                own, *of_params = torch.autograd.grad(output, [leaf, *params], grad.clone())
            outputs.append(output.detach())
            gradients.append(own)
            sums.append(of_params)
        return [torch.cat(outputs), torch.cat(gradients), *(tree_sum(terms) for terms in zip(*sums, strict=True))]

    whole = on_several_threads(partial(by_ranks, 1))
    for ranks in powers_of_two(parts):
        for number, (found, wanted) in enumerate(zip(on_one_thread(partial(by_ranks, ranks)), whole, strict=True)):
            of = ("", "the input gradient of ", "a gradient of ")[min(number, 2)]
            compare(found, wanted, f"{of}{what}, {list(input_.shape)}, {how_split(ranks)},")
