"""Whether the products of linear layers have the bits on which exact runs rely; see ``exact_check``.

What is not summed is compared column by column: of the whole layer on several threads, and of the shards of ranks on
one. Sums are compared as they are taken: all parts by one rank, and by ranks of fewer.

The summed dimension and the number of rows are always those of the run, as libraries choose how to multiply by them.
The other dimension, and the number of parts at a time, are too unless that takes more than ``MOST_ELEMENTS`` or
``_MOST_MULTIPLICATIONS``. Beyond, it is relied on that a wide matrix is multiplied as one is that is wider still, with
a width of the same remainder by 64.

Whether what every rank holds whole has the bits on which exact runs rely; see ``exact_check``.

Norms, biases of row-parallel layers and the factors of adapters that are not split: their gradients are sums over
tokens, part by part of the sequence. Compared are all parts on several threads, and each rank's on one.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.core.communication.trees import tree_sum
from shardwise.core.errors import ConfigError
from shardwise.core.sharding import LocalParts, ParamLayout, balanced_sizes, local_parts
from shardwise.exact.by_parts import add_bias_by_parts, linear_by_parts, norm_by_parts
from shardwise.exact.products import ExactProducts
from shardwise.models.adapters.lora_layers import LoraLinear
from shardwise.nn import RowLinear
from shardwise.nn.parallel_linear import ParallelLinear
from shardwise.run.exact_trials.exact_trials import (
    MOST_ELEMENTS,
    Trials,
    compare,
    how_split,
    on_one_thread,
    on_several_threads,
    powers_of_two,
)

# Of one product: some tenths of a second on a core.
_MOST_MULTIPLICATIONS = 1 << 32
# The period of what libraries do with widths, and the least that a width is cut to.
_PERIOD, _LEAST = 64, 256


@dataclass(frozen=True, order=True)
class _Kind:
    """A kind of linear layer, whole; or of an adapter's factor, whose few features make it narrow."""

    split: Literal["output", "input"]
    size: int
    other: int
    sections: int
    is_narrow: bool = False
    has_bias: bool = False

    def __str__(self) -> str:
        shape = [self.size, self.other] if self.split == "output" else [self.other, self.size]
        return f"by {shape}"

    @property
    def in_features(self) -> int:
        return self.other if self.split == "output" else self.size

    def layout(self, section: int, other: int, ranks: int) -> ParamLayout:
        """Of such a weight whose sections have another length."""
        of_split = section * self.sections
        shape, dim = ((of_split, other), 0) if self.split == "output" else ((other, of_split), 1)
        return ParamLayout.split(shape, dim, ranks, stride=self.sections)

    def products(self, own: LocalParts, parts: int) -> ExactProducts:
        # Of the size of the whole layer, by which it is chosen which library multiplies.
        return ExactProducts(own, self.split, self.size, parts, self.is_narrow)


class _Result(NamedTuple):
    name: str
    # The dimension along which ranks have shards.
    dim: int
    tensor: Tensor

    def shard(self, layout: ParamLayout, rank: int) -> Tensor:
        runs = layout.intervals[rank]
        return torch.cat([self.tensor.narrow(self.dim, start, stop - start) for start, stop in runs], self.dim)


def try_linear_layers(trials: Trials, model: nn.Module, rows: int) -> None:
    """Try each kind of linear layer of a model on so many rows."""
    for kind in _kinds(model):
        trials.run(partial(_try_split, trials, kind, rows))
        trials.run(partial(_try_summed, trials, kind, rows))


def _kinds(model: nn.Module) -> list[_Kind]:
    kinds = set()
    for layer in model.modules():
        if not isinstance(layer, ParallelLinear) or not isinstance(layer._products, ExactProducts):
            continue
        split = layer._products.split
        both = layer.out_features, layer.in_features
        size, other = both if split == "output" else both[::-1]
        has_bias = split == "output" and layer.bias is not None
        kinds.add(_Kind(split, size, other, layer.sections, has_bias=has_bias))
        for few in layer.lora_widths if isinstance(layer, LoraLinear) else ():
            kinds.add(_Kind(split, size, few, layer.sections, is_narrow=True))
    return sorted(kinds)


def _shards(kind: _Kind, section: int, other: int, parts: int) -> Iterator[tuple[int, ParamLayout, list[LocalParts]]]:
    """For each number of ranks whose shards are parts, the layout, and the parts of each rank."""
    for ranks in powers_of_two(parts):
        layout = kind.layout(section, other, ranks)
        try:
            yield (
                ranks,
                layout,
                [local_parts(layout, rank, parts, what="a linear layer") for rank in range(ranks)],
            )
        except ConfigError:
            # Parts of more than one size, which so many ranks cannot share; a run at that layout is refused.
            continue


def _cut(width: int, most: int) -> int:
    """A width of at most ``most``, or of the least that is tried, as wide as the whole one if there is room."""
    rest = width % _PERIOD
    return width if width <= most else min(width, rest + max(_LEAST, (most - rest) // _PERIOD * _PERIOD))


def _try_split(trials: Trials, kind: _Kind, rows: int, parts: int) -> None:
    length, rest = divmod(kind.size // kind.sections, parts)
    most = min(MOST_ELEMENTS // kind.other, MOST_ELEMENTS // rows, _MOST_MULTIPLICATIONS // (rows * kind.other)) // (
        parts * kind.sections
    )
    section = parts * _cut(length, most) + rest
    layout = kind.layout(section, kind.other, 1)
    weight, wide, narrow = (
        trials.numbers(*shape) for shape in (layout.global_shape, (rows, section * kind.sections), (rows, kind.other))
    )
    bias = trials.numbers(section * kind.sections)

    def results(products: ExactProducts, weight: Tensor, wide: Tensor, bias: Tensor) -> list[_Result]:
        if kind.split == "input":
            return [
                _Result("product for the input gradient", 1, products.input_gradient(narrow, weight)),
                _Result("product for the weight gradient", 1, products.weight_gradient(narrow, wide)),
            ]
        found = [
            _Result("product for the output", 1, products.linear(narrow, weight, bias if kind.has_bias else None)),
            _Result("product for the weight gradient", 0, products.weight_gradient(wide, narrow)),
        ]
        return found + [_Result("sum for the bias gradient", 0, products.bias_gradient(wide))] * kind.has_bias

    def of_rank(layout: ParamLayout, rank: int, own: LocalParts) -> list[_Result]:
        shards = layout.take(weight, rank).contiguous(), _columns(wide, layout, rank), _columns(bias, layout, rank)
        return results(kind.products(own, parts), *shards)

    ((_, one, (everything,)), *_) = _shards(kind, section, kind.other, parts)
    whole = on_several_threads(partial(of_rank, one, 0, everything))
    for ranks, layout, owns in _shards(kind, section, kind.other, parts):
        for rank in {0, ranks // 2, ranks - 1} if ranks == parts else {ranks // 2}:
            found = on_one_thread(partial(of_rank, layout, rank, owns[rank]))
            for result, expected in zip(found, whole, strict=True):
                compare(result.tensor, expected.shard(layout, rank), _named(result.name, kind, rows, ranks))


def _try_summed(trials: Trials, kind: _Kind, rows: int, parts: int) -> None:
    sizes, held = balanced_sizes(kind.size // kind.sections, parts), parts
    while held > 2 and rows * kind.sections * sum(sizes[:held]) > MOST_ELEMENTS:
        held //= 2
    section = sum(sizes[:held])
    summed = section * kind.sections
    most = min(MOST_ELEMENTS // summed, MOST_ELEMENTS // rows, _MOST_MULTIPLICATIONS // (rows * summed))
    other = kind.other if kind.is_narrow else _cut(kind.other, most)
    left, weight = trials.numbers(rows, summed), trials.numbers(*kind.layout(section, other, 1).global_shape)
    name = "product for the input gradient" if kind.split == "output" else "product for the output"

    def of_rank(layout: ParamLayout, rank: int, own_parts: LocalParts) -> Tensor:
        products, shard = kind.products(own_parts, parts), layout.take(weight, rank).contiguous()
        own = _columns(left, layout, rank)
        return products.input_gradient(own, shard) if kind.split == "output" else products.linear(own, shard, None)

    layouts = list(_shards(kind, section, other, held))
    _, one, (everything,) = layouts[0]
    ranks, each, owns = layouts[-1]
    whole = on_several_threads(partial(of_rank, one, 0, everything))
    compare(on_one_thread(partial(of_rank, one, 0, everything)), whole, _named(name, kind, rows, 1))
    terms = [on_one_thread(partial(of_rank, each, rank, owns[rank])) for rank in range(ranks)]
    compare(tree_sum(terms), whole, _named(name, kind, rows, ranks))
    for fewer, layout, owns in layouts[1:-1]:
        rank, run = fewer // 2, ranks // fewer
        found = on_one_thread(partial(of_rank, layout, rank, owns[rank]))
        compare(found, tree_sum(terms[rank * run : (rank + 1) * run]), _named(name, kind, rows, fewer))


def _columns(tensor: Tensor, layout: ParamLayout, rank: int) -> Tensor:
    return torch.cat([tensor[..., start:stop] for start, stop in layout.intervals[rank]], -1)


def _named(name: str, kind: _Kind, rows: int, ranks: int) -> str:
    return f"the {name} of a linear layer, {[rows, kind.in_features]} {kind}, {how_split(ranks)},"


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
    rows = (
        layer
        for layer in model.modules()
        if isinstance(layer, RowLinear) and isinstance(layer._products, ExactProducts)
    )
    return {layer.out_features for layer in rows if layer.bias is not None}


def _factors(model: nn.Module) -> set[tuple[int, int]]:
    """Shapes of the factors that every rank holds: ``A`` of column-parallel layers, and ``B`` of row-parallel ones."""
    shapes = set()
    for layer in model.modules():
        if not isinstance(layer, ParallelLinear) or not isinstance(layer._products, ExactProducts):
            continue
        if not isinstance(layer, LoraLinear):
            continue
        for few in layer.lora_widths:
            shapes.add((few, layer.in_features) if layer._products.split == "output" else (layer.out_features, few))
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
