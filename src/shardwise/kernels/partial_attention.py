"""Attention to some of the keys: its output and the log-sum-exp of each query, so that parts can be added.

The softmax of all keys follows from its parts. If a part has the output ``o`` and ``l = log(sum(exp(scores)))``, the
whole has ``L = log(sum(exp(l)))`` and the output ``sum(exp(l - L) * o)``. The backward of a part needs only ``L``, the
whole output, and their gradient.

PyTorch's own flash attention computes the parts: on a CPU all, on CUDA those in bf16 and fp16 that need no bias. Other
parts are products that are written out.

Source: Dao et al. 2022 (arXiv:2205.14135); Liu et al. 2023 (arXiv:2310.01889).
"""

from collections.abc import Sequence
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.kernels.dispatch import WIDEST_HEAD
from shardwise.kernels.fake_device import device_type_of, planned_device

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# Of PyTorch's flash attention on a CPU; its tiles have 32 queries or a multiple of them.
BLOCK_OF_KEYS = 512
_TILE_OF_QUERIES = 32
_flash_on_cuda = torch.ops.aten._scaled_dot_product_flash_attention
_flash_on_cuda_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward


def has_flash_for_parts(query: Tensor) -> bool:
    """Return whether parts of attention need no memory for scores on the device of ``query``."""
    return device_type_of(query) == "cpu" and query.is_floating_point()


def takes_packed(query: Tensor) -> bool:
    """Return whether PyTorch has a kernel for documents of several lengths on the device of ``query``."""
    return _has_flash_on_cuda(query, None)


def is_causal_bias(mask: Tensor | None) -> bool:
    """Whether a mask is PyTorch's ``CausalBias``, which only kernels read."""
    if mask is None or type(mask) is Tensor:
        return False
    # Its import brings torch._dynamo, which takes longer than the rest of PyTorch.
    from torch.nn.attention.bias import CausalBias

    return isinstance(mask, CausalBias)


def attend_to_part(
    query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute attention to some keys, without autograd.

    Args:
        query: ``[b, heads, s, d]``.
        key, value: ``[b, groups, keys, d]``; each group serves as many successive heads.
        bias: added to the scores, -inf where attention is forbidden, broadcast to ``[b, heads, s, keys]``.
        is_causal: whether a query sees no keys after its own index; then there are as many keys as queries.

    Returns:
        Output ``[b, heads, s, d]``, 0 for a query that sees nothing, and log-sum-exp ``[b, heads, s]`` in fp32 at
        least, -inf for such a query.
    """
    if has_flash_for_parts(query):
        bias = _of_four_dimensions(bias, query, key)
        output, sums = _flash(query, key, value, 0.0, is_causal, attn_mask=bias, scale=scale)
        if bias is not None:
            # The kernel returns 0 for a query that sees nothing.
            sums = sums.masked_fill((bias == -torch.inf).all(dim=-1), -torch.inf)
        return output, sums
    if _has_flash_on_cuda(query, bias):
        output, sums, *_ = _flash_on_cuda(query, key, value, 0.0, is_causal, scale=scale)
        return output, sums
    scores = _scores(query, key, bias, is_causal, scale)
    sums = scores.logsumexp(dim=-1)
    weights = (scores - _finite(sums).unsqueeze(-1)).exp()
    return _by_groups(weights.to(value.dtype), value), sums


def attend_from_start(
    query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute ``attend_to_part`` so that a query's bits depend only on the keys that it sees.

    PyTorch's flash attention on a CPU takes keys in blocks of ``BLOCK_OF_KEYS``, counted from the first one. A last
    block that is not full, or a tile of few queries, is multiplied and summed in another order. So keys that are
    forbidden fill the last block, and more queries a small tile. For the arguments see ``attend_to_part``.
    """
    num = query.size(2)
    query, key, value, bias = filled_blocks(query, key, value, bias=bias, is_causal=is_causal)
    output, sums = attend_to_part(query, key, value, bias=bias, is_causal=bias is None, scale=scale)
    return output[:, :, :num], sums[:, :, :num]


def filled_blocks(
    query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None, is_causal: bool, always_bias: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Append queries and forbidden keys, so that both are in whole blocks; for the arguments see ``attend_to_part``.

    Args:
        always_bias: whether to return a bias of causal attention too.

    Returns:
        Queries, keys, values, and a bias; without a bias, a query sees no key after its own index.
    """
    rows, keys = -query.size(2) % _TILE_OF_QUERIES, -key.size(2) % BLOCK_OF_KEYS
    if is_causal and always_bias:
        bias = query.new_full((query.size(2), key.size(2)), -torch.inf).triu(1)
    if not is_causal or always_bias:
        bias = query.new_zeros(()) if bias is None else bias
        bias = F.pad(_of_four_dimensions(bias, query, key), (0, keys), value=-torch.inf)
        bias = F.pad(bias, (0, 0, 0, rows)) if rows else bias
    key, value = (F.pad(each, (0, 0, 0, keys)) if keys else each for each in (key, value))
    return F.pad(query, (0, 0, 0, rows)) if rows else query, key, value, bias


def differentiate_part(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    *,
    bias: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what one part of the keys adds to the gradient of the queries, and the gradients of its keys and values.

    ``output`` and its log-sum-exp ``sums`` are those of attention to all keys.
    """
    sums = _finite(sums)
    if has_flash_for_parts(query):
        options: dict[str, Any] = {"attn_mask": _of_four_dimensions(bias, query, key), "scale": scale}
        dq, dk, dv = _flash_backward(gradient, query, key, value, output, sums, 0.0, is_causal, **options)
        return dq, dk, dv
    if _has_flash_on_cuda(query, bias):
        # Without dropout the kernel reads no random state, and without packed rows no lengths.
        empty = query.new_empty(0, dtype=torch.int64)
        lengths: tuple[Any, ...] = (None, None, query.size(2), key.size(2))
        tensors = (gradient, query, key, value, output, sums)
        dq, dk, dv = _flash_on_cuda_backward(*tensors, *lengths, 0.0, is_causal, empty, empty, scale=scale)
        return dq, dk, dv
    weights = (_scores(query, key, bias, is_causal, scale) - sums.unsqueeze(-1)).exp()
    rowwise = (gradient * output).sum(dim=-1, keepdim=True, dtype=weights.dtype)
    of_weights = _by_groups(gradient, value.mT)
    of_scores = (weights * (of_weights - rowwise) * scale).to(query.dtype)
    weights = weights.to(value.dtype)
    groups = key.size(1)
    dk, dv = (_sum_of_groups(left.mT @ right, groups) for left, right in ((of_scores, query), (weights, gradient)))
    return _by_groups(of_scores, key), dk.to(key.dtype), dv.to(value.dtype)


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of all keys from those of parts; the output is in fp32 at least."""
    sums = torch.stack([each for _, each in parts]).logsumexp(dim=0)
    finite = _finite(sums)
    # In the order of the parts.
    output = sum(each * (own - finite).exp().unsqueeze(-1) for each, own in parts)
    assert isinstance(output, Tensor)
    return output, sums


def _has_flash_on_cuda(query: Tensor, bias: Tensor | None) -> bool:
    if device_type_of(query) != "cuda" or bias is not None or query.size(-1) > WIDEST_HEAD:
        return False
    # Ampere is the first generation with this kernel.
    is_known = planned_device() is not None or torch.cuda.get_device_capability(query.device) >= (8, 0)
    return query.dtype in (torch.bfloat16, torch.float16) and is_known


@overload
def _of_four_dimensions(bias: Tensor, query: Tensor, key: Tensor) -> Tensor: ...
@overload
def _of_four_dimensions(bias: None, query: Tensor, key: Tensor) -> None: ...
def _of_four_dimensions(bias: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    if bias is None:
        return None
    samples, heads = (1, 1, 1, 1, *bias.shape)[-4:-2]
    return bias.broadcast_to((samples, heads, query.size(2), key.size(2)))


def _finite(sums: Tensor) -> Tensor:
    """Replace -inf by 0, so that the weights of a query that sees nothing are 0."""
    return sums.masked_fill(sums == -torch.inf, 0.0)


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    scores = _by_groups(query, key.mT)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    if is_causal:
        forbidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(forbidden, -torch.inf)
    return scores if bias is None else scores + bias


def _by_groups(left: Tensor, right: Tensor) -> Tensor:
    """Multiply ``[b, heads, n, k]`` with ``[b, groups, k, m]``."""
    grouped: Tensor = left.unflatten(1, (right.size(1), -1))
    return (grouped @ right.unsqueeze(2)).flatten(1, 2)


def _sum_of_groups(gradients: Tensor, groups: int) -> Tensor:
    grouped: Tensor = gradients.unflatten(1, (groups, -1))
    return grouped.sum(dim=2)
