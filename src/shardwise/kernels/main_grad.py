"""Adding a weight's gradient to its ``main_grad``, which may be wider than what is multiplied."""

from typing import Any

import torch
from torch import Tensor

from shardwise.core.errors import ConfigError

# Elements of the temporary through which factors pass on their way into a wider sum: 16 MiB of fp32.
_TEMPORARY_ELEMENTS = 1 << 22
# A product over fewer rows than this spends its time on reading and writing the sum.
_MIN_ROWS = 256


def main_grad_of(weight: Tensor) -> Tensor:
    """``weight.main_grad``, for one backward to add to.

    A parameter of Megatron-FSDP (it has ``__fsdp_param__``) gets a new one, of zeros, from its ``get_main_grad()``: ask
    once for all that is to be added together.

    Raises:
        ConfigError: it has none.
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
    """What autograd is given for a gradient that went to ``main_grad``.

    None, unless the weight has the attribute ``grad_added_to_main_grad``: then that becomes True and autograd gets
    zeros, so that hooks on the weight run, whether or not ``weight.zero_out_wgrad`` asks for that; they take no memory
    until autograd keeps them.
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
