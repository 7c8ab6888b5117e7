"""The three matrix products of a linear layer, by the faster of PyTorch's two CPU libraries.

PyTorch multiplies fp32 matrices on a CPU with MKL. On AMD processors oneDNN, which PyTorch also includes and uses for
bf16, is 8 to 20 % faster (106 against 82 to 94 GFLOP/s on a core of an EPYC). Both sum in fp32 but in different orders,
so results agree up to rounding. All other products (other dtypes, devices and processors, small matrices, traced code)
use PyTorch's default operators.

oneDNN's operator allocates its output. PyTorch's default operator can write into huge pages. For a large output that
sums few terms, such as the logits of a narrow model, this saves more time than the faster product.

``add_product_`` adds a weight's gradient to its ``main_grad``, whose dtype may be wider than that of the factors.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.core import processes
from shardwise.core.errors import ConfigError
from shardwise.kernels import dispatch
from shardwise.kernels.fake_device import device_type_of
from shardwise.kernels.host_memory import empty_in_huge_pages

# In sums of up to this many terms, the page faults of the output take more time than oneDNN saves.
_MAX_SHORT_SUM = 512
# oneDNN computes a narrow weight gradient transposed. It then needs no copy of a wide factor, but a temporary of the
# gradient's size.
_NARROW = range(64, 257)
_MIN_WIDE = 2048
_MAX_TEMPORARY_BYTES = 4 << 20
# CUDA's widest load, and the alignment that cuBLAS's tensor cores need.
_ALIGNED_BYTES = 16


def autocast(input_: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast the factors of a linear layer to autocast's dtype; call this only under autocast.

    Autocast ends with the forward, but the backward of an autograd function needs factors of one dtype.
    """

    def cast(tensor: Tensor) -> Tensor:
        # fp64 stays fp64, as in PyTorch's own linear.
        return tensor if tensor.dtype == torch.float64 else tensor.to(torch.get_autocast_dtype(tensor.device.type))

    return cast(input_), cast(weight), None if bias is None else cast(bias)


@cache
def why_not_onednn() -> str | None:
    """Return why fp32 products on the CPU use PyTorch's default library; None if large products use oneDNN."""
    if not processes.is_on(processes.ONEDNN):
        return f"{processes.ONEDNN} is 0"
    if _vendor() != "AuthenticAMD":
        return "PyTorch's own products are used on processors other than AMD's"
    if not torch.backends.mkldnn.is_available():
        return "this PyTorch was built without oneDNN"
    left, right = (torch.ones(rows, 3, dtype=torch.float32, device="cpu") for rows in (2, 4))
    try:
        agrees = bool((onednn_linear(left, right, None) == 3.0).all())
    # The operator is not public, so another release of PyTorch may lack or change it.
    except Exception as error:
        return f"oneDNN's product fails: {type(error).__name__}: {error}"
    return None if agrees else "oneDNN's product is wrong"


def linear(input_: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``input_ @ weight.T + bias``, by PyTorch's default operator while autograd records.

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
    """Write ``linear`` into the contiguous ``output [..., o]`` and return it; autograd does not record this."""
    rows = input_.reshape(input_.shape[:-1].numel(), input_.size(-1))
    if prefers_onednn(rows, weight):
        return output.copy_(onednn_linear(input_, weight, bias))
    _linear_into(output.view(rows.size(0), weight.size(0)), rows, weight, bias)
    return output


def linear_in_aligned_rows(input_: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``linear`` with output rows that begin at multiples of 16 bytes on CUDA, for rows of any length.

    Kernels can then read 16 bytes at once, and cuBLAS uses its fast products for the output, and for a gradient that
    overwrites it. The result is a view of the first columns of a wider matrix unless a row is a multiple of 16 bytes.
    Autograd does not record this.
    """
    width = padded_width(weight.size(0), weight.element_size())
    if not needs_alignment(input_, weight):
        return linear(input_, weight, bias)
    return _linear_into(input_.new_empty(input_.size(0), width)[:, : weight.size(0)], input_, weight, bias)


class Products:
    """The products of a linear layer; this class uses the functions of this file."""

    def linear(self, input_: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute ``input_ @ weight.T + bias``: ``[..., i]`` and ``[o, i]`` to ``[..., o]``."""
        return linear(input_, weight, bias)

    def input_gradient(self, grad_output: Tensor, weight: Tensor) -> Tensor:
        """Compute ``grad_output @ weight``: ``[..., o]`` and ``[o, i]`` to ``[..., i]``."""
        return input_gradient(grad_output, weight)

    def weight_gradient(self, grad_output: Tensor, input_: Tensor) -> Tensor:
        """Compute ``grad_output.T @ input_``: ``[n, o]`` and ``[n, i]`` to ``[o, i]``."""
        return weight_gradient(grad_output, input_)

    def bias_gradient(self, grad_output: Tensor) -> Tensor:
        """Sum each column of ``[n, o]``."""
        return grad_output.sum(dim=0)

    def aligned(self, input_: Tensor, weight: Tensor) -> Products:
        """Return the same products, with aligned output rows if autograd records and alignment matters."""
        return AlignedProducts() if torch.is_grad_enabled() and needs_alignment(input_, weight) else self

    def in_dtype(self, dtype: torch.dtype) -> Products:
        """Return the same products, with an output of this dtype."""
        return ProductsIn(dtype)

    def recorded(
        self, input_: Tensor, weight: Tensor, bias: Tensor | None, by_function: Callable[[], Tensor]
    ) -> Tensor:
        """Compute ``linear`` for a gradient. Autograd's own linear records these products, ``by_function`` others."""
        return self.linear(input_, weight, bias)

    def overlaps(self, *, wanted: bool) -> bool:
        """Return whether a layer that is made overlaps these products with communication."""
        return wanted

    def cast(self, output: Tensor) -> Tensor:
        """Cast a product that another function computed to the output's dtype."""
        return output


class OwnProducts(Products):
    """Products that neither autograd nor the functions that overlap products and communication compute."""

    def recorded(
        self, input_: Tensor, weight: Tensor, bias: Tensor | None, by_function: Callable[[], Tensor]
    ) -> Tensor:
        return by_function()

    def overlaps(self, *, wanted: bool) -> bool:
        return False


class AlignedProducts(OwnProducts):
    """Products whose output comes from ``linear_in_aligned_rows``."""

    def linear(self, input_: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = input_.reshape(input_.shape[:-1].numel(), input_.size(-1))
        return linear_in_aligned_rows(rows, weight, bias).view(*input_.shape[:-1], weight.size(0))


class ProductsIn(OwnProducts):
    """Products whose output has another dtype than the factors.

    Sums are never rounded to a dtype narrower than the output's: fp32 logits of bf16 factors are the fp32 sums.
    Gradients have the factors' dtype.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def aligned(self, input_: Tensor, weight: Tensor) -> Products:
        return self

    def cast(self, output: Tensor) -> Tensor:
        return output.to(self.dtype)

    def linear(self, input_: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if torch.is_autocast_enabled(input_.device.type):
            input_, weight, bias = autocast(input_, weight, bias)
            # Autocast would narrow the wide factors again.
            with torch.autocast(input_.device.type, enabled=False):
                return self._linear(input_, weight, bias)
        return self._linear(input_, weight, bias)

    def _linear(self, input_: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        is_narrow = input_.dtype in (torch.float16, torch.bfloat16)
        if input_.is_cuda and is_narrow and self.dtype == torch.float32:
            # Only CUDA has a product of narrow factors with a wide result.
            rows = input_.reshape(input_.shape[:-1].numel(), input_.size(-1))
            output = torch.mm(rows, weight.t(), out_dtype=torch.float32)
            return (output if bias is None else output.add_(bias)).view(*input_.shape[:-1], weight.size(0))
        wide = torch.promote_types(input_.dtype, self.dtype)
        bias = None if bias is None else bias.to(wide)
        return linear(input_.to(wide), weight.to(wide), bias).to(self.dtype)


def needs_alignment(input_: Tensor, weight: Tensor) -> bool:
    """True if contiguous rows of ``input_ @ weight.T`` would begin at addresses without 16-byte alignment."""
    if not input_.is_cuda or torch.compiler.is_compiling():
        return False
    return padded_width(weight.size(0), input_.element_size()) != weight.size(0)


def padded_width(width: int, element_size: int) -> int:
    """Return the smallest number of elements, at least ``width``, that fills a multiple of 16 bytes."""
    step = max(_ALIGNED_BYTES // element_size, 1)
    return -(-width // step) * step


def _linear_into(output: Tensor, input_: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return torch.mm(input_, weight.t(), out=output)
    return torch.addmm(bias, input_, weight.t(), out=output)


def input_gradient(grad_output: Tensor, weight: Tensor) -> Tensor:
    """Compute ``grad_output @ weight``, ``[..., o]`` and ``[o, i]`` to ``[..., i]``; autograd does not record this."""
    if prefers_onednn(grad_output, weight.t()):
        return onednn_linear(grad_output, weight.t(), None)
    return grad_output.matmul(weight)


def weight_gradient(grad_output: Tensor, input_: Tensor) -> Tensor:
    """Compute ``grad_output.T @ input_``, ``[n, o]`` and ``[n, i]`` to ``[o, i]``; autograd does not record this.

    PyTorch's default operator computes it unless ``i`` is much smaller than ``o``. oneDNN would need a copy of the
    transposed factor, which takes as long as oneDNN saves.
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

    ``num_multiplications`` is the number to choose by; None means that of this product.
    """

    # oneDNN may use its slow reference code for a matrix that is neither row-major nor column-major.
    def lie_evenly() -> bool:
        return all(x.is_contiguous() or (x.dim() == 2 and x.t().is_contiguous()) for x in (input_, weight))

    size = input_.numel() * weight.size(0) if num_multiplications is None else num_multiplications
    return dispatch.ONEDNN.runs(input_, weight, size=size, fits=lie_evenly)


def onednn_linear(input_: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``input_ @ weight.T + bias`` with oneDNN."""
    operator: Any = torch.ops.mkldnn._linear_pointwise
    output: Tensor = operator(input_, weight, bias, "none", [], "")
    return output


def sums_by_shape(factor: Tensor) -> bool:
    """True if all sizes of a product affect the order in which it sums an element; ``factor`` is either factor.

    This holds on Intel processors, for MKL's fp32 products, and for oneDNN's bf16 products on AMX.
    """
    return factor.is_cpu and is_intel()


def sums_by_threads(factor: Tensor) -> bool:
    """True if the number of threads affects the order in which MKL sums an element, for every ``MKL_CBWR``.

    This was observed of fp32 products on AMD processors: of many shapes with AVX-512 (Zen 4), and of narrow ones
    without (Zen 3: 5 to 11 rows with two threads, 24 or 40 columns with three and more). On Intel processors
    ``MKL_CBWR`` prevents it.
    """
    return factor.is_cpu and factor.dtype == torch.float32 and _is_amd()


@cache
def _is_amd() -> bool:
    return _vendor() == "AuthenticAMD"


@cache
def is_intel() -> bool:
    """True on Intel processors."""
    return _vendor() == "GenuineIntel"


def _vendor() -> str | None:
    return processor_says("vendor_id") if platform.machine() in ("x86_64", "AMD64") else None


def processor_says(field: str) -> str | None:
    """Return a field of the first processor in ``/proc/cpuinfo``, such as ``"model name"``; None if missing."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            line = next((line for line in file if line.startswith(field)), "")
    except OSError:
        return None
    return line.partition(":")[2].strip() or None


# Elements of the temporary that holds factors cast to a wider dtype: 16 MiB of fp32.
_TEMPORARY_ELEMENTS = 1 << 22
# A product over fewer rows spends most of its time reading and writing the sum.
_MIN_ROWS = 256


def main_grad_of(weight: Tensor) -> Tensor:
    """Return ``weight.main_grad``, for one backward to add to; raise ConfigError if the weight has none.

    A parameter of Megatron-FSDP (it has ``__fsdp_param__``) gets a new ``main_grad`` of zeros from its
    ``get_main_grad()``, so call this function once for all terms.
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
    """Return the gradient for autograd after the real one was added to ``main_grad``: None, or zeros without memory.

    If the weight has the attribute ``grad_added_to_main_grad``, this sets it to True, and autograd gets zeros so that
    hooks on the weight run, whether or not ``weight.zero_out_wgrad`` asks for that.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    zeros: Tensor = weight.new_zeros(()).expand(weight.shape)
    return zeros


@torch.no_grad()
def add_product_(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left.T @ right`` to ``out`` in place, ``[n, o]`` and ``[n, i]`` to ``[o, i]``, in ``out``'s dtype.

    If that dtype is wider than the factors' dtype, the factors are cast a bounded number of rows at a time.
    """
    if out.dtype == right.dtype:
        out.addmm_(left.t(), right)
        return
    if device_type_of(out) == "cuda" and out.dtype == torch.float32 and right.dtype.itemsize == 2:
        # Only CUDA can add a product of narrow factors to a wide sum.
        torch.addmm(out, left.t(), right, out_dtype=torch.float32, out=out)
        return
    num_rows = max(_MIN_ROWS, _TEMPORARY_ELEMENTS // max(left.size(1) + right.size(1), 1))
    for start in range(0, right.size(0), num_rows):
        rows = slice(start, start + num_rows)
        out.addmm_(left[rows].to(out.dtype).t(), right[rows].to(out.dtype))
