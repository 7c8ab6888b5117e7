"""Whether a device keeps what exact runs rely on, tried for the shapes of a run before it starts.

- A product by parts has the same bits whether one rank has all parts or each rank one.
- A product has the same bits at every number of threads.
- An activation has the same bits in whatever piece of a tensor an element lies.
- Attention has the same bits for each head, whichever other heads are with it.

Each kind of layer is tried once: whole, on all threads, against ranks of one part each, on one. Numbers are random,
and a second or two is all that it takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.communication.trees import tree_sum
from shardwise.config import ModelConfig
from shardwise.errors import ConfigError
from shardwise.kernels.blocks import in_blocks
from shardwise.kernels.exact_products import ExactProducts
from shardwise.kernels.swiglu import swiglu
from shardwise.layers.parallel_linear import ParallelLinear
from shardwise.lora.layers import LoraLinear
from shardwise.sharding import ParamLayout, local_parts

# A prime.
_NUM_RANDOM = 65537


def check_device(model: nn.Module, config: ModelConfig, *, micro_batch_size: int, sequence_length: int) -> None:
    """Try what an exact run relies on, with the shapes of the model; the default generator is left as it was.

    Args:
        model: this rank's.
        config: the model's, with ``exact_parts``.
        micro_batch_size: samples of a forward.
        sequence_length: tokens of a sample.

    Raises:
        ConfigError: the device does not keep it; the message names what and at which shape.
    """
    device, rows = next(model.parameters()).device, micro_batch_size * sequence_length
    parts, dtype = config.exact_parts, config.params_dtype
    assert parts is not None
    generator = torch.Generator(device).manual_seed(0)
    # They are repeated, which takes less time than new ones, and their number divides no width.
    some = torch.randn(_NUM_RANDOM, generator=generator, device=device).to(dtype)

    def numbers(*shape: int) -> Tensor:
        return some.repeat(1 + math.prod(shape) // _NUM_RANDOM)[: math.prod(shape)].view(shape)

    with torch.no_grad():
        for out_features, in_features, split, sections, is_narrow in _linear_layers(model):
            layout = ParamLayout.split(
                (out_features, in_features), 0 if split == "output" else 1, parts, stride=sections
            )
            factors = numbers(rows, in_features), numbers(*layout.global_shape), numbers(rows, out_features)
            _check_products(layout, parts, is_narrow, *factors)
    assert config.ffn_hidden_size is not None
    _check_activation(config, numbers(rows, config.ffn_hidden_size * (1 + config.gated_linear_unit)), parts)
    heads, groups, width = config.heads
    _check_attention(
        [numbers(micro_batch_size, count, sequence_length, width) for count in (heads, groups, groups)], parts
    )


def _linear_layers(model: nn.Module) -> list[tuple[int, int, str, int, bool]]:
    """Each kind of linear layer once: its features, which of them are split, in how many sections, and whether the
    other ones are an adapter's few."""
    kinds = set()
    for layer in model.modules():
        if not isinstance(layer, ParallelLinear) or layer._exact is None:
            continue
        split = layer._exact.split
        kinds.add((layer.out_features, layer.in_features, split, layer.sections, False))
        for few in layer.lora_widths if isinstance(layer, LoraLinear) else ():
            shape = (layer.out_features, few) if split == "output" else (few, layer.in_features)
            kinds.add((*shape, split, layer.sections, True))
    return sorted(kinds)


def _products(layout: ParamLayout, rank: int, parts: int, is_narrow: bool) -> ExactProducts:
    dim = layout.dim
    assert dim is not None
    own = local_parts(layout, rank, parts, what="a linear layer")
    return ExactProducts(own, "input" if dim else "output", layout.global_shape[dim], parts, is_narrow)


def _three(products: ExactProducts, input_: Tensor, weight: Tensor, grad_output: Tensor) -> tuple[Tensor, ...]:
    return (
        products.linear(input_, weight, None),
        products.input_gradient(grad_output, weight),
        products.weight_gradient(grad_output, input_),
    )


def _check_products(
    layout: ParamLayout, parts: int, is_narrow: bool, input_: Tensor, weight: Tensor, grad_output: Tensor
) -> None:
    """The three products of a layer on all threads, against those of ranks of one part each, on one thread."""
    dim, shape = layout.dim, f"{list(input_.shape)} by {list(weight.shape)}"
    assert dim is not None
    whole = _products(ParamLayout.split(layout.global_shape, dim, 1, stride=layout.stride), 0, parts, is_narrow)
    output, input_gradient, weight_gradient = expected = _three(whole, input_, weight, grad_output)

    def require(found: Tensor, wanted: Tensor, what: str, how: str = "by parts") -> None:
        require_same_bits(found, wanted, f"the product for the {what} of a linear layer, {shape}, {how}")

    def by_ranks() -> None:
        terms = []
        for rank in range(parts):
            exact, shard = _products(layout, rank, parts, is_narrow), layout.take(weight, rank).contiguous()
            own = _columns(grad_output if dim == 0 else input_, layout, rank)
            terms.append(exact.input_gradient(own, shard) if dim == 0 else exact.linear(own, shard, None))
            if rank not in (0, parts // 2, parts - 1):
                continue
            if dim == 0:
                require(exact.linear(input_, shard, None), _columns(output, layout, rank), "output")
            else:
                gradient = exact.input_gradient(grad_output, shard)
                require(gradient, _columns(input_gradient, layout, rank), "input gradient")
            gradient = exact.weight_gradient(*((own, input_) if dim == 0 else (grad_output, own)))
            require(gradient, layout.take(weight_gradient, rank), "weight gradient")
        total = tree_sum(terms)
        require(total, input_gradient if dim == 0 else output, "input gradient" if dim == 0 else "output")

    try:
        on_one_thread(by_ranks)
    except ConfigError:
        alone = on_one_thread(partial(_three, whole, input_, weight, grad_output))
        for what, found, wanted in zip(("output", "input gradient", "weight gradient"), alone, expected, strict=True):
            require(found, wanted, what, "on one thread")
        raise


def _columns(tensor: Tensor, layout: ParamLayout, rank: int) -> Tensor:
    return torch.cat([tensor[:, start:stop] for start, stop in layout.intervals[rank]], 1)


_Result = TypeVar("_Result")


def on_one_thread(function: Callable[[], _Result]) -> _Result:
    """What ``function`` returns when one thread computes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return function()
    finally:
        torch.set_num_threads(threads)


def _check_activation(config: ModelConfig, inner: Tensor, parts: int) -> None:
    gated = config.gated_linear_unit and config.activation_func is F.silu

    def activated(part: Tensor) -> tuple[Tensor, Tensor]:
        leaf = part.detach().contiguous().requires_grad_()
        output = swiglu(leaf, at_any_size=True) if gated else in_blocks(config.activation_func, leaf)
        output.backward(torch.ones_like(output))
        assert leaf.grad is not None
        return output.detach(), leaf.grad

    def pieces(tensor: Tensor, sections: int) -> Iterator[Tensor]:
        """What each rank has, its share of every section side by side."""
        each = [section.tensor_split(parts, dim=1) for section in tensor.chunk(sections, dim=1)]
        return (torch.cat(of_rank, 1) for of_rank in zip(*each, strict=True))

    sections, size = 2 if gated else 1, list(inner.shape)
    output, gradient = activated(inner)

    def by_ranks() -> None:
        each = zip(pieces(inner, sections), output.tensor_split(parts, 1), pieces(gradient, sections), strict=True)
        for part, wanted, wanted_gradient in each:
            found, found_gradient = activated(part)
            require_same_bits(found, wanted, f"the activation of a piece of {size}")
            require_same_bits(found_gradient, wanted_gradient, f"the activation's gradient of a piece of {size}")

    on_one_thread(by_ranks)


def _check_attention(tensors: Sequence[Tensor], parts: int) -> None:
    """Queries, keys and values ``[b, heads, s, d]``, all heads at once and as many as the most ranks have."""
    whole = _attended(*tensors)

    def by_ranks(number: int) -> list[Tensor]:
        ranks = zip(*(tensor.chunk(number, 1) for tensor in tensors), strict=True)
        return [torch.cat(pieces, 1) for pieces in zip(*(_attended(*each) for each in ranks), strict=True)]

    heads, groups = tensors[0].size(1), tensors[1].size(1)
    number = most = min(parts, groups & -groups)
    while number > 1 and not all(map(torch.equal, on_one_thread(partial(by_ranks, number)), whole)):
        number //= 2
    if number < most:
        raise ConfigError(
            f"exact: on this device ({tensors[0].device}) attention of {heads} heads {tensors[0].size(-1)} wide has "
            f"other bits with {heads // most} of them on each of {most} ranks; the largest exact-parts that works is "
            f"{number}"
        )


def _attended(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Causal attention ``[b, heads, s, d]``, and its gradients."""
    query, key, value = (x.detach().contiguous().requires_grad_() for x in (query, key, value))
    grouped = query.size(1) != key.size(1)
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
    return output.detach(), *torch.autograd.grad(output, (query, key, value), query.detach())


def require_same_bits(found: Tensor, expected: Tensor, what: str) -> None:
    """Raise a ConfigError that names ``what`` if any element differs."""
    if not torch.equal(found, expected):
        different = int((found != expected).sum())
        raise ConfigError(
            f"exact: on this device ({expected.device}) {what} has other bits: {different:,} of {expected.numel():,} "
            "elements; use another device, other sizes, or no --exact"
        )
