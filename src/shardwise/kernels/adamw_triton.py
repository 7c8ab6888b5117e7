"""AdamW's step as one Triton kernel for all parameters, which reads and writes each number once.

For each element it reads the gradient, multiplies it by the clipping factor, updates both running means and the weight,
and may write the weight rounded to 16 bits and clear the gradient. With fp32 copies of 16-bit weights it moves 34 bytes
for each parameter; PyTorch's fused AdamW with a ``grad_scale``, the rounding and the clearing move 42.

A program updates one block of one tensor. It finds the tensors by their addresses, so that one launch updates all of
them. Computations are in fp32, and the bias corrections in fp64.

Source: Loshchilov and Hutter 2019 (arXiv:1711.05101), algorithm 2.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

# Triton's convention: compile-time constants have names in capitals.
# ruff: noqa: N803

# Number of elements of a part, four for each thread, and number of elements that a program updates.
_PART = 512
BLOCK = 4 * _PART
# Addresses of a tensor's gradient, weight, running means, rounded weight and step, and its number of elements.
_COLUMNS = 7


@triton.jit
def _update_part(
    gradients,
    weights,
    means,
    squares,
    rounded,
    offsets,
    inside,
    scale,
    step_size,
    decay,
    rest2,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    EPSILON: tl.constexpr,
    HAS_ROUNDED: tl.constexpr,
    CLEARS: tl.constexpr,
):
    """Update one part; ``inside`` is None if it is a whole one, so that threads read several numbers at once."""
    gradient = tl.load(gradients + offsets, mask=inside) * scale
    mean = tl.load(means + offsets, mask=inside)
    square = tl.load(squares + offsets, mask=inside)
    weight = tl.load(weights + offsets, mask=inside)
    mean += (gradient - mean) * (1.0 - BETA1)
    square += (gradient * gradient - square) * (1.0 - BETA2)
    weight -= decay * weight
    weight -= step_size * tl.div_rn(mean, tl.div_rn(tl.sqrt_rn(square), rest2) + EPSILON)
    tl.store(means + offsets, mean, mask=inside)
    tl.store(squares + offsets, square, mask=inside)
    tl.store(weights + offsets, weight, mask=inside)
    if HAS_ROUNDED:
        tl.store(rounded + offsets, weight.to(rounded.dtype.element_ty), mask=inside)
    if CLEARS:
        tl.store(gradients + offsets, tl.zeros_like(gradient), mask=inside)


@triton.jit
def adamw_kernel(
    tensors,
    blocks,
    factor,
    learning_rate,
    decay,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    LOG_BETA1: tl.constexpr,
    LOG_BETA2: tl.constexpr,
    EPSILON: tl.constexpr,
    ROUNDED: tl.constexpr,
    SCALES: tl.constexpr,
    CLEARS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update one block, part by part. ``LOG_BETA1`` and ``LOG_BETA2`` are logarithms to the base 2."""
    tensor = tensors + tl.load(blocks + 2 * tl.program_id(0)).to(tl.int64) * COLUMNS
    start = tl.load(blocks + 2 * tl.program_id(0) + 1).to(tl.int64) * BLOCK
    numel = tl.load(tensor + 6)
    fp32 = tl.pointer_type(tl.float32)
    gradients = tl.multiple_of(tl.load(tensor).to(fp32), 16)
    weights = tl.multiple_of(tl.load(tensor + 1).to(fp32), 16)
    means = tl.multiple_of(tl.load(tensor + 2).to(fp32), 16)
    squares = tl.multiple_of(tl.load(tensor + 3).to(fp32), 16)
    rounded = weights
    if ROUNDED is not None:
        rounded = tl.multiple_of(tl.load(tensor + 4).to(tl.pointer_type(ROUNDED)), 16)
    step = tl.load(tl.load(tensor + 5).to(fp32)).to(tl.float64)
    # 1 - beta^step, in fp64 because it is small in the first steps.
    rest1 = (1.0 - tl.exp2(step * LOG_BETA1)).to(tl.float32)
    rest2 = tl.sqrt(1.0 - tl.exp2(step * LOG_BETA2)).to(tl.float32)
    step_size = tl.div_rn(learning_rate, rest1)
    scale = 1.0
    if SCALES:
        scale = tl.load(factor)
    places = gradients, weights, means, squares, rounded
    numbers = scale, step_size, decay, rest2
    for part in range(start, tl.minimum(start + BLOCK, numel), PART):
        offsets = part + tl.arange(0, PART)
        if part + PART <= numel:
            _update_part(*places, offsets, None, *numbers, BETA1, BETA2, EPSILON, ROUNDED is not None, CLEARS)
        else:
            _update_part(
                *places, offsets, offsets < numel, *numbers, BETA1, BETA2, EPSILON, ROUNDED is not None, CLEARS
            )


def tables(addresses: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the kernel's tables, int64 ``[n, 7]`` and int32 ``[programs, 2]``, without waiting for the device.

    ``addresses`` has for each parameter those of its gradient, its weight, the running means of the gradient and of its
    square, the rounded weight (0 if there is none) and the number of this step, and its number of elements. All tensors
    are contiguous; all but the rounded weight are fp32, and begin at multiples of 16 bytes.
    """
    counts = np.array([-(-row[-1] // BLOCK) for row in addresses], dtype=np.int64)
    numbers = np.repeat(np.arange(len(counts)), counts)
    first = (counts.cumsum() - counts)[numbers]
    blocks = np.stack([numbers, np.arange(len(numbers)) - first], axis=1).astype(np.int32)
    rows = np.array(addresses, dtype=np.int64).reshape(-1, _COLUMNS)
    made = torch.from_numpy(rows), torch.from_numpy(blocks)
    if device.type == "cpu":
        return made
    return made[0].pin_memory().to(device, non_blocking=True), made[1].pin_memory().to(device, non_blocking=True)


def update_(
    tensors: Tensor,
    blocks: Tensor,
    *,
    factor: Tensor | None,
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
    epsilon: float,
    rounded: torch.dtype | None,
    clears: bool,
) -> None:
    """Update all parameters of the tables of ``tables`` by AdamW; ``clears`` sets the gradients to zero.

    ``factor`` is an fp32 scalar that multiplies the gradients; ``rounded`` the dtype of the rounded weights, if any.
    """
    if len(blocks) == 0:
        return
    kinds = {None: None, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    with torch.cuda.device_of(tensors):
        adamw_kernel[(len(blocks),)](
            tensors,
            blocks,
            # The kernel ignores this if there is no factor.
            tensors if factor is None else factor,
            learning_rate,
            learning_rate * weight_decay,
            BETA1=betas[0],
            BETA2=betas[1],
            # A beta of 0 has no logarithm.
            LOG_BETA1=math.log2(max(betas[0], 1e-300)),
            LOG_BETA2=math.log2(max(betas[1], 1e-300)),
            EPSILON=epsilon,
            ROUNDED=kinds[rounded],
            SCALES=factor is not None,
            CLEARS=clears,
            COLUMNS=_COLUMNS,
            PART=_PART,
            BLOCK=BLOCK,
            num_warps=4,
        )
