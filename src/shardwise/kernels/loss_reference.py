"""The loss on this rank's logits in plain PyTorch, the definition that every kernel is tested against.

A logit ``x`` enters the softmax as ``y = softcap(x) / temperature`` with ``softcap(x) = c tanh(x / c)``; its *slope* is
``dy/dx = (1 - tanh²(x / c)) / temperature``. Computations are in fp32 (fp64 for fp64 logits). Targets are column
indices on this rank, or -1 if another rank holds the target.

Rows are processed in blocks that suit the device, so that the logits are never copied as a whole. Under
``torch.compile`` all rows are processed at once, since the compiler generates its own loops.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from shardwise.core.communication.trees import deterministic_sum
from shardwise.kernels.fake_device import device_type_of, planned_device

# Elements of one block on a CPU: 1 MiB of fp32, about a core's second-level cache.
BLOCK_ELEMENTS = 1 << 18
# On other devices 64 MiB of fp32: each operation then keeps a GPU busy for longer than its launch takes.
GPU_BLOCK_ELEMENTS = 1 << 24


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of computations with logits of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_blocks(matrix: Tensor) -> Iterator[slice]:
    """Yield slices of consecutive rows whose temporaries suit the device; all rows under ``torch.compile``."""
    num_rows, num_columns = matrix.shape
    if torch.compiler.is_compiling():
        yield slice(0, num_rows)
        return
    elements = BLOCK_ELEMENTS if device_type_of(matrix) == "cpu" else GPU_BLOCK_ELEMENTS
    rows = max(1, elements // max(num_columns, 1))
    if planned_device() is not None:
        # While the second is computed, variables of a loop hold tensors of the first; others take no more memory.
        num_rows = min(num_rows, 2 * rows)
    for start in range(0, num_rows, rows):
        yield slice(start, min(start + rows, num_rows))


def row_statistics(
    logits: Tensor,
    target_local: Tensor,
    *,
    softcap: float | None = None,
    temperature: float = 1.0,
    want_sum: bool = False,
    exponentiate_: bool = False,
) -> Tensor:
    """Compute each row's maximum, sum of exponentials and target logit.

    Args:
        logits: ``[n, v]``, any strides.
        target_local: ``[n]``, column of the target, -1 if it is not among the ``v`` columns.
        softcap: the cap ``c``, or None.
        temperature: divisor of the capped logits.
        want_sum: whether to compute a fourth number, the sum.
        exponentiate_: whether to overwrite the logits with ``slope · exp(y - m)``, the softmax's gradient up to a
            factor per row. The target's entry becomes 0: its exact value needs a difference over the whole vocabulary.

    Returns:
        ``[n, 3]`` or ``[n, 4]``: ``m = max y``, ``Σ exp(y - m)``, ``y_target - m`` (-inf without a target), and
        ``Σ (y - m)``. Without columns ``-inf, 0, -inf, 0``. NaN or inf anywhere in a row makes its sum of exponentials
        NaN.
    """
    num_rows, num_columns = logits.shape
    dtype = compute_dtype(logits.dtype)
    statistics = torch.zeros(num_rows, 4 if want_sum else 3, dtype=dtype, device=logits.device)
    if num_columns == 0:
        statistics[:, ::2] = -torch.inf
        return statistics
    elsewhere = target_local < 0
    columns = target_local.clamp(min=0).unsqueeze(1)
    for rows in row_blocks(logits):
        y, slope = transformed(logits[rows], softcap, temperature)
        maximum = y.amax(dim=1)
        out = statistics[rows]
        out[:, 0] = maximum
        shifted, out[:, 2] = below_maximum(y, maximum, target_local[rows])
        if want_sum:
            out[:, 3] = _sums(shifted)
        exponentials = shifted.exp_()
        out[:, 1] = _sums(exponentials)
        if exponentiate_:
            index = columns[rows]
            kept = torch.where(elsewhere[rows].unsqueeze(1), exponentials.gather(1, index), 0.0)
            exponentials.scatter_(1, index, kept)
            logits[rows] = exponentials if slope is None else exponentials.mul_(slope)
    return statistics


def gradient_(
    out: Tensor,
    logits: Tensor,
    target_local: Tensor,
    shift: Tensor,
    scale: Tensor,
    at_target: Tensor,
    rest: Tensor | None = None,
    *,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> None:
    """Write ``slope · (scale · exp(y - shift) - rest)`` to ``out``, and ``slope · at_target`` in the target's column.

    If all numbers of a row are 0, such as those of an ignored token, the row becomes 0 for any logits. Shapes and
    options are those of ``row_statistics``; ``out`` may be ``logits`` itself. ``shift``, ``scale``, ``at_target`` and
    ``rest`` (None means 0) are ``[n]`` in fp32 (fp64 for fp64 logits); a shift of -inf counts as the least finite
    number.
    """
    if logits.size(1) == 0:
        return
    owned = target_local >= 0
    columns = target_local.clamp(min=0).unsqueeze(1)
    nothing = (scale == 0) & ~(owned & (at_target != 0))
    if rest is not None:
        nothing &= rest == 0
    shift, scale, nothing, owned = (x.unsqueeze(1) for x in (finite(shift), scale, nothing, owned))
    for rows in row_blocks(logits):
        y, slope = transformed(logits[rows], softcap, temperature)
        result = (y - shift[rows]).exp_().mul_(scale[rows])
        if rest is not None:
            result.sub_(rest[rows].unsqueeze(1))
        index = columns[rows]
        result.scatter_(1, index, torch.where(owned[rows], at_target[rows].unsqueeze(1), result.gather(1, index)))
        if slope is not None:
            result.mul_(slope)
        out[rows] = result.masked_fill_(nothing[rows], 0.0)


def _sums(matrix: Tensor) -> Tensor:
    """Return the sum of each row. Threads share a single row, so its sum must not depend on their number."""
    return deterministic_sum(matrix).view(1) if matrix.size(0) == 1 else matrix.sum(dim=1)


def finite(maximum: Tensor) -> Tensor:
    """Return the maximum to subtract before the exponential, finite even for a row of -inf (exponentials of 0)."""
    return maximum.clamp(min=torch.finfo(maximum.dtype).min)


def below_maximum(y: Tensor, maximum: Tensor, target_local: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``y - maximum`` of each row ``[n, v]``, and its element in the target's column (-inf without a target)."""
    shifted = y - finite(maximum).unsqueeze(1)
    at_target = shifted.gather(1, target_local.clamp(min=0).unsqueeze(1)).squeeze(1)
    return shifted, at_target.masked_fill(target_local < 0, -torch.inf)


def transformed(logits: Tensor, softcap: float | None, temperature: float) -> tuple[Tensor, Tensor | float | None]:
    """Return ``y`` in fp32 (fp64 for fp64 logits), not copied if unchanged, and its slope, where None means 1."""
    y = logits.to(compute_dtype(logits.dtype))
    slope: Tensor | float | None = None
    if softcap is not None:
        tanh = (y / softcap).tanh_()
        y, slope = tanh * softcap, 1.0 - tanh.square()
    if temperature != 1.0:
        y, slope = y / temperature, (1.0 if slope is None else slope) / temperature
    return y, slope
