"""Blocks of attention: runs of queries, each with the keys that its mask lets it see.

A block whose keys are in several parts is the sum of the parts (``kernels.partial_attention``): a run of queries under
a causal mask, for instance, sees all keys before the run, and has a square causal mask on its own. So neither needs a
mask in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from shardwise.core.sharding import Interval
from shardwise.core.typed import computed_locally
from shardwise.kernels.partial_attention import attend_to_part, differentiate_part, merge, takes_packed


class Part(NamedTuple):
    """Some keys of a block.

    Attributes:
        keys: indices of the keys.
        is_causal: whether the queries are at the same positions as these keys, and see none after themselves.
        bias: makes the bias of some of the keys, see ``AttentionMask.blocks``; None if the queries see all keys.
    """

    keys: slice
    is_causal: bool = False
    bias: Callable[[slice], Tensor] | None = None

    def made_bias(self) -> Tensor | None:
        """Return the bias of all keys."""
        return None if self.bias is None else self.bias(self.keys)

    def within(self, start: int, stop: int) -> Part | None:
        """Return the part whose keys are from ``start`` to ``stop``; None if there are none."""
        start, stop = max(start, self.keys.start), min(stop, self.keys.stop)
        return self._replace(keys=slice(start, stop)) if start < stop else None


class Block(NamedTuple):
    """A run of queries of some samples, and the parts of the keys that they see, in order."""

    samples: slice
    queries: slice
    parts: tuple[Part, ...]


class Run(NamedTuple):
    """Positions of queries before they are cut into blocks.

    Attributes:
        samples: the samples of the batch.
        queries: first and last position, the last excluded.
        keys: positions of all keys that a query of the run may see.
        is_mixed: whether the run has several documents.
    """

    samples: slice
    queries: Interval
    keys: Interval
    is_mixed: bool = False


class Packed(NamedTuple):
    """A run of queries of several documents, and the keys of these documents.

    Attributes:
        queries: indices of the queries, in every sample.
        keys: indices of the keys, in each sample.
        query_starts, key_starts: ``[documents + 1]`` int32, where each document starts among the queries or keys of all
            samples, and where the last one ends.
        most_queries, most_keys: numbers of the longest documents.
    """

    queries: slice
    keys: tuple[slice, ...]
    query_starts: Tensor
    key_starts: Tensor
    most_queries: int
    most_keys: int

    @classmethod
    def of(cls, runs: Iterable[Run], first: int, device: torch.device) -> Packed:
        """Join successive runs of each sample; their queries start at position ``first``."""
        several = list(runs)
        of_samples = [[run for run in several if run.samples.start == i] for i in range(several[-1].samples.stop)]
        stop = several[-1].queries[1]
        keys = tuple(slice(own[0].keys[0], own[-1].keys[1]) for own in of_samples)
        lengths = [tuple(stop - start for start, stop in (run.queries, run.keys)) for run in several]
        starts = torch.tensor([(0, 0), *lengths], dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)
        if device.type == "cuda":
            starts = starts.pin_memory().to(device, non_blocking=True)
        most_queries, most_keys = (max(each) for each in zip(*lengths, strict=True))
        query_starts, key_starts = starts.t().contiguous()
        return cls(slice(0, stop - first), keys, query_starts, key_starts, most_queries, most_keys)


def runs_of_documents(ends: Sequence[Sequence[int]], positions: Interval, rows: int) -> Iterable[Run]:
    """Cut positions at documents, except where these are short.

    Args:
        ends: for each sample, the end of each of its documents.
        positions: first and last position, the last excluded.
        rows: length of a run of short documents, which have less than a quarter of it.
    """
    for sample, of_sample in enumerate(ends):
        samples, short = slice(sample, sample + 1), None
        for first, last in zip((0, *of_sample), of_sample, strict=False):
            start, stop = max(first, positions[0]), min(last, positions[1])
            if start >= stop:
                continue
            if stop - start < rows // 4:
                if short is not None and stop - short.queries[0] > rows:
                    yield short
                    short = None
                begin = Run(samples, (start, start), (first, last)) if short is None else short
                is_mixed = short is not None
                short = Run(samples, (begin.queries[0], stop), (begin.keys[0], last), is_mixed)
                continue
            if short is not None:
                yield short
                short = None
            yield Run(samples, (start, stop), (first, last))
        if short is not None:
            yield short


class _InBlocks(Function):
    spmd_typecheck = computed_locally("query", "key", "value", "sinks")

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        blocks: Sequence[Block],
        scale: float,
        attend: Callable[..., tuple[Tensor, Tensor]],
    ) -> Tensor:
        b, heads, s, _ = query.shape
        # Lies by tokens, as the output projection reads it.
        output = query.new_empty(b, s, heads, value.size(-1)).transpose(1, 2)
        sums = query.new_empty(b, heads, s, dtype=torch.promote_types(query.dtype, torch.float32))
        for samples, queries, parts in blocks:
            own = query[samples, :, queries]
            found = [attend(own, *_part_of(part, samples, key, value), **_options(part), scale=scale) for part in parts]
            part, part_sums = found[0] if len(found) == 1 else merge(found)
            if sinks is not None:
                part, part_sums = with_sinks(part, part_sums, sinks)
            output[samples, :, queries], sums[samples, :, queries] = part, part_sums
        ctx.save_for_backward(query, key, value, output, sums, sinks)
        ctx.blocks, ctx.scale = blocks, scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, output, sums, sinks = ctx.saved_tensors
        (gradient,) = gradients
        grad_query = torch.empty_like(query)
        grad_key, grad_value = (torch.zeros_like(each, dtype=sums.dtype) for each in (key, value))
        for samples, queries, parts in ctx.blocks:
            at = (samples, slice(None), queries)
            of_query: Any = 0
            for part in parts:
                keys = (samples, slice(None), part.keys)
                dq, dk, dv = differentiate_part(
                    gradient[at], query[at], key[keys], value[keys], output[at], sums[at],
                    **_options(part), scale=ctx.scale,
                )  # fmt: skip
                of_query = dq if len(parts) == 1 else of_query + dq.to(sums.dtype)
                grad_key[keys] += dk
                grad_value[keys] += dv
            grad_query[at] = of_query
        of_sinks = None if sinks is None else gradient_of_sinks(gradient, output, sums, sinks)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), of_sinks, None, None, None


def attend_in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Sequence[Block],
    *,
    scale: float,
    sinks: Tensor | None = None,
    attend: Callable[..., tuple[Tensor, Tensor]] = attend_to_part,
) -> Tensor:
    """Compute attention block by block; the backward makes biases again.

    Args:
        query: ``[b, heads, s, d]``.
        key, value: ``[b, groups, keys, d]``.
        blocks: blocks that contain each query once.
        scale: factor of the products.
        sinks: ``[heads]``, logits of keys without a value, or None.
        attend: computes a part; ``attend_to_part`` or ``attend_from_start``.

    Returns:
        ``[b, heads, s, d]``.
    """
    output: Tensor = _InBlocks.apply(query, key, value, sinks, blocks, scale, attend)
    return output


def attend_to_packed(
    query: Tensor, key: Tensor, value: Tensor, runs: Sequence[Packed], *, scale: float, window: tuple[int, int]
) -> Tensor:
    """Compute attention of documents with flash attention for sequences of several lengths, which PyTorch has on CUDA.

    Args:
        query: ``[b, heads, s, d]``.
        key, value: ``[b, groups, keys, d]``.
        runs: runs that contain each query once.
        scale: factor of the products.
        window: numbers of positions that a token sees before and after itself, -1 for no bound.

    Returns:
        ``[b, heads, s, d]``.
    """
    # Its import brings torch._dynamo, which takes longer than the rest of PyTorch.
    from torch.nn.attention.varlen import varlen_attn

    results = []
    for run in runs:
        own = query[:, :, run.queries].permute(0, 2, 1, 3)
        seen = [[each[sample, :, keys] for sample, keys in enumerate(run.keys)] for each in (key, value)]
        keys, values = (each[0] if len(each) == 1 else torch.cat(each, dim=1) for each in seen)
        context = varlen_attn(
            own.flatten(0, 1),
            keys.transpose(0, 1),
            values.transpose(0, 1),
            run.query_starts,
            run.key_starts,
            run.most_queries,
            run.most_keys,
            scale=scale,
            window_size=window,
            enable_gqa=query.size(1) > key.size(1),
        )
        assert isinstance(context, Tensor)
        results.append(context.view(own.shape).permute(0, 2, 1, 3))
    return results[0] if len(results) == 1 else torch.cat(results, dim=2)


def of_one_width(*tensors: Tensor, direct: bool = False) -> list[Tensor]:
    """Append zeros to the last dimension, because flash attention takes queries, keys and values of one width.

    With ``direct`` the kernel is called without PyTorch's function around it: on CUDA it takes multiples of 8.
    """
    width = max(tensor.size(-1) for tensor in tensors)
    if direct and takes_packed(tensors[0]):
        width = -(-width // 8) * 8
    return [F.pad(each, (0, width - each.size(-1))) if each.size(-1) < width else each for each in tensors]


def _part_of(part: Part, samples: slice, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return key[samples, :, part.keys], value[samples, :, part.keys]


def _options(part: Part) -> dict[str, Any]:
    return {"is_causal": part.is_causal, "bias": part.made_bias()}


def with_sinks(output: Tensor, sums: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add sinks to attention ``[b, heads, s, d]`` of all keys and its log-sum-exp ``[b, heads, s]``."""
    whole = torch.logaddexp(sums, sinks[:, None].to(sums.dtype))
    return output * (sums - whole).exp().unsqueeze(-1), whole


def gradient_of_sinks(gradient: Tensor, output: Tensor, sums: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of sinks ``[heads]`` from the results of ``with_sinks`` and the gradient of the output."""
    rowwise = (gradient * output).sum(dim=-1, dtype=sums.dtype)
    return -((sinks[:, None].to(sums.dtype) - sums).exp() * rowwise).sum(dim=(0, 2)).to(sinks.dtype)
