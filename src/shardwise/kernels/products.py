"""The three matrix products of a linear layer, by the faster of PyTorch's two CPU libraries, into memory that is there.

PyTorch multiplies fp32 matrices on a CPU with MKL. On AMD's processors oneDNN, which PyTorch brings too and uses for
bf16, is 8 to 20 % faster (106 against 82 to 94 GFLOP/s on a core of an EPYC). Both sum in fp32, in another order, so
results agree to rounding. All other products (other dtypes, devices and processors, small matrices, traced code) are
PyTorch's own.

oneDNN's operator allocates its output. PyTorch's own can write into huge pages, which for a large output of few terms
(the logits of a narrow model) is worth more than the faster product.

``add_product_`` adds a weight's gradient to its ``main_grad``, which may be wider than the factors.
"""

from __future__ import annotations

import platform
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.core import processes
from shardwise.core.errors import ConfigError
from shardwise.kernels import dispatch
from shardwise.kernels.host_memory import empty_in_huge_pages

# The page faults of an output take longer than oneDNN wins on sums of up to so many terms.
_MAX_SHORT_SUM = 512
# A narrow weight gradient is computed transposed by oneDNN, which then needs no copy of a wide factor, but a temporary
# of the gradient's size.
_NARROW = range(64, 257)
_MIN_WIDE = 2048
_MAX_TEMPORARY_BYTES = 4 << 20
# CUDA's widest load, and the alignment that cuBLAS's tensor cores need.
_ALIGNED_BYTES = 16


def autocast(input_: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The factors of a linear layer in autocast's dtype; call it where autocast is on.

    Autocast ends with the forward, but the backward of an autograd function needs factors of one dtype.
    """

    def cast(tensor: Tensor) -> Tensor:
        # fp64 stays fp64, as in PyTorch's own linear.
        return tensor if tensor.dtype == torch.float64 else tensor.to(torch.get_autocast_dtype(tensor.device.type))

    return cast(input_), cast(weight), None if bias is None else cast(bias)


@cache
def why_not_onednn() -> str | None:
    """Why fp32 products on the CPU are left to PyTorch's choice; None if large ones go to oneDNN."""
    if not processes.is_on(processes.ONEDNN):
        return f"{processes.ONEDNN} is 0"
    if _vendor() != "AuthenticAMD":
        return "PyTorch's own products are used on processors other than AMD's"
    if not torch.backends.mkldnn.is_available():
        return "this PyTorch was built without oneDNN"
    left, right = torch.ones(2, 3), torch.ones(4, 3)
    try:
        agrees = bool((onednn_linear(left, right, None) == 3.0).all())
    # It is no public operator, so another PyTorch may lack it, or have it otherwise.
    except Exception as error:
        return f"oneDNN's product fails: {type(error).__name__}: {error}"
    return None if agrees else "oneDNN's product is wrong"


def linear(input_: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``input_ @ weight.T + bias``; where autograd records, PyTorch's own.

    Args:
        input_: ``[..., i]``.
        weight: ``[o, i]``.
        bias: ``[o]`` or None.

    Returns:
        ``[..., o]``.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return F.linear(input_, weight, bias)
    onednn = prefers_onednn(input_, weight)
    num_outputs = input_.numel() // max(weight.size(1), 1) * weight.size(0)
    is_placed = dispatch.PLACED_OUTPUTS.runs(input_, weight, size=num_outputs * weight.element_size())
    if is_placed and not (onednn and weight.size(1) > _MAX_SHORT_SUM):
        rows = input_.reshape(-1, input_.size(-1))
        output = _linear_into(empty_in_huge_pages((rows.size(0), weight.size(0)), rows), rows, weight, bias)
        return output.view(*input_.shape[:-1], weight.size(0))
    return onednn_linear(input_, weight, bias) if onednn else F.linear(input_, weight, bias)


def linear_into_(output: Tensor, input_: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``linear``, written into ``output [..., o]``, which is contiguous, and is returned; not recorded by autograd."""
    rows = input_.reshape(input_.shape[:-1].numel(), input_.size(-1))
    if prefers_onednn(rows, weight):
        return output.copy_(onednn_linear(input_, weight, bias))
    _linear_into(output.view(rows.size(0), weight.size(0)), rows, weight, bias)
    return output


def linear_in_aligned_rows(input_: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``linear`` whose output's rows begin at multiples of 16 bytes on CUDA, for rows of any length.

    There kernels read 16 bytes at once, and cuBLAS takes its fast products of the output, and of a gradient written in
    its place. Not recorded by autograd.

    Args:
        input_: ``[n, i]``.
        weight: ``[o, i]``.
        bias: ``[o]`` or None.

    Returns:
        ``[n, o]``, a view of the first ``o`` columns of a wider matrix if ``o`` elements are no multiple of 16 bytes.
    """
    width = padded_width(weight.size(0), weight.element_size())
    if not needs_alignment(input_, weight):
        return linear(input_, weight, bias)
    return _linear_into(input_.new_empty(input_.size(0), width)[:, : weight.size(0)], input_, weight, bias)


class Products:
    """The products of a linear layer; this class has those of this file.

    Attributes:
        is_usual: autograd's own linear computes the same, and products may overlap with communication.
        adds_bias: ``linear`` may take the bias of a layer whose input features are split, on one rank.
    """

    is_usual = True
    adds_bias = True

    def linear(self, input_: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``input_ @ weight.T + bias``: ``[..., i]`` and ``[o, i]`` to ``[..., o]``."""
        return linear(input_, weight, bias)

    def input_gradient(self, grad_output: Tensor, weight: Tensor) -> Tensor:
        """``grad_output @ weight``: ``[..., o]`` and ``[o, i]`` to ``[..., i]``."""
        return input_gradient(grad_output, weight)

    def weight_gradient(self, grad_output: Tensor, input_: Tensor) -> Tensor:
        """``grad_output.T @ input_``: ``[n, o]`` and ``[n, i]`` to ``[o, i]``."""
        return weight_gradient(grad_output, input_)

    def bias_gradient(self, grad_output: Tensor) -> Tensor:
        """The sums of the columns of ``[n, o]``."""
        return grad_output.sum(dim=0)

    def aligned(self, input_: Tensor, weight: Tensor) -> Products:
        """The same products, with an output whose rows lie aligned where a gradient is recorded and it matters."""
        return AlignedProducts() if torch.is_grad_enabled() and needs_alignment(input_, weight) else self

    def in_dtype(self, dtype: torch.dtype) -> Products:
        """The same products, with an output of this dtype.

        Raises:
            ConfigError: there are none.
        """
        return ProductsIn(dtype)

    def cast(self, output: Tensor) -> Tensor:
        """A product that another function made, in the output's dtype."""
        return output


class AlignedProducts(Products):
    """The products of a linear layer whose output is ``linear_in_aligned_rows``; not recorded by autograd."""

    is_usual = False

    def linear(self, input_: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = input_.reshape(input_.shape[:-1].numel(), input_.size(-1))
        return linear_in_aligned_rows(rows, weight, bias).view(*input_.shape[:-1], weight.size(0))


class ProductsIn(Products):
    """The products of a linear layer whose output has another dtype than the factors; not recorded by autograd.

    Sums are never rounded to a narrower dtype than the output's: fp32 logits of bf16 factors have their fp32 sums.
    Gradients have the factors' dtype.
    """

    is_usual = False

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def aligned(self, input_: Tensor, weight: Tensor) -> Products:
        return self

    def cast(self, output: Tensor) -> Tensor:
        return output.to(self.dtype)

    def linear(self, input_: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if torch.is_autocast_enabled(input_.device.type):
            input_, weight, bias = autocast(input_, weight, bias)
            # It would narrow the wide factors again.
            with torch.autocast(input_.device.type, enabled=False):
                return self._linear(input_, weight, bias)
        return self._linear(input_, weight, bias)

    def _linear(self, input_: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        is_narrow = input_.dtype in (torch.float16, torch.bfloat16)
        if input_.is_cuda and is_narrow and self.dtype == torch.float32:
            # Only CUDA has a product of narrow factors whose result is wide.
            rows = input_.reshape(input_.shape[:-1].numel(), input_.size(-1))
            output = torch.mm(rows, weight.t(), out_dtype=torch.float32)
            return (output if bias is None else output.add_(bias)).view(*input_.shape[:-1], weight.size(0))
        wide = torch.promote_types(input_.dtype, self.dtype)
        bias = None if bias is None else bias.to(wide)
        return linear(input_.to(wide), weight.to(wide), bias).to(self.dtype)


def needs_alignment(input_: Tensor, weight: Tensor) -> bool:
    """True if adjacent rows of ``input_ @ weight.T`` would begin where 16-byte loads cannot."""
    if not input_.is_cuda or torch.compiler.is_compiling():
        return False
    return padded_width(weight.size(0), input_.element_size()) != weight.size(0)


def padded_width(width: int, element_size: int) -> int:
    """The least number of elements, no fewer than ``width``, that fill a multiple of 16 bytes."""
    step = max(_ALIGNED_BYTES // element_size, 1)
    return -(-width // step) * step


def _linear_into(output: Tensor, input_: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return torch.mm(input_, weight.t(), out=output)
    return torch.addmm(bias, input_, weight.t(), out=output)


def input_gradient(grad_output: Tensor, weight: Tensor) -> Tensor:
    """``grad_output @ weight``: ``[..., o]`` and ``[o, i]`` to ``[..., i]``; not recorded by autograd."""
    if prefers_onednn(grad_output, weight.t()):
        return onednn_linear(grad_output, weight.t(), None)
    return grad_output.matmul(weight)


def weight_gradient(grad_output: Tensor, input_: Tensor) -> Tensor:
    """``grad_output.T @ input_``: ``[n, o]`` and ``[n, i]`` to ``[o, i]``; not recorded by autograd.

    PyTorch's own product: oneDNN's would need a copy of the transposed factor, which takes what it gains, unless ``i``
    is much smaller than ``o``.
    """
    if torch.compiler.is_compiling():
        return grad_output.t().mm(input_)
    out = empty_in_huge_pages((grad_output.size(1), input_.size(1)), input_)
    narrow = input_.size(1) in _NARROW and grad_output.size(1) >= _MIN_WIDE and out.nbytes <= _MAX_TEMPORARY_BYTES
    if narrow and prefers_onednn(input_.t(), grad_output.t()):
        return out.copy_(onednn_linear(input_.t(), grad_output.t(), None).t())
    return torch.mm(grad_output.t(), input_, out=out)


def prefers_onednn(input_: Tensor, weight: Tensor, num_multiplications: int | None = None) -> bool:
    """True if oneDNN multiplies ``input_ [..., i]`` by the transpose of ``weight [o, i]``.

    Args:
        input_, weight: the factors.
        num_multiplications: number to choose by; that of this product if None.
    """

    # For a matrix that lies neither by rows nor by columns oneDNN may have no code but its slow reference.
    def lie_evenly() -> bool:
        return all(x.is_contiguous() or (x.dim() == 2 and x.t().is_contiguous()) for x in (input_, weight))

    size = input_.numel() * weight.size(0) if num_multiplications is None else num_multiplications
    return dispatch.ONEDNN.runs(input_, weight, size=size, fits=lie_evenly)


def onednn_linear(input_: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``input_ @ weight.T + bias`` by oneDNN."""
    operator: Any = torch.ops.mkldnn._linear_pointwise
    output: Tensor = operator(input_, weight, bias, "none", [], "")
    return output


def sums_by_shape(factor: Tensor) -> bool:
    """True where the order of the sum of a product's element depends on all of its sizes; ``factor`` is either factor.

    On Intel's processors it does for MKL's products in fp32, and oneDNN's in bf16 on AMX.
    """
    return factor.is_cpu and is_intel()


@cache
def is_intel() -> bool:
    """True on Intel's processors."""
    return _vendor() == "GenuineIntel"


def _vendor() -> str | None:
    return processor_says("vendor_id") if platform.machine() in ("x86_64", "AMD64") else None


def processor_says(field: str) -> str | None:
    """A field of the first processor in ``/proc/cpuinfo``, such as ``"model name"``, if any."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            line = next((line for line in file if line.startswith(field)), "")
    except OSError:
        return None
    return line.partition(":")[2].strip() or None


# Elements of the temporary through which factors pass on their way into a wider sum: 16 MiB of fp32.
_TEMPORARY_ELEMENTS = 1 << 22
# A product over fewer rows than this spends its time on reading and writing the sum.
_MIN_ROWS = 256


def main_grad_of(weight: Tensor) -> Tensor:
    """``weight.main_grad``, for one backward to add to; ConfigError if it has none.

    A parameter of Megatron-FSDP (it has ``__fsdp_param__``) gets a new one, of zeros, from its ``get_main_grad()``:
    call once for all terms.
    """
    if hasattr(weight, "__fsdp_param__"):
        fsdp_weight: Any = weight
        fsdp_weight.main_grad = fsdp_weight.get_main_grad().zero_()
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is None:
        raise ConfigError(
            f"gradient_accumulation_fusion adds to weight.main_grad, and the weight of shape {list(weight.shape)} has "
            "none; set weight.main_grad = torch.zeros_like(weight, dtype=torch.float32) before the backward, or turn "
            "gradient_accumulation_fusion off"
        )
    return main_grad


def placeholder(weight: Any) -> Tensor | None:
    """The gradient for autograd where the real one went to ``main_grad``: None, or zeros without memory.

    If the weight has the attribute ``grad_added_to_main_grad``, that becomes True and autograd gets zeros, so that
    hooks on the weight run, whether or not ``weight.zero_out_wgrad`` asks for that.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    zeros: Tensor = weight.new_zeros(()).expand(weight.shape)
    return zeros


@torch.no_grad()
def add_product_(out: Tensor, left: Tensor, right: Tensor) -> None:
    """``out += left.T @ right``, with products and sums in ``out``'s dtype.

    Where that is wider than the factors', they are widened a bounded number of rows at a time.

    Args:
        out: ``[o, i]``, overwritten.
        left: ``[n, o]``.
        right: ``[n, i]``.
    """
    if out.dtype == right.dtype:
        out.addmm_(left.t(), right)
        return
    if out.is_cuda and out.dtype == torch.float32 and right.dtype in (torch.float16, torch.bfloat16):
        # Only CUDA has a product of narrow factors that is added to a wide sum.
        torch.addmm(out, left.t(), right, out_dtype=torch.float32, out=out)
        return
    num_rows = max(_MIN_ROWS, _TEMPORARY_ELEMENTS // max(left.size(1) + right.size(1), 1))
    for start in range(0, right.size(0), num_rows):
        rows = slice(start, start + num_rows)
        out.addmm_(left[rows].to(out.dtype).t(), right[rows].to(out.dtype))
