"""Attention of one new token to a cache of fixed size, whose filled length is a tensor on the device.

Shapes and addresses are the same for every token, and the host does not read the length. A GPU's pass over a token can
therefore be captured once and replayed (``models.generation.decoding``).
"""

import torch
from torch import Tensor

from shardwise.kernels import dispatch


def attend_to_cache(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    *,
    scale: float,
    before: int = -1,
    softcap: float | None = None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute ``softmax(query keys^T) values`` over the positions up to the query's own; there is no gradient.

    The definition reads the whole cache, in fp32 (fp64 for fp64). The kernel reads only the filled part, and each key
    once for all queries of its group (``dispatch.DECODE_TRITON``).

    Args:
        query: ``[b, groups * n, 1, d]``; the ``n`` queries of a group are adjacent.
        keys: ``[b, groups, capacity, d]``, as the values; those after the query's position are arbitrary.
        position: int64 ``[1]``, position of the query; ``keys`` includes the key at this position.
        before: number of earlier positions that a query sees; -1 means all.
        softcap: scores ``x`` become ``softcap · tanh(x / softcap)``; None means no cap.
        slopes: ``[groups * n]``, decrease of the scores per position of distance; None means 0.
        sinks: ``[groups * n]``, a further logit in the softmax of each query, for no key; None for none.

    Source: Dao et al. 2023, "Flash-Decoding for long-context inference" (the kernel).
    """

    def fits() -> bool:
        return keys.stride(3) == values.stride(3) == 1 and keys.size(3) <= dispatch.WIDEST_HEAD

    if (kernels := dispatch.DECODE_TRITON.kernels(query, keys, values, fits=fits)) is not None:
        options = (scale, before, softcap, slopes, sinks)
        attended: Tensor = kernels.attend_to_cache(query, keys, values, position, *options)
        return attended
    b, groups, capacity, d = keys.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = query.reshape(b, groups, -1, d).to(wide)
    scores = (grouped @ keys.to(wide).transpose(-1, -2)) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    place = torch.arange(capacity, device=keys.device)
    if slopes is not None:
        scores = scores + slopes.to(wide).view(groups, -1, 1) * (place - position)
    hidden = place > position
    if before >= 0:
        hidden = hidden | (place < position - before)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        own = sinks.to(wide).view(groups, -1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, own], dim=-1)
    weights = scores.softmax(dim=-1)[..., :capacity]
    # Unwritten values may be NaN, and 0 times NaN is NaN.
    seen = values.to(wide).masked_fill(hidden.unsqueeze(-1), 0.0)
    return (weights @ seen).to(query.dtype).view(query.shape)
