"""SwiGLU and rotary embedding as one Triton kernel each; ``elementwise`` defines them.

Computations are in fp32 (fp64 for fp64), with one rounding. Offsets have 64 bits, so tensors may have more than 2^31
elements.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.elementwise import rows_of, with_columns_together

# Triton's convention: compile-time constants have names in capitals.
# ruff: noqa: N803

# Number of elements that a program reads from each tensor.
_BLOCK = 1024


@triton.jit
def swiglu_kernel(inner, output, stride, width, IS_DOUBLE: tl.constexpr, BLOCK: tl.constexpr):
    """Compute one block of one row."""
    wide = tl.float64 if IS_DOUBLE else tl.float32
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    inner += row * stride
    gate = tl.load(inner + columns, mask=inside, other=0.0).to(wide)
    up = tl.load(inner + width + columns, mask=inside, other=0.0).to(wide)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(output + row * width + columns, result.to(output.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_gradient_kernel(
    inner, grad_output, grad_inner, stride, grad_stride, width, IS_DOUBLE: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute one block of one row. If ``p`` is the gate's sigmoid, ``d silu = p (1 + gate (1 - p))``."""
    wide = tl.float64 if IS_DOUBLE else tl.float32
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    inner += row * stride
    grad_inner += row * 2 * width
    gate = tl.load(inner + columns, mask=inside, other=0.0).to(wide)
    up = tl.load(inner + width + columns, mask=inside, other=0.0).to(wide)
    grad = tl.load(grad_output + row * grad_stride + columns, mask=inside, other=0.0).to(wide)
    # This exponential cannot overflow, and gives 1 - p without a subtraction.
    decay = tl.exp(-tl.abs(gate))
    larger, smaller = 1.0 / (1.0 + decay), decay / (1.0 + decay)
    p, rest = tl.where(gate >= 0.0, larger, smaller), tl.where(gate >= 0.0, smaller, larger)
    grad_gate = grad * up * p * (1.0 + gate * rest)
    tl.store(grad_inner + columns, grad_gate.to(grad_inner.dtype.element_ty), mask=inside)
    tl.store(grad_inner + width + columns, (grad * gate * p).to(grad_inner.dtype.element_ty), mask=inside)


@triton.jit
def rotary_kernel(
    mixed,
    query,
    key,
    value,
    cos,
    sin,
    mixed_s,
    mixed_b,
    mixed_h,
    query_s,
    query_b,
    query_h,
    key_s,
    key_b,
    key_h,
    value_s,
    value_b,
    value_h,
    angle_s,
    angle_b,
    batch,
    num_heads,
    sign,
    PER_GROUP: tl.constexpr,
    NUM_OTHERS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TO_MIXED: tl.constexpr,
    IS_DOUBLE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Rotate some heads of one token and move them between ``mixed`` and its parts. ``sign`` is -1 for negative angles.

    With ``NUM_OTHERS`` 2, ``mixed`` has groups of queries, a key and a value; with 0, all heads are queries.
    """
    wide = tl.float64 if IS_DOUBLE else tl.float32
    dtype = mixed.dtype.element_ty
    token = tl.program_id(0)
    s, b = (token // batch).to(tl.int64), (token % batch).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    there = head < num_heads
    whole = mixed + s * mixed_s + b * mixed_b + head.to(tl.int64) * mixed_h
    if NUM_OTHERS > 0:
        group = (head // (PER_GROUP + NUM_OTHERS)).to(tl.int64)
        place = head % (PER_GROUP + NUM_OTHERS)
        turns = place <= PER_GROUP
        part = tl.where(
            place < PER_GROUP,
            query + s * query_s + b * query_b + (group * PER_GROUP + place) * query_h,
            tl.where(
                turns, key + s * key_s + b * key_b + group * key_h, value + s * value_s + b * value_b + group * value_h
            ),
        )
    else:
        turns = there
        part = query + s * query_s + b * query_b + head.to(tl.int64) * query_h
    if TO_MIXED:
        source, target = part, whole
    else:
        source, target = whole, part

    half = tl.arange(0, BLOCK_HALF)[None, :]
    angles = s * angle_s + b * angle_b + half
    # Values have angles of 0, which copies them.
    c = tl.where(turns, tl.load(cos + angles, mask=half < HALF, other=0.0).to(wide), 1.0)
    d = tl.where(turns, tl.load(sin + angles, mask=half < HALF, other=0.0).to(wide) * sign, 0.0)
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        inside = there & (both < 2 * HALF)
        pairs = tl.reshape(tl.load(source + both, mask=inside, other=0.0), (BLOCK_HEADS, BLOCK_HALF, 2))
        first, second = tl.split(pairs)
        first, second = first.to(wide), second.to(wide)
        turned = tl.join((first * c - second * d).to(dtype), (second * c + first * d).to(dtype))
        tl.store(target + both, tl.reshape(turned, (BLOCK_HEADS, 2 * BLOCK_HALF)), mask=inside)
    else:
        inside = there & (half < HALF)
        first = tl.load(source + half, mask=inside, other=0.0).to(wide)
        second = tl.load(source + HALF + half, mask=inside, other=0.0).to(wide)
        tl.store(target + half, (first * c - second * d).to(dtype), mask=inside)
        tl.store(target + HALF + half, (second * c + first * d).to(dtype), mask=inside)
    if REST > 0:
        rest = tl.arange(0, BLOCK_REST)[None, :]
        inside = there & (rest < REST)
        copied = tl.load(source + 2 * HALF + rest, mask=inside, other=0.0)
        tl.store(target + 2 * HALF + rest, copied, mask=inside)


def swiglu(inner: Tensor) -> Tensor:
    """Compute ``elementwise.swiglu``; autograd does not record this."""
    width = inner.size(-1) // 2
    output = inner.new_empty(*inner.shape[:-1], width)
    rows = rows_of(inner)
    block = block_size(width)
    with torch.cuda.device_of(inner):
        swiglu_kernel[(rows.size(0), triton.cdiv(width, block))](
            rows, output, rows.stride(0), width, IS_DOUBLE=_is_double(inner), BLOCK=block, num_warps=_num_warps(block)
        )
    return output


def swiglu_gradient(inner: Tensor, grad_output: Tensor) -> Tensor:
    """Return the gradient of ``swiglu``'s input."""
    width = inner.size(-1) // 2
    grad_inner = torch.empty(inner.shape, dtype=inner.dtype, device=inner.device)
    rows, grad_rows = rows_of(inner), rows_of(grad_output)
    block = block_size(width)
    with torch.cuda.device_of(inner):
        swiglu_gradient_kernel[(rows.size(0), triton.cdiv(width, block))](
            rows,
            grad_rows,
            grad_inner,
            rows.stride(0),
            grad_rows.stride(0),
            width,
            IS_DOUBLE=_is_double(inner),
            BLOCK=block,
            num_warps=_num_warps(block),
        )
    return grad_inner


def rotate(input_: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *, backwards: bool) -> Tensor:
    """Compute ``elementwise.rotate``, optionally by the negative angles; autograd does not record this."""
    output = torch.empty(input_.shape, dtype=input_.dtype, device=input_.device)
    _launch(
        with_columns_together(input_),
        (output, output, output),
        (cos, sin),
        per_group=input_.size(2),
        num_others=0,
        interleaved=interleaved,
        backwards=backwards,
        to_mixed=False,
    )
    return output


def split_and_rotate(
    mixed: Tensor, cos: Tensor, sin: Tensor, per_group: int, head_dim: int, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``elementwise.split_and_rotate``; autograd does not record this."""
    s, b, rows = mixed.shape
    num_groups = rows // (head_dim * (per_group + 2))
    query = mixed.new_empty(s, b, num_groups * per_group, head_dim)
    key, value = (mixed.new_empty(s, b, num_groups, head_dim) for _ in range(2))
    _launch(
        with_columns_together(mixed).unflatten(2, (-1, head_dim)),
        (query, key, value),
        (cos, sin),
        per_group=per_group,
        num_others=2,
        interleaved=interleaved,
        backwards=False,
        to_mixed=False,
    )
    return query, key, value


def split_and_rotate_gradient(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> Tensor:
    """Return the gradient of ``split_and_rotate``'s input from the gradients of its results."""
    s, b, num_groups, head_dim = key.shape
    per_group = query.size(2) // num_groups
    mixed = query.new_empty(s, b, num_groups * (per_group + 2), head_dim)
    _launch(
        mixed,
        (with_columns_together(query), with_columns_together(key), with_columns_together(value)),
        (cos, sin),
        per_group=per_group,
        num_others=2,
        interleaved=interleaved,
        backwards=True,
        to_mixed=True,
    )
    return mixed.flatten(2)


def _launch(
    mixed: Tensor,
    parts: tuple[Tensor, Tensor, Tensor],
    angles: tuple[Tensor, Tensor],
    *,
    per_group: int,
    num_others: int,
    interleaved: bool,
    backwards: bool,
    to_mixed: bool,
) -> None:
    s, b, num_heads, head_dim = mixed.shape
    cos, sin = (x.contiguous() for x in angles)
    half = cos.size(-1)
    rest = head_dim - 2 * half
    block_half = triton.next_power_of_2(max(half, 1))
    block_heads = max(1, min(triton.next_power_of_2(num_heads), _BLOCK // block_half))
    with torch.cuda.device_of(mixed):
        rotary_kernel[(s * b, triton.cdiv(num_heads, block_heads))](
            mixed,
            *parts,
            cos,
            sin,
            *mixed.stride()[:3],
            *(stride for part in parts for stride in part.stride()[:3]),
            cos.stride(0),
            cos.stride(1) if cos.size(1) > 1 else 0,
            b,
            num_heads,
            -1.0 if backwards else 1.0,
            PER_GROUP=per_group,
            NUM_OTHERS=num_others,
            HALF=half,
            REST=rest,
            INTERLEAVED=interleaved,
            TO_MIXED=to_mixed,
            IS_DOUBLE=_is_double(mixed),
            BLOCK_HEADS=block_heads,
            BLOCK_HALF=block_half,
            BLOCK_REST=triton.next_power_of_2(max(rest, 1)),
            num_warps=_num_warps(block_heads * block_half),
        )


def block_size(width: int) -> int:
    """Return the number of columns of a row that a program computes."""
    size: int = triton.next_power_of_2(width)
    return min(_BLOCK, size)


def _num_warps(block: int) -> int:
    # Each thread has 8 elements, which are 16 bytes in bf16.
    return max(1, min(4, block // 256))


def _is_double(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float64
