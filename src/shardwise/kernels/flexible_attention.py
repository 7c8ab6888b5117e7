"""Attention under masks and changes of scores that are functions of positions: PyTorch's FlexAttention.

PyTorch compiles a kernel for each kind of functions. The kernel keeps no scores, and skips blocks of keys that a block
of queries does not see.

Source: Dong et al. 2024 (arXiv:2412.05496).
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

Sees = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Whether a query sees a key, from the indices of sample, head, query and key."""
Changed = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""A score that replaces another, from the score and the indices of sample, head, query and key."""


class Functions(NamedTuple):
    """A mask, with the blocks of keys that each block of queries sees, and a change of scores or None."""

    blocks: BlockMask
    changed: Changed | None


def blocks_of(sees: Sees, sizes: tuple[int, int, int, int], device: torch.device) -> BlockMask:
    """Return a mask with its blocks; sizes count samples and heads that differ, queries and keys."""
    blocks: BlockMask = _made_for(device, create_block_mask)(sees, *sizes, device=device)
    return blocks


def attend(
    query: Tensor, key: Tensor, value: Tensor, functions: Callable[[], Functions], *, scale: float, has_sums: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute attention.

    Args:
        query: ``[b, heads, s, d]``.
        key, value: ``[b, groups, keys, d]``; each group serves as many successive heads. Values may have another width.
        functions: returns the mask and the change of scores.
        scale: factor of the products, before the change.
        has_sums: whether to return the log-sum-exp of the scores.

    Returns:
        ``[b, heads, s, d]``, 0 for a query that sees nothing; and ``[b, heads, s]`` in fp32 at least, -inf for such a
        query, or None.
    """
    blocks, changed = functions()
    options: dict[str, Any] = {"scale": scale, "enable_gqa": query.size(1) > key.size(1)}
    output, found = _made_for(query.device, flex_attention)(
        query, key, value, score_mod=changed, block_mask=blocks, return_aux=AuxRequest(lse=has_sums), **options
    )
    return output, found.lse


def _made_for(device: torch.device, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, compiled on CUDA: PyTorch's operations would hold all scores."""
    return _compiled(function) if device.type == "cuda" else function


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(function, fullgraph=True)

    def within_limits(*args: Any, **kwargs: Any) -> Any:
        # Each kind of functions is a compilation, and PyTorch's default limit is 8 of them.
        with torch._dynamo.config.patch(recompile_limit=64):
            return compiled(*args, **kwargs)

    return within_limits
