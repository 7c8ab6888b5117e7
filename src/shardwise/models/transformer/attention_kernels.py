"""The kernels of attention on this rank, in the order in which they are tried.

A kernel says why it does not take a call, and the first one that takes it computes it. So an option of a layer, a mask
and a device meet here alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.core.errors import ConfigError
from shardwise.core.random import streams
from shardwise.kernels.decode_attention import attend_to_cache
from shardwise.kernels.dispatch import FLEXIBLE_ATTENTION, WIDEST_HEAD, why_repeat_keys
from shardwise.kernels.fake_device import device_type_of
from shardwise.kernels.partial_attention import (
    attend_from_start,
    filled_blocks,
    has_flash_for_parts,
    is_causal_bias,
    takes_packed,
)
from shardwise.models.transformer.attention_backends import kernels_of
from shardwise.models.transformer.attention_blocks import (
    Block,
    Packed,
    Part,
    attend_in_blocks,
    attend_to_packed,
    of_one_width,
    with_sinks,
)
from shardwise.models.transformer.heads import LocalHeads
from shardwise.models.transformer.masks import AttentionMask
from shardwise.models.transformer.mlp import softcap
from shardwise.models.transformer.visibility import Rule
from shardwise.nn.arithmetic import Activation
from shardwise.nn.recompute import recomputed

# Maximum number of scores in a block, 64 MiB in fp32.
_SCORES_OF_BLOCK = 1 << 24
# The narrowest head of FlexAttention.
_NARROWEST = 16
# Refusal of a kernel that a call has no use for: another one computes it as fast.
_UNNEEDED = "it is for other calls"


class Options(NamedTuple):
    """The attention of some heads of a layer.

    Attributes:
        heads: the heads.
        rule: restrictions by distance.
        scale: factor of the products.
        cap: soft cap of the scores, or None.
        sinks: ``[heads]``, logits of keys without a value, or None.
        dropout: probability of dropping a weight, 0 in evaluation.
        drop: drops weights ``[b, heads, s, keys]`` by the rule of the random streams.
        backend: ``config.attention_backend``.
        activation: arithmetic of products and softmax.
        counted_heads: number of heads that determines the size of blocks.
    """

    heads: LocalHeads
    rule: Rule
    scale: float
    cap: float | None
    sinks: Tensor | None
    dropout: float
    drop: Callable[[Tensor], Tensor]
    backend: str
    activation: Activation
    counted_heads: int


@dataclass
class Call:
    """A call of attention: queries ``[b, heads, s, d]``, keys and values ``[b, groups, keys, d]``, mask and options."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: AttentionMask
    options: Options

    def blocks(self, rows: int, *, for_kernels: bool = False) -> list[Block]:
        """Return blocks of at most ``rows`` queries, each of one part."""
        return self.mask.blocks(self.query, self.key.size(2), self.options.rule, rows=rows, for_kernels=for_kernels)

    @cached_property
    def parts(self) -> list[Block]:
        """Blocks that may have several parts."""
        return self.mask.blocks(self.query, self.key.size(2), self.options.rule, has_parts=True)

    @cached_property
    def blocks_from_start(self) -> list[Block] | None:
        """Blocks of one part, which starts with a block of a document's keys; None if documents are not known."""
        return self.mask.blocks_from_start(self.query, self.key.size(2), self.options.rule)

    @property
    def for_flash(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as flash attention takes them."""
        return for_flash(self.query, self.key, self.value, self.options.heads)


class Kernel:
    """A way to compute attention.

    Attributes:
        name: name in reports.
        adds_parts: whether it may add what parts of the keys contribute, in any order.
        counts_from_start: whether the bits of a query depend only on the keys that it sees, for exact arithmetic; other
            kernels are as good for plain arithmetic, and faster.
        device_type: type of device on which it is faster than others; "" for the slower ones.
    """

    name: str
    adds_parts = False
    counts_from_start = False
    device_type = ""

    def refusal(self, call: Call) -> str | None:
        """Return why this kernel does not take a call; None if it does."""
        if call.mask.query_position is not None:
            return "only the device knows the position of the query"
        return self._refusal(call)

    def attend(self, call: Call) -> Tensor:
        """Compute ``[b, heads, s, d]``."""
        raise NotImplementedError

    def _refusal(self, call: Call) -> str | None:
        return None


class _AtPosition(Kernel):
    name, adds_parts = "a kernel for one token and a cache", True

    def refusal(self, call: Call) -> str | None:
        return _UNNEEDED if call.mask.query_position is None else None

    def attend(self, call: Call) -> Tensor:
        options, position = call.options, call.mask.query_position
        assert position is not None
        return attend_to_cache(
            call.query,
            call.key,
            call.value,
            position,
            scale=options.scale,
            before=options.rule.bounds[0],
            softcap=options.cap,
            slopes=call.mask.alibi_slopes,
            sinks=options.sinks,
        )


class _Packed(Kernel):
    """Flash attention to documents, or within a window. Its gradients round in any order."""

    name, adds_parts, device_type = "flash attention for packed documents and windows", True, "cuda"

    def _refusal(self, call: Call) -> str | None:
        mask, rule = call.mask, call.options.rule
        if mask.document_ids is None and rule.window is None:
            return _UNNEEDED
        if (why := _why_not_flash(call.options)) is not None:
            return why
        if call.options.sinks is not None:
            return "it has no attention sinks"
        # Flash attention aligns a window at the last query and the last key, and a rank's queries end before the keys.
        if not rule.causal and rule.window is not None and mask.context is not None:
            return "ranks share the positions, and the window has two sides"
        if not takes_packed(call.query):
            return "it is for bf16 and fp16 on GPUs from sm_80 on"
        if self._runs(call) is None:
            return "there is a mask, or ALiBi, or documents are in pieces or on the device alone"
        return None

    def attend(self, call: Call) -> Tensor:
        options, runs = call.options, self._runs(call)
        assert runs is not None
        output = attend_to_packed(*call.for_flash, runs, scale=options.scale, window=options.rule.bounds)
        return output[..., : call.value.size(-1)]

    @staticmethod
    def _runs(call: Call) -> Sequence[Packed] | None:
        return call.mask.packed(call.query, call.key.size(2), call.options.rule)


class _Flexible(Kernel):
    name, adds_parts, device_type = "FlexAttention", True, "cuda"

    def _refusal(self, call: Call) -> str | None:
        options, query = call.options, call.query
        if call.mask.is_plain and options.rule.window is None and options.cap is None and options.sinks is None:
            return _UNNEEDED
        if options.backend != "auto":
            return f"attention_backend is {options.backend!r}"
        if options.dropout > 0:
            return "it has no dropout"
        scores, widths = query.shape[:3].numel() * call.key.size(2), (query.size(-1), call.value.size(-1))

        def fits() -> bool:
            return min(widths) >= _NARROWEST and max(widths) <= WIDEST_HEAD

        return FLEXIBLE_ATTENTION.why_not_with(query, call.key, call.value, size=scores, fits=fits)

    def attend(self, call: Call) -> Tensor:
        options, num_keys, even = call.options, call.key.size(2), partial(_made_even, heads=call.options.heads)
        functions = partial(call.mask.functions, call.query, num_keys, options.rule, options.cap)
        has_sums = options.sinks is not None
        output, sums = FLEXIBLE_ATTENTION.loaded().attend(
            call.query, even(call.key), even(call.value), functions, scale=options.scale, has_sums=has_sums
        )
        if options.sinks is not None:
            output, _ = with_sinks(output, sums, options.sinks)
        result: Tensor = output.to(call.query.dtype)
        return result


class _WrittenOut(Kernel):
    name = "products and a softmax of all scores"

    def _refusal(self, call: Call) -> str | None:
        if call.options.backend == "local" or (call.options.dropout > 0 and streams().rule == "global"):
            return None
        return _UNNEEDED

    def attend(self, call: Call) -> Tensor:
        return _block_by_block(partial(_written_out, call.options), call, call.blocks(call.query.size(2)))


class _Parts(Kernel):
    """Blocks of queries, with sums of what parts of the keys contribute, by flash attention on a CPU."""

    name, adds_parts, device_type = "flash attention in blocks", True, "cpu"

    def _refusal(self, call: Call) -> str | None:
        return _why_not_flash(call.options) if has_flash_for_parts(call.query) else _UNNEEDED

    def attend(self, call: Call) -> Tensor:
        options = call.options
        output = attend_in_blocks(*call.for_flash, call.parts, scale=options.scale, sinks=options.sinks)
        return output[..., : call.value.size(-1)]


class _FromStart(Kernel):
    name, counts_from_start = "flash attention in blocks from the start of each document", True

    def _refusal(self, call: Call) -> str | None:
        options = call.options
        if options.dropout > 0 or options.sinks is not None or not has_flash_for_parts(call.query):
            return _UNNEEDED
        return _UNNEEDED if call.blocks_from_start is None else self._why_not(options)

    def attend(self, call: Call) -> Tensor:
        blocks, scale = call.blocks_from_start, call.options.scale
        assert blocks is not None
        output = attend_in_blocks(*call.for_flash, blocks, scale=scale, attend=attend_from_start)
        return output[..., : call.value.size(-1)]

    @staticmethod
    def _why_not(options: Options) -> str | None:
        return _why_not_flash(options)


class _WrittenOutFromStart(_FromStart):
    name = "products and a softmax in blocks from the start of each document"

    def attend(self, call: Call) -> Tensor:
        blocks = call.blocks_from_start
        assert blocks is not None
        return _block_by_block(partial(recomputed, partial(_written_out_from_start, call.options)), call, blocks)

    @staticmethod
    def _why_not(options: Options) -> str | None:
        return None


class _OnePart(_Parts):
    """The same where one part has all keys: PyTorch's function has less to do."""

    name, device_type = "flash attention", ""

    def _refusal(self, call: Call) -> str | None:
        if (why := super()._refusal(call)) is not None:
            return why
        return None if call.options.sinks is None and [len(each.parts) for each in call.parts] == [1] else _UNNEEDED

    def attend(self, call: Call) -> Tensor:
        return _block_by_block(partial(_by_function, call.options), call, call.parts)


class _WrittenOutInBlocks(Kernel):
    name = "products and a softmax in blocks of queries, which the backward computes again"

    def _refusal(self, call: Call) -> str | None:
        options = call.options
        if options.cap is not None or options.sinks is not None:
            return None
        if options.dropout == 0 or options.backend not in ("auto", "flash") or not has_flash_for_parts(call.query):
            return _UNNEEDED
        return None if len(self._blocks(call)) > 1 else _UNNEEDED

    def attend(self, call: Call) -> Tensor:
        attend = partial(recomputed, partial(_written_out, call.options))
        return _block_by_block(attend, call, self._blocks(call))

    @staticmethod
    def _blocks(call: Call) -> list[Block]:
        scores = call.query.size(0) * call.options.counted_heads * call.key.size(2)
        return call.blocks(max(1, _SCORES_OF_BLOCK // max(1, scores)))


class _Function(Kernel):
    name = "PyTorch's scaled_dot_product_attention"

    def attend(self, call: Call) -> Tensor:
        blocks = call.blocks(call.query.size(2), for_kernels=True)
        return _block_by_block(partial(_by_function, call.options), call, blocks)


AT_POSITION = _AtPosition()
KERNELS: tuple[Kernel, ...] = (
    AT_POSITION,
    _Packed(),
    _Flexible(),
    _FromStart(),
    _WrittenOutFromStart(),
    _WrittenOut(),
    _OnePart(),
    _Parts(),
    _WrittenOutInBlocks(),
    _Function(),
)
"""All kernels, in order. A layer has those that its arithmetic allows (``nn.arithmetic.Activation.kernels``)."""


def described(kernels: Sequence[Kernel], call: Call) -> str:
    """Return the name of the kernel that takes a call, and why those that would be faster on its device do not."""
    chosen = choose(kernels, call)
    faster = [each for each in kernels if each.device_type == device_type_of(call.query) and not chosen.device_type]
    refusals = {each.name: each.refusal(call) for each in faster}
    reasons = [f"; not {name}: {why}" for name, why in refusals.items() if why not in (None, _UNNEEDED)]
    return chosen.name + "".join(reasons)


def choose(kernels: Sequence[Kernel], call: Call) -> Kernel:
    """Return the first kernel that takes a call; raise ConfigError if there is none."""
    for kernel in kernels:
        if kernel.refusal(call) is None:
            return kernel
    reasons = "; ".join(f"{kernel.name}: {kernel.refusal(call)}" for kernel in kernels)
    raise ConfigError(f"no kernel computes this attention ({reasons}); leave out the options that these name")


def for_flash(query: Tensor, key: Tensor, value: Tensor, heads: LocalHeads) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of one width, with as many queries for each key."""
    query, key, value = of_one_width(query, _made_even(key, heads), _made_even(value, heads), direct=True)
    return query, key, value


def _why_not_flash(options: Options) -> str | None:
    """Return why flash attention, called without PyTorch's function around it, does not compute these scores."""
    if options.backend not in ("auto", "flash"):
        return f"attention_backend is {options.backend!r}"
    if options.dropout > 0:
        return "its dropout would depend on the layout"
    if options.cap is not None:
        return "it has no soft cap of scores"
    return "torch.compile traces the call" if torch.compiler.is_compiling() else None


def _by_function(options: Options, query: Tensor, key: Tensor, value: Tensor, part: Part) -> Tensor:
    bias, heads = part.made_bias(), options.heads
    grouped = len(heads.queries_of_groups) < query.size(1)
    if grouped and (not heads.is_even or _why_repeat(options.backend, query, bias) is not None):
        key, value, grouped = _for_all_queries(key, heads), _for_all_queries(value, heads), False
    value_width = value.size(-1)
    query, key, value = of_one_width(query, key, value)
    with streams().fork() if options.dropout > 0 else nullcontext(), kernels_of(options.backend, query, key):
        context = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=bias,
            dropout_p=options.dropout,
            is_causal=part.is_causal,
            scale=options.scale,
            enable_gqa=grouped,
        )
    return context if context.size(-1) == value_width else context[..., :value_width]


def _why_repeat(backend: str, query: Tensor, bias: Tensor | None) -> str | None:
    masked = bias is not None and not is_causal_bias(bias)
    return why_repeat_keys(backend, device_type_of(query), query.dtype, head_dim=query.size(-1), masked=masked)


def _written_out(options: Options, query: Tensor, key: Tensor, value: Tensor, part: Part) -> Tensor:
    # PyTorch's attention draws its own dropout mask, but the "global" rule needs a slice of the mask of all heads.
    key, value = _for_all_queries(key, options.heads), _for_all_queries(value, options.heads)
    bias, forbidden, blind, activation = part.made_bias(), None, None, options.activation
    if part.is_causal:
        new, seen = query.size(2), key.size(2)
        forbidden = torch.ones(new, seen, dtype=torch.bool, device=query.device).triu(seen - new + 1)
    scores = activation.matmul(query, key.transpose(-1, -2)) * options.scale
    if options.cap is not None:
        scores = activation(partial(softcap, cap=options.cap), scores)
    if bias is not None:
        scores = scores + bias
        forbidden = bias == -torch.inf
        blind = forbidden.all(dim=-1, keepdim=True)
    if forbidden is not None:
        # Not -inf, because the softmax of a token that sees nothing would be NaN.
        scores = scores.masked_fill(forbidden, torch.finfo(scores.dtype).min)
    wide = torch.promote_types(scores.dtype, torch.float32)
    if options.sinks is None:
        weights = activation.softmax(scores, wide)
    else:
        sinks = options.sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1, dtype=wide)[..., :-1]
    weights = weights.to(value.dtype)
    if blind is not None:
        weights = weights.masked_fill(blind, 0.0)
    return activation.matmul(options.drop(weights), value)


def _written_out_from_start(options: Options, query: Tensor, key: Tensor, value: Tensor, part: Part) -> Tensor:
    num = query.size(2)
    query, key, value, bias = filled_blocks(
        query, key, value, bias=part.made_bias(), is_causal=part.is_causal, always_bias=True
    )
    assert bias is not None
    whole = Part(slice(0, key.size(2)), bias=lambda keys: bias)
    return _written_out(options, query, key, value, whole)[:, :, :num]


def _for_all_queries(keys: Tensor, heads: LocalHeads) -> Tensor:
    """Repeat keys or values ``[b, groups, keys, d]`` for all of their queries."""
    if len(heads.queries_of_groups) == sum(heads.queries_of_groups):
        return keys
    copies = [keys[:, i : i + 1].expand(-1, n, -1, -1) for i, n in enumerate(heads.queries_of_groups)]
    return torch.cat(copies, dim=1)


def _made_even(keys: Tensor, heads: LocalHeads) -> Tensor:
    """Repeat keys or values unless all of them have as many queries."""
    return keys if heads.is_even else _for_all_queries(keys, heads)


def _block_by_block(attend: Callable[..., Tensor], call: Call, blocks: Sequence[Block]) -> Tensor:
    """Call ``attend`` with the queries, keys and values of each block of one part, and join the results."""
    results = [
        attend(
            call.query[samples, :, queries], call.key[samples, :, part.keys], call.value[samples, :, part.keys], part
        )
        for samples, queries, (part,) in blocks
    ]
    return results[0] if len(results) == 1 else torch.cat(results, dim=2)
