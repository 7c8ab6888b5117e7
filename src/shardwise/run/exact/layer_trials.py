"""Trials of the layers that exact runs rely on: linear layers, attention, norms, biases and factors of adapters.

A trial computes the same values in two ways, for a number of parts, and yields both as ``ResultPair``. ``trials`` has
the table of all trials and compares the bits.

Linear layers: an output dimension that is not summed is compared column by column: the whole layer on several threads
against the shards of each rank on one thread. A summed dimension is compared in the order of its sum: one rank with all
parts against several ranks with fewer parts each. With context parallelism, the products of some tokens are compared
with the same rows of the products of all. The trial always uses the run's summed dimension and number of rows,
because libraries choose kernels by these sizes. It also uses the run's other dimension and number of parts, unless that
exceeds ``MOST_ELEMENTS`` or ``MOST_MULTIPLICATIONS``. Beyond these limits it assumes that libraries multiply a wide
matrix like a wider one if both widths have the same remainder modulo 64.

Attention: the trial runs the model's own layers, including rotation, forward and backward. It runs all heads twice,
because attention that is not deterministic has no exact form, and then the heads of single ranks, for each number of
ranks that the parts allow.

Rows: the gradients of norms, of biases of row-parallel layers and of unsplit factors of adapters are sums over tokens,
part by part of the sequence. All parts on several threads are compared with each rank's parts on one thread.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from shardwise.core.communication.trees import tree_sum
from shardwise.core.errors import ConfigError
from shardwise.core.random import seed_streams
from shardwise.core.sharding import LocalParts, ParamLayout, balanced_sizes, local_parts
from shardwise.exact.context_terms import Place
from shardwise.exact.products import ExactProducts
from shardwise.exact.strategies import add_bias_by_parts, linear_by_parts, norm_by_parts
from shardwise.models.adapters.lora_layers import LoraLinear
from shardwise.models.description import ModelChunks
from shardwise.models.language_model import LanguageModel
from shardwise.models.transformer.attention import SelfAttention
from shardwise.models.transformer.distance_bias import alibi_slopes
from shardwise.models.transformer.heads import HeadSplit, split_heads
from shardwise.models.transformer.masks import AttentionMask
from shardwise.models.transformer.rotary import RotaryEmbedding
from shardwise.nn import RowLinear
from shardwise.nn.parallel_linear import ParallelLinear

MOST_ELEMENTS = 1 << 24
"""Maximum elements of a tensor in a trial, unless a rank of the run has a larger one in every step."""

# Period of the random numbers: a prime, which divides no width.
_NUM_RANDOM = 65537
# Maximum multiplications of one product, which take some tenths of a second on a core.
MOST_MULTIPLICATIONS = 1 << 32
# Libraries treat widths alike if they differ by a multiple of the first number. The second is a trial's minimum width.
_PERIOD, _LEAST = 64, 256
# Maximum attention scores, over all samples and heads. If there are more, only some of the heads are tried.
_MOST_SCORES = 1 << 26

_T = TypeVar("_T")


class ResultPair(NamedTuple):
    """Two results that must have the same bits; ``what`` names them, and ``differs`` may describe a difference."""

    found: Tensor
    expected: Tensor
    what: str
    differs: str | None = None


NOT_DETERMINISTIC = "is not deterministic: a second run has other bits"


@dataclass
class TrialRun:
    """Model and shapes of the run to try, and random numbers as input.

    Attributes:
        dtype: dtype of the random numbers.
        parts: ``exact_parts`` of the run.
        batch, length: number of samples of a forward pass, and number of tokens of a sample.
        is_packed: True if a row holds several samples, separated by a mask.
        context: number of ranks that share the tokens of a sample.
    """

    model: LanguageModel | ModelChunks
    dtype: torch.dtype
    parts: int = 1
    batch: int = 1
    length: int = 1
    is_packed: bool = False
    context: int = 1

    def __post_init__(self) -> None:
        self.device, self.rows = next(self.model.parameters()).device, self.batch * self.length
        self._generator = torch.Generator(self.device).manual_seed(0)
        self._some = torch.randn(_NUM_RANDOM, generator=self._generator, device=self.device).to(self.dtype)

    def numbers(self, *shape: int) -> Tensor:
        """Return random numbers. They repeat, which is faster than new ones, with a period that divides no width."""
        size = math.prod(shape)
        return self._some.repeat(1 + size // _NUM_RANDOM)[:size].view(shape)

    def ids(self, most: int, *shape: int) -> Tensor:
        """Return random integers from 0 to ``most - 1``."""
        return torch.randint(most, shape, generator=self._generator, device=self.device)

    def tokens(self) -> Iterator[tuple[int, slice]]:
        """Yield numbers of context-parallel ranks, with rows of the first and the last of them."""
        for ranks in powers_of_two(self.context if self.context > 1 else 0):
            for rank in {0, ranks - 1} if ranks > 1 else ():
                yield ranks, slice(rank * self.rows // ranks, (rank + 1) * self.rows // ranks)

    def layers(self, kind: type[_T]) -> list[_T]:
        """Return the model's modules of one class."""
        return [module for module in self.model.modules() if isinstance(module, kind)]


def on_threads(number: int, function: Callable[[], _T]) -> _T:
    """Call ``function`` with PyTorch set to ``number`` threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        return function()
    finally:
        torch.set_num_threads(threads)


def on_several_threads(function: Callable[[], _T]) -> _T:
    """Call ``function`` on all threads of this rank, at least two, because ranks may have more in another layout."""
    return on_threads(max(2, torch.get_num_threads()), function)


def powers_of_two(most: int) -> Iterator[int]:
    """Yield 1, 2, 4, ... up to ``most``: the possible numbers of ranks."""
    number = 1
    while number <= most:
        yield number
        number *= 2


def how_split(ranks: int) -> str:
    """Describe shards over ``ranks`` ranks, each computed on one thread, for messages."""
    return "on one thread" if ranks == 1 else f"on each of {ranks} ranks"


def _intervals(tensor: Tensor, intervals: Sequence[tuple[int, int]], dim: int = -1) -> Tensor:
    return torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in intervals], dim)


@dataclass(frozen=True, order=True)
class LinearKind:
    """Shape of a whole linear layer, or of an adapter's factor, which is narrow."""

    split: Literal["output", "input"]
    size: int
    other: int
    sections: int
    is_narrow: bool = False
    has_bias: bool = False

    def named(self, name: str, rows: int, ranks: int) -> str:
        columns, shape = (
            (self.other, [self.size, self.other]) if self.split == "output" else (self.size, [self.other, self.size])
        )
        return f"the {name} of a linear layer, {[rows, columns]} by {shape}, {how_split(ranks)},"

    def layout(self, section: int, other: int, ranks: int) -> ParamLayout:
        """Return the layout of a weight of this kind with other sizes: ``section`` is the length of a section."""
        of_split = section * self.sections
        shape, dim = ((of_split, other), 0) if self.split == "output" else ((other, of_split), 1)
        return ParamLayout.split(shape, dim, ranks, stride=self.sections)

    def products(self, own: LocalParts, parts: int, context: int = 1) -> ExactProducts:
        # The size of the whole layer decides which library multiplies.
        group = cast(Any, Place(0, context)) if context > 1 else None
        return ExactProducts(own, self.split, self.size, parts, self.is_narrow, group)

    def shards(self, section: int, other: int, parts: int) -> Iterator[tuple[int, ParamLayout, list[LocalParts]]]:
        """Yield each number of ranks that divides the layer into whole parts, its layout and the parts of each rank."""
        for ranks in powers_of_two(parts):
            layout = self.layout(section, other, ranks)
            try:
                owns = [local_parts(layout, rank, parts, what="a linear layer") for rank in range(ranks)]
            except ConfigError:
                # Parts of unequal size that so many ranks cannot share. A run in this layout is refused.
                continue
            yield ranks, layout, owns


def _exact_layers(run: TrialRun) -> Iterator[tuple[ParallelLinear, ExactProducts, list[int]]]:
    """Yield each linear layer, its products, and the widths of its adapters."""
    for layer in run.model.modules():
        if isinstance(layer, ParallelLinear) and isinstance(layer._products, ExactProducts):
            yield layer, layer._products, list(layer.lora_widths) if isinstance(layer, LoraLinear) else []


def linear_kinds(run: TrialRun) -> list[LinearKind]:
    """Return the kinds of linear layers of a model, including the factors of adapters."""
    kinds = set()
    for layer, products, lora_widths in _exact_layers(run):
        both = layer.out_features, layer.in_features
        size, other = both if products.split == "output" else both[::-1]
        has_bias = products.split == "output" and layer.bias is not None
        kinds.add(LinearKind(products.split, size, other, layer.sections, has_bias=has_bias))
        kinds |= {LinearKind(products.split, size, few, layer.sections, is_narrow=True) for few in lora_widths}
    return sorted(kinds)


def _cut(width: int, most: int) -> int:
    """Reduce ``width`` to at most ``most``, but not below ``_LEAST``, with the same remainder modulo ``_PERIOD``."""
    rest = width % _PERIOD
    return width if width <= most else min(width, rest + max(_LEAST, (most - rest) // _PERIOD * _PERIOD))


def try_split(run: TrialRun, kind: LinearKind, parts: int) -> Iterator[ResultPair]:
    """Compare products whose columns or rows are split: each rank's against the same part of the whole product."""
    rows, (length, rest) = run.rows, divmod(kind.size // kind.sections, parts)
    most = min(MOST_ELEMENTS // kind.other, MOST_ELEMENTS // rows, MOST_MULTIPLICATIONS // (rows * kind.other))
    section = parts * _cut(length, most // (parts * kind.sections)) + rest
    width = section * kind.sections
    weight = run.numbers(*kind.layout(section, kind.other, 1).global_shape)
    wide, narrow, bias = run.numbers(rows, width), run.numbers(rows, kind.other), run.numbers(width)

    def of_rank(layout: ParamLayout, rank: int, own: LocalParts) -> list[tuple[str, int, Tensor]]:
        """Return name, split dimension and value of each result."""
        products, shard = kind.products(own, parts), layout.take(weight, rank).contiguous()
        own_wide, own_bias = (_intervals(each, layout.intervals[rank]) for each in (wide, bias))
        if kind.split == "input":
            return [
                ("product for the input gradient", 1, products.input_gradient(narrow, shard)),
                ("product for the weight gradient", 1, products.weight_gradient(narrow, own_wide)),
            ]
        found = [
            ("product for the output", 1, products.linear(narrow, shard, own_bias if kind.has_bias else None)),
            ("product for the weight gradient", 0, products.weight_gradient(own_wide, narrow)),
        ]
        return found + [("sum for the bias gradient", 0, products.bias_gradient(own_wide))] * kind.has_bias

    ((_, one, (everything,)), *_) = kind.shards(section, kind.other, parts)
    whole = on_several_threads(partial(of_rank, one, 0, everything))

    def of_tokens(ranks: int, tokens: slice) -> Tensor:
        products = kind.products(everything, parts, ranks)
        if kind.split == "input":
            return products.input_gradient(narrow[tokens].clone(), weight)
        return products.linear(narrow[tokens].clone(), weight, bias if kind.has_bias else None)

    for ranks, tokens in run.tokens():
        name, _, expected = whole[0]
        found = on_threads(1, partial(of_tokens, ranks, tokens))
        yield ResultPair(found, expected[tokens], f"{kind.named(name, rows, 1)} of 1 in {ranks} tokens,")
    for ranks, layout, owns in kind.shards(section, kind.other, parts):
        for rank in {0, ranks // 2, ranks - 1} if ranks == parts else {ranks // 2}:
            results = on_threads(1, partial(of_rank, layout, rank, owns[rank]))
            for (name, dim, found), (_, _, expected) in zip(results, whole, strict=True):
                yield ResultPair(
                    found, _intervals(expected, layout.intervals[rank], dim), kind.named(name, rows, ranks)
                )


def try_summed(run: TrialRun, kind: LinearKind, parts: int) -> Iterator[ResultPair]:
    """Compare products that are summed over parts: the sum over ranks with some parts against one rank with all."""
    rows, sizes, held = run.rows, balanced_sizes(kind.size // kind.sections, parts), parts
    while held > 2 and rows * kind.sections * sum(sizes[:held]) > MOST_ELEMENTS:
        held //= 2
    section = sum(sizes[:held])
    summed = section * kind.sections
    most = min(MOST_ELEMENTS // summed, MOST_ELEMENTS // rows, MOST_MULTIPLICATIONS // (rows * summed))
    other = kind.other if kind.is_narrow else _cut(kind.other, most)
    left, weight = run.numbers(rows, summed), run.numbers(*kind.layout(section, other, 1).global_shape)
    name = "product for the input gradient" if kind.split == "output" else "product for the output"

    def of_rank(layout: ParamLayout, rank: int, own_parts: LocalParts) -> Tensor:
        products, shard = kind.products(own_parts, parts), layout.take(weight, rank).contiguous()
        own = _intervals(left, layout.intervals[rank])
        return products.input_gradient(own, shard) if kind.split == "output" else products.linear(own, shard, None)

    layouts = list(kind.shards(section, other, held))
    _, one, (everything,) = layouts[0]
    ranks, each, owns = layouts[-1]
    whole = on_several_threads(partial(of_rank, one, 0, everything))
    yield ResultPair(on_threads(1, partial(of_rank, one, 0, everything)), whole, kind.named(name, rows, 1))

    def of_tokens(ranks: int, tokens: slice) -> Tensor:
        products, own = kind.products(everything, held, ranks), left[tokens].clone()
        return products.input_gradient(own, weight) if kind.split == "output" else products.linear(own, weight, None)

    for number, tokens in run.tokens():
        found = on_threads(1, partial(of_tokens, number, tokens))
        yield ResultPair(found, whole[tokens], f"{kind.named(name, rows, 1)} of 1 in {number} tokens,")
    terms = [on_threads(1, partial(of_rank, each, rank, owns[rank])) for rank in range(ranks)]
    yield ResultPair(tree_sum(terms), whole, kind.named(name, rows, ranks))
    for fewer, layout, owns in layouts[1:-1]:
        rank, count = fewer // 2, ranks // fewer
        found = on_threads(1, partial(of_rank, layout, rank, owns[rank]))
        yield ResultPair(found, tree_sum(terms[rank * count : (rank + 1) * count]), kind.named(name, rows, fewer))


class RowOperation(NamedTuple):
    """An operation on the hidden states of tokens, with parameters that every rank holds whole.

    Attributes:
        what: name of the operation.
        function: computes the output from some of the sequence's tokens and the number of parts that they form.
        params: parameters of the operation.
        in_features, out_features: widths of input and output.
    """

    what: str
    function: Callable[[Tensor, int], Tensor]
    params: list[Tensor]
    in_features: int
    out_features: int


def row_operations(run: TrialRun) -> Iterator[RowOperation]:
    """Yield the kinds of a model's norms, of biases of row-parallel layers, and of unsplit factors of adapters."""
    norms: dict[object, nn.Module] = {}
    for each in [*run.layers(nn.LayerNorm), *run.layers(nn.RMSNorm)]:
        norms[type(each), each.normalized_shape] = each
    for norm in map(copy.deepcopy, norms.values()):
        params: list[Tensor] = list(norm.parameters())
        for param in params:
            param.copy_(run.numbers(*param.shape)).requires_grad_()
        width = params[0].numel()
        what = f"a {type(norm).__name__} of {width} features"
        yield RowOperation(what, partial(norm_by_parts, norm), params, width, width)

    def biased(bias: Tensor, part: Tensor, number: int) -> Tensor:
        return add_bias_by_parts(part, bias, number)

    def multiplied(factor: Tensor, part: Tensor, number: int) -> Tensor:
        return linear_by_parts(part, factor, number)

    biases, factors = set(), set()
    for layer, products, lora_widths in _exact_layers(run):
        if isinstance(layer, RowLinear) and layer.bias is not None:
            biases.add(layer.out_features)
        # ``A`` of column-parallel layers and ``B`` of row-parallel layers.
        for few in lora_widths:
            factors.add((few, layer.in_features) if products.split == "output" else (layer.out_features, few))
    for width in sorted(biases):
        bias = run.numbers(width).requires_grad_()
        yield RowOperation(f"a bias of {width} features", partial(biased, bias), [bias], width, width)
    for out_features, in_features in sorted(factors):
        factor = run.numbers(out_features, in_features).requires_grad_()
        what = f"the product with an adapter's factor {[out_features, in_features]}"
        yield RowOperation(what, partial(multiplied, factor), [factor], in_features, out_features)


def try_rows(run: TrialRun, operation: RowOperation, parts: int) -> Iterator[ResultPair]:
    """Compare output, input gradient and parameter gradients: of all tokens at once against each rank's tokens."""
    what, function, params, in_features, out_features = operation
    input_, incoming = (run.numbers(run.length, run.batch, width) for width in (in_features, out_features))

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
        for number, (found, expected) in enumerate(zip(on_threads(1, partial(by_ranks, ranks)), whole, strict=True)):
            of = ("", "the input gradient of ", "a gradient of ")[min(number, 2)]
            yield ResultPair(found, expected, f"{of}{what}, {list(input_.shape)}, {how_split(ranks)},")


def attention_layers(run: TrialRun) -> list[tuple[SelfAttention, bool]]:
    """Return each kind of attention layer of a model, without dropout, and also with dropout if the model has it."""
    kinds = {(layer.window_size, layer.rotates): layer for layer in run.layers(SelfAttention)}
    # Evaluation runs without dropout, which may use another kernel.
    return [(layer, on) for layer in kinds.values() for on in {run.model.config.attention_dropout > 0, False}]


def try_attention(run: TrialRun, kind: tuple[SelfAttention, bool], parts: int) -> Iterator[ResultPair]:
    """Compare the output and the gradient of the projected queries, keys and values: all heads against a rank's."""
    layer, has_dropout = kind
    heads, groups, width = run.model.config.heads_of(layer.layer_number)
    has_values = not layer.keys_are_values
    per_group = heads // groups
    while groups % 2 == 0 and groups > 2 and run.batch * groups * per_group * run.length**2 > _MOST_SCORES:
        groups //= 2
    heads = groups * per_group
    mixed = run.numbers(run.length, run.batch, (per_group + 1 + has_values) * groups * width)
    incoming = run.numbers(run.length, run.batch, heads * width)
    # The first is of layers without a window, the last of those with one.
    rotary = run.layers(RotaryEmbedding)[-1 if layer.window_size else 0 :][:1] if layer.rotates else []
    tables = rotary[0].first(run.length, mixed.dtype, mixed.device) if rotary else None
    has_alibi = any(getattr(module, "alibi_slopes", None) is not None for module in run.model.modules())
    documents = None
    if run.is_packed:
        # Two documents of different lengths.
        documents = (torch.arange(run.length, device=mixed.device) >= run.length // 3).long().expand(run.batch, -1)
    more = [f"a window {layer.window_size}"] * (layer.window_size is not None)
    more += ["documents"] * run.is_packed + ["dropout"] * has_dropout
    name = f"attention of {heads} heads {width} wide{' with ' * bool(more)}{' and '.join(more)}"

    def of_queries(tensor: Tensor, split: HeadSplit, rank: int) -> Tensor:
        start, stop = split.queries[rank]
        return _intervals(tensor, [(start * width, stop * width)])

    def of_input(tensor: Tensor, split: HeadSplit, rank: int) -> Tensor:
        return _intervals(tensor, split.qkv_layout((), width, has_values=has_values).intervals[rank])

    def attended(split: HeadSplit, rank: int) -> tuple[Tensor, Tensor]:
        of_rank = layer.with_heads_of(split, cast(Any, Place(rank, len(split.queries))))
        of_rank.training = has_dropout
        slopes = alibi_slopes(heads)[slice(*split.queries[rank])] if has_alibi else None
        # As in a run, all ranks together draw the same random numbers as one rank.
        seed_streams(0, rank, rng="global")
        with torch.enable_grad():
            own = of_input(mixed, split, rank).requires_grad_()
            mask = AttentionMask(document_ids=documents, alibi_slopes=slopes)
            output = of_rank.attended(*of_rank.split_projection(own, tables), mask)
            (gradient,) = torch.autograd.grad(output, own, of_queries(incoming, split, rank))
        return output.detach(), gradient

    one = split_heads(heads, groups, 1)
    whole = on_several_threads(partial(attended, one, 0))
    for found, expected in zip(on_several_threads(partial(attended, one, 0)), whole, strict=True):
        yield ResultPair(found, expected, name, NOT_DETERMINISTIC)
    for ranks in powers_of_two(min(parts, heads)):
        split = split_heads(heads, groups, ranks)
        try:
            for rank in range(ranks):
                local_parts(split.qkv_layout((), width, has_values=has_values), rank, parts, what="attention")
        except ConfigError:
            # A run in this layout is refused.
            continue
        for rank in {0, ranks // 2, ranks - 1}:
            output, gradient = on_threads(1, partial(attended, split, rank))
            yield ResultPair(output, of_queries(whole[0], split, rank), f"{name}, {how_split(ranks)},")
            yield ResultPair(gradient, of_input(whole[1], split, rank), f"the gradient of {name}, {how_split(ranks)},")
