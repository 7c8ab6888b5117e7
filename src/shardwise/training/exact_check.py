"""Whether a device keeps what exact runs rely on, tried for the shapes of a run before it starts.

- A product by parts has the same bits whether one rank has all parts or each rank one.
- A product has the same bits at every number of threads.
- An activation has the same bits in whatever piece of a tensor an element lies.
- Attention has the same bits for each head, whichever other heads are with it.

Numbers are random, and a second or two is all that it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

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
from shardwise.sharding import ParamLayout, local_parts


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

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    with torch.no_grad():
        for out_features, in_features, split, sections in _linear_layers(model):
            shape = f"[{rows}, {in_features}] by [{out_features}, {in_features}]"
            factors = numbers(rows, in_features), numbers(out_features, in_features), numbers(rows, out_features)
            dim = 0 if split == "output" else 1
            layout = ParamLayout.split((out_features, in_features), dim, parts, stride=sections)
            whole = _products(ParamLayout.split(layout.global_shape, dim, 1, stride=sections), 0, parts)
            expected = _three(whole, *factors)
            for what, found, wanted in zip(_PRODUCTS, _by_ranks(layout, parts, *factors), expected, strict=True):
                require_same_bits(found, wanted, f"the product for the {what} of a linear layer, {shape}, by parts")
            alone = on_one_thread(partial(_three, whole, *factors)) if torch.get_num_threads() > 1 else expected
            for what, found, wanted in zip(_PRODUCTS, alone, expected, strict=True):
                require_same_bits(
                    found, wanted, f"the product for the {what} of a linear layer, {shape}, on one thread"
                )
    assert config.ffn_hidden_size is not None
    _check_activation(config, numbers(rows, config.ffn_hidden_size * (1 + config.gated_linear_unit)), parts)
    heads, groups, width = config.heads
    _check_attention(
        [numbers(micro_batch_size, count, sequence_length, width) for count in (heads, groups, groups)], parts
    )


_PRODUCTS = ("output", "input gradient", "weight gradient")


def _linear_layers(model: nn.Module) -> list[tuple[int, int, str, int]]:
    """Each kind of linear layer once: its features, which of them are split, and in how many sections."""
    kinds = {
        (layer.out_features, layer.in_features, layer._exact.split, layer.sections)
        for layer in model.modules()
        if isinstance(layer, ParallelLinear) and layer._exact is not None
    }
    return sorted(kinds)


def _products(layout: ParamLayout, rank: int, parts: int) -> ExactProducts:
    dim = layout.dim
    assert dim is not None
    own = local_parts(layout, rank, parts, what="a linear layer")
    return ExactProducts(own, "input" if dim else "output", layout.global_shape[dim], parts)


def _three(products: ExactProducts, input_: Tensor, weight: Tensor, grad_output: Tensor) -> tuple[Tensor, ...]:
    return (
        products.linear(input_, weight, None),
        products.input_gradient(grad_output, weight),
        products.weight_gradient(grad_output, input_),
    )


def _by_ranks(layout: ParamLayout, parts: int, input_: Tensor, weight: Tensor, grad_output: Tensor) -> Sequence[Tensor]:
    """The three products as so many ranks make them, each with one part, put together."""
    dim, found = layout.dim, []
    for rank in range(parts):
        shard = layout.take(weight, rank).contiguous()
        own_input = input_ if dim == 0 else _columns(input_, layout, rank)
        own_gradient = _columns(grad_output, layout, rank) if dim == 0 else grad_output
        found.append(_three(_products(layout, rank, parts), own_input, shard, own_gradient))
    outputs, input_gradients, weight_gradients = (list(each) for each in zip(*found, strict=True))
    weight_gradient = layout.assemble(weight_gradients)
    if dim == 0:
        return _joined(outputs, layout), tree_sum(input_gradients), weight_gradient
    return tree_sum(outputs), _joined(input_gradients, layout), weight_gradient


def _columns(tensor: Tensor, layout: ParamLayout, rank: int) -> Tensor:
    return torch.cat([tensor[:, start:stop] for start, stop in layout.intervals[rank]], 1)


def _joined(shards: Sequence[Tensor], layout: ParamLayout) -> Tensor:
    """Shards of activations, whose columns are the layout's split dimension, as one."""
    assert layout.dim is not None
    whole = shards[0].new_empty(shards[0].size(0), layout.global_shape[layout.dim])
    for shard, runs in zip(shards, layout.intervals, strict=True):
        for (start, stop), piece in zip(runs, shard.split([stop - start for start, stop in runs], 1), strict=True):
            whole[:, start:stop] = piece
    return whole


def on_one_thread(function: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
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

    sections = 2 if gated else 1
    output, gradient = activated(inner)
    for part, wanted, wanted_gradient in zip(
        pieces(inner, sections), output.tensor_split(parts, 1), pieces(gradient, sections), strict=True
    ):
        found, found_gradient = activated(part)
        require_same_bits(found, wanted, f"the activation of a piece of {list(inner.shape)}")
        require_same_bits(
            found_gradient, wanted_gradient, f"the activation's gradient of a piece of {list(inner.shape)}"
        )


def _check_attention(tensors: Sequence[Tensor], parts: int) -> None:
    """Queries, keys and values ``[b, heads, s, d]``, all heads at once and as many as the most ranks have."""
    whole = _attended(*tensors)

    def by_ranks(number: int) -> list[Tensor]:
        ranks = zip(*(tensor.chunk(number, 1) for tensor in tensors), strict=True)
        return [torch.cat(pieces, 1) for pieces in zip(*(_attended(*each) for each in ranks), strict=True)]

    heads, groups = tensors[0].size(1), tensors[1].size(1)
    number = most = min(parts, groups & -groups)
    while number > 1 and not all(map(torch.equal, by_ranks(number), whole)):
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
