"""In which dtypes a run computes, and in which it keeps its weights."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """In which dtypes a run computes, and in which it keeps its weights.

    Attributes:
        params_dtype: of parameters, of what the forward and the backward compute, and of what ranks send each other.
        has_masters: gradients are summed in fp32, and the optimizer updates fp32 copies of the parameters.
        scales_loss: the loss is multiplied by a factor, so that small gradients do not vanish.
        uses_tf32: CUDA's tensor cores multiply fp32 matrices, of whose elements they read 11 bits of 24.
    """

    params_dtype: torch.dtype
    has_masters: bool = False
    scales_loss: bool = False
    uses_tf32: bool = False


PRECISIONS = {
    # Where no run has asked what its device is best at.
    "auto": Precision(torch.float32),
    "float32": Precision(torch.float32),
    "tf32": Precision(torch.float32, uses_tf32=True),
    "float64": Precision(torch.float64),
    "bfloat16": Precision(torch.bfloat16, has_masters=True),
    "float16": Precision(torch.float16, has_masters=True, scales_loss=True),
    "pure-bfloat16": Precision(torch.bfloat16),
}
