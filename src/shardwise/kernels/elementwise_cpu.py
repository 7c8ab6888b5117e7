"""SwiGLU, rotary embedding, RMSNorm and sums of squares on a CPU, fp32, each in one pass over memory.

The loops are in ``elementwise_cpu.c``. Where ``dispatch.ELEMENTWISE`` does not run, PyTorch's single operations compute
the same, up to rounding. Nothing here is recorded by autograd.
"""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.kernels import compiled, dispatch
from shardwise.kernels.compiled import address, over_rows


def why_not_compiled() -> str | None:
    """Why there is no compiled code on this machine; None if there is. Compiles when first asked."""
    return compiled.why_not("elementwise_cpu.c")


def swiglu(inner: Tensor) -> Tensor:
    """``swiglu.swiglu`` of a contiguous tensor."""
    output = inner.new_empty(*inner.shape[:-1], inner.size(-1) // 2)
    _over_flat_rows("swiglu", inner, output)
    return output


def swiglu_gradient(inner: Tensor, grad_output: Tensor) -> Tensor:
    """The gradient of ``swiglu``'s input."""
    grad_inner = torch.empty_like(inner)
    _over_flat_rows("swiglu_gradient", inner, grad_output.contiguous(), grad_inner)
    return grad_inner


def rotate_halves(
    input_: Tensor, cos: Tensor, sin: Tensor, *, backwards: bool = False, at_any_size: bool = False
) -> Tensor | None:
    """Turn the pairs ``(i, i + d/2)`` of every head by its position's angles.

    Args:
        input_: ``[s, b, heads, d]``.
        cos: ``[s, 1, 1, d/2]``.
        sin: like ``cos``.
        backwards: by the negative angles.
        at_any_size: of small tensors too, and of any strides: let neither size nor strides choose.

    Returns:
        A new tensor like ``input_``; None where compiled code is not for it.
    """
    if at_any_size:
        input_ = input_.contiguous()
    rows, batch, heads, width = input_.shape
    # The stride of a dimension of one element says nothing.
    column_stride = input_.stride(2) if heads > 1 else input_.stride(1)

    def fits() -> bool:
        return (
            cos.shape == sin.shape == (rows, 1, 1, width // 2)
            and width % 2 == 0
            and input_.stride(3) == 1
            and (batch == 1 or heads == 1 or input_.stride(1) == heads * column_stride)
        )

    size = dispatch.ELEMENTWISE.min_size if at_any_size else input_.numel()
    if not dispatch.ELEMENTWISE.runs(input_, cos, sin, size=size, fits=fits):
        return None
    output = torch.empty(input_.shape, dtype=input_.dtype)
    cos, sin = cos.contiguous(), sin.contiguous()

    def compute(start: int, stop: int) -> None:
        _kernel("rotate")(
            address(input_, start),
            *(ctypes.c_int64(stride) for stride in (input_.stride(0), column_stride)),
            address(output, start),
            *(ctypes.c_int64(size) for size in (stop - start, batch * heads, width // 2)),
            address(cos, start),
            address(sin, start),
            ctypes.c_float(-1.0 if backwards else 1.0),
        )

    over_rows(compute, rows, batch * heads * width)
    return output


def rms_norm(input_: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``kernels.norms`` of contiguous tensors.

    Returns:
        The output, and ``rsqrt(mean(x^2) + eps)`` of each row, ``[..., 1]``.
    """
    output = torch.empty_like(input_)
    scale = input_.new_empty(*input_.shape[:-1], 1)
    flat = [_rows_of(tensor) for tensor in (input_, output, scale)]

    def compute(start: int, stop: int) -> None:
        rows, out, scales = (address(tensor, start) for tensor in flat)
        sizes = (ctypes.c_int64(stop - start), ctypes.c_int64(weight.numel()))
        _kernel("rms_norm")(rows, address(weight, 0), out, scales, *sizes, ctypes.c_float(eps))

    over_rows(compute, *flat[0].shape)
    return output, scale


def rms_norm_gradient(
    input_: Tensor,
    grad_output: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    needs_input: bool,
    needs_weight: bool,
    num_parts: int | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of input and weight, where needed, from what ``rms_norm`` had and gave.

    With ``num_parts`` that of the weight is ``[num_parts, n]``, of equal runs of rows, each summed by itself.
    """
    grad_input = torch.empty_like(input_) if needs_input else None
    flat = [_rows_of(tensor) for tensor in (input_, grad_output.contiguous(), scale)]
    flat_grad = None if grad_input is None else _rows_of(grad_input)
    sums: dict[int, Tensor] = {}

    def compute(start: int, stop: int) -> None:
        rows, grad, scales = (address(tensor, start) for tensor in flat)
        to_input = ctypes.c_void_p(None) if flat_grad is None else address(flat_grad, start)
        to_weight = ctypes.c_void_p(None)
        if needs_weight:
            # Each thread has sums of its own.
            sums[start] = torch.zeros(weight.shape, dtype=torch.float64)
            to_weight = address(sums[start], 0)
        sizes = (ctypes.c_int64(stop - start), ctypes.c_int64(weight.numel()))
        _kernel("rms_norm_gradient")(rows, grad, address(weight, 0), scales, to_input, to_weight, *sizes)

    num_rows, width = flat[0].shape
    if num_parts is None:
        over_rows(compute, num_rows, width)
    else:
        each = num_rows // num_parts

        def compute_parts(start: int, stop: int) -> None:
            for part in range(start, stop):
                compute(part * each, (part + 1) * each)

        over_rows(compute_parts, num_parts, each * width)
    if not needs_weight:
        return grad_input, None
    # In the order of the rows, whichever thread was done first.
    in_order = torch.stack([sums[start] for start in sorted(sums)])
    return grad_input, (in_order.sum(0) if num_parts is None else in_order).to(weight.dtype)


def sums_of_squares(flat: Tensor, length: int) -> Tensor | None:
    """The sums of squares, in fp64, of each run of ``length`` elements of ``[n]``, each added up in one order.

    Returns:
        None where compiled code is not for it.
    """
    if not dispatch.ELEMENTWISE.runs(flat, size=dispatch.ELEMENTWISE.min_size, fits=flat.is_contiguous):
        return None
    rows = -(-flat.numel() // length)
    sums = torch.empty(rows, dtype=torch.float64)

    def compute(start: int, stop: int) -> None:
        first, last = start * length, min(stop * length, flat.numel())
        sizes = (ctypes.c_int64(last - first), ctypes.c_int64(length))
        _kernel("sums_of_squares")(address(flat, first), address(sums, start), *sizes)

    over_rows(compute, rows, length)
    return sums


def _over_flat_rows(name: str, *tensors: Tensor) -> None:
    flat = [_rows_of(tensor) for tensor in tensors]
    width = flat[0].size(1) // 2

    def compute(start: int, stop: int) -> None:
        _kernel(name)(*(address(x, start) for x in flat), ctypes.c_int64(stop - start), ctypes.c_int64(width))

    over_rows(compute, *flat[0].shape)


def _rows_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1, tensor.size(-1))


def _kernel(name: str) -> Callable[..., None]:
    return compiled.function(name, "elementwise_cpu.c")
