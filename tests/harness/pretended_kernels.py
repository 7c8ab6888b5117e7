"""Replace kernels by operators on the pretended GPU, where nothing is launched: one operator per kernel of a real GPU.

PyTorch chooses its fused attention and norm only in builds with CUDA, and would decompose them here; Triton's kernels
would be compiled and launched. ``as_on_a_gpu`` replaces them with operators that only compute shapes, for the rest of
the process.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter

from shardwise.kernels.dispatch import FastPath

_LIBRARY = torch.library.Library("kernel", "DEF")


def as_on_a_gpu() -> None:
    """Make fused attention, RMSNorm and each launch of a Triton kernel an operator ``kernel.NAME`` from now on."""
    from triton.runtime.jit import JITFunction

    _define("attention(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)", _attention)
    _define("attention_gradient(Tensor g, Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor, Tensor)", _like_the_rest)
    _define("rms_norm(Tensor x, Tensor w) -> (Tensor, Tensor)", _rms_norm)
    _define("rms_norm_gradient(Tensor g, Tensor x, Tensor w) -> (Tensor, Tensor)", _like_the_rest)
    F.scaled_dot_product_attention = lambda query, key, value, **options: _Attention.apply(query, key, value)
    F.rms_norm = lambda input_, shape, weight, eps: _RMSNorm.apply(input_, weight)
    JITFunction.__getitem__ = lambda kernel, grid: functools.partial(_launch, kernel.__name__)
    own = FastPath.runs

    def runs(path: FastPath, *tensors: Tensor, size: int | None = None, fits: Any = lambda: True) -> bool:
        if tensors[0].device.type == path.device_type == "cuda":
            # Skip the other conditions: the tensors may be fake, and the pretended GPU is too old.
            return all(tensor.dtype == tensors[0].dtype for tensor in tensors) and bool(fits())
        return own(path, *tensors, size=size, fits=fits)

    FastPath.runs = runs  # type: ignore[method-assign]


def kind_of(name: str) -> str | None:
    """Return what kind of kernel an operator launches; None if it launches none."""
    space, base, overload = name.split(".")
    if space == "kernel":
        return "norms" if "norm" in base else "attention" if "attention" in base else "fused elementwise"
    operator = getattr(getattr(getattr(torch.ops, space), base), overload)
    if space != "aten" or operator.is_view or base.startswith(("empty", "new_empty", "_unsafe_view", "record_stream")):
        return None
    if base == "_local_scalar_dense":
        return None
    return "products" if base in ("mm", "addmm", "bmm") else "others"


def _define(schema: str, kernel: Any) -> None:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, kernel, "Meta")


def _launch(name: str, *args: Any, **options: Any) -> None:
    if not hasattr(torch.ops.kernel, name):
        _define(f"{name}(Tensor x) -> ()", lambda x: None)
    getattr(torch.ops.kernel, name)(next(arg for arg in args if isinstance(arg, (Tensor, Parameter))))


def _attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    # Flash attention's output has the same strides as its queries.
    return torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)


def _rms_norm(input_: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(input_), input_.new_empty(*input_.shape[:-1], 1, dtype=torch.float32)


def _like_the_rest(gradient: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(map(torch.empty_like, tensors))


class _Attention(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output, _ = torch.ops.kernel.attention(query, key, value)
        ctx.save_for_backward(query, key, value)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.ops.kernel.attention_gradient(gradient, *ctx.saved_tensors)


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, input_: Tensor, weight: Tensor) -> Tensor:
        output, _ = torch.ops.kernel.rms_norm(input_, weight)
        ctx.save_for_backward(input_, weight)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.ops.kernel.rms_norm_gradient(gradient, *ctx.saved_tensors)
