"""Which implementation of a kernel runs: every fast path is chosen here, from plain values, and reported from here.

A ``FastPath`` says what a kernel takes and what the machine must have for it. The kernel itself lies in another file
beside its definition in PyTorch, which runs where no path does: for small tensors, other dtypes, devices and layouts,
tensor subclasses, and all that ``torch.compile`` traces, for which the compiler makes its own kernels.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from shardwise.core import processes
from shardwise.core.errors import ConfigError
from shardwise.kernels import loss_reference

# Of flash attention, and of ours to a cache.
WIDEST_HEAD = 256
# Of a row in the type in which it is computed: with more, a program's registers do not hold it.
_MAX_NORM_BYTES = 1 << 15


class Call(NamedTuple):
    """What a choice depends on.

    Attributes:
        device_type: such as ``"cuda"``.
        dtype: of what the kernel reads; None for any that a path is for.
        size: how much work there is, in the path's unit; None if it is enough.
        device_index: of several devices of a type.
        is_autocast: whether autocast is on for the type of device.
    """

    device_type: str
    dtype: torch.dtype | None = None
    size: int | None = None
    device_index: int = 0
    is_autocast: bool = False


class Choice(NamedTuple):
    """A line of a report.

    Attributes:
        name: what makes training faster where it can be had.
        on: whether it is used.
        why: where or how if on; why not if off.
    """

    name: str
    on: bool
    why: str


@dataclass(eq=False)
class FastPath:
    """An optional implementation of something that single operations of PyTorch compute too.

    Attributes:
        name: what it is.
        where: what it is used for.
        device_type: of the devices that it is for.
        dtypes: those that it is for; all if empty.
        min_size: less work than this is not worth it. The choice depends on nothing but the call, so that a run that is
            resumed computes the same bits.
        unit: of sizes.
        in_autocast: whether it is used under autocast.
        missing: why this machine cannot do it, None if it can. Asked last, since the answer may take a compilation.
        trial: what of ``missing`` is found out at little cost, for ranks that agree on a path before they need it.
        refusal: why another rank cannot do it, which this one then does not do either; None if all can, or none was
            asked (``kernels.agreed``).
        is_agreed: the ranks of a group all said that they can.
    """

    name: str
    where: str
    device_type: str
    dtypes: tuple[torch.dtype, ...] = ()
    min_size: int = 1
    unit: str = "elements"
    in_autocast: bool = False
    missing: Callable[[Call], str | None] = lambda call: None
    trial: Callable[[Call], str | None] | None = None
    refusal: str | None = None
    is_agreed: bool = False

    def why_not(self, call: Call) -> str | None:
        """Why this path does not run for ``call``; None if it does."""
        return self._refusal(call) or self._why_missing(call)

    def try_out(self, call: Call) -> str | None:
        """Why this path would not run for ``call`` on this machine, by its trial if it has one."""
        return self._refusal(call) or self.refusal or (self.trial or self.missing)(call)

    def report(self, call: Call) -> Choice:
        """What becomes of ``call``, for people."""
        why_not = self.why_not(call)
        return Choice(f"{self.name} on {call.device_type}", why_not is None, why_not or self.where)

    def runs(self, *tensors: Tensor, size: int | None = None, fits: Callable[[], bool] = lambda: True) -> bool:
        """Whether this path computes with ``tensors``.

        Args:
            tensors: the path takes them only if they are of one dtype, and none is of a subclass (fake, functional,
                distributed), which has no memory of its own. The first tells the device.
            size: how much work there is; the first tensor's number of elements if None.
            fits: whether the tensors' layout and the options are such as the kernel takes.
        """
        first = tensors[0]
        size = first.numel() if size is None else size
        # First what costs least and most often decides: small tensors pass here many times in a step.
        if torch.compiler.is_compiling() or size < self.min_size or first.device.type != self.device_type:
            return False
        for tensor in tensors:
            if type(tensor) not in (Tensor, Parameter) or tensor.dtype != first.dtype:
                return False
        is_autocast = torch.is_autocast_enabled(self.device_type)
        call = Call(self.device_type, first.dtype, size, first.device.index or 0, is_autocast)
        return self._refusal(call) is None and fits() and self._why_missing(call) is None

    def _why_missing(self, call: Call) -> str | None:
        if self.refusal is not None:
            return self.refusal
        why = self.missing(call)
        if why is not None and self.is_agreed:
            raise ConfigError(
                f"{self.name}: all ranks of a group agreed on it, since their trials succeeded, and then it failed on "
                f"one: {why}; repair the compiler, or set CC to another one, on that machine"
            )
        return why

    def _refusal(self, call: Call) -> str | None:
        if call.device_type != self.device_type:
            return f"there is a kernel for {self.device_type}, none for {call.device_type}"
        if self.dtypes and call.dtype not in (None, *self.dtypes):
            return f"there is no kernel for {call.dtype}"
        if call.size is not None and call.size < self.min_size:
            return f"{call.size:,} {self.unit} are fewer than {self.min_size:,}"
        if call.is_autocast and not self.in_autocast:
            return "it is not used under autocast"
        return None


def _module(name: str) -> Any:
    """A kernel's own module, imported when it is first asked for: most of them import this one."""
    return importlib.import_module(f"shardwise.kernels.{name}")


@cache
def _no_kernel(name: str, dtype: torch.dtype | None, device_index: int) -> str | None:
    """Why a kernel of Triton's does not run on a CUDA device; None if it does. It is tried on few numbers."""
    why_not = _no_triton(device_index)
    if why_not is None:
        why_not = _module("triton_trial").why_not_kernel(name, dtype or torch.float32, device_index)
    return why_not


@cache
def _no_triton(device_index: int) -> str | None:
    """Why Triton's kernels do not run on a CUDA device; None if they do. The smallest is tried."""
    if not processes.is_on(processes.TRITON):
        return f"{processes.TRITON} is 0"
    try:
        _module("loss_triton")
    # Whatever is wrong with an optional package, the reference runs.
    except Exception as error:
        return f"the triton kernels cannot be imported: {type(error).__name__}: {error}"
    major, minor = torch.cuda.get_device_capability(torch.device("cuda", device_index))
    if (major, minor) < (8, 0) and torch.version.hip is None:
        return f"Triton's kernels need compute capability 8.0, and cuda:{device_index} has {major}.{minor}"
    why_not: str | None = _module("triton_trial").why_not(device_index)
    return why_not


_TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

# What is saved at this size, a quarter of a millisecond a step, is worth the compilation in a thousand steps.
LOSS_CPU = FastPath(
    "compiled loss",
    "for fp32 and bf16 logits, 2^18 of them or more",
    "cpu",
    (torch.float32, torch.bfloat16),
    1 << 18,
    "logits",
    in_autocast=True,
    missing=lambda call: _module("loss_cpu").why_not_compiled(call.dtype or torch.float32),
    trial=lambda call: _module("compiled").why_no_compiler(),
)
LOSS_TRITON = FastPath(
    "Triton loss",
    "always",
    "cuda",
    _TRITON_DTYPES,
    unit="logits",
    in_autocast=True,
    missing=lambda call: _no_kernel("loss", call.dtype, call.device_index),
)
ELEMENTWISE = FastPath(
    "compiled SwiGLU, rotary and RMSNorm",
    "for fp32, 2^16 elements or more",
    "cpu",
    (torch.float32,),
    1 << 16,
    missing=lambda call: _module("elementwise_cpu").why_not_compiled(),
    trial=lambda call: _module("compiled").why_no_compiler(),
)
ELEMENTWISE_TRITON = FastPath(
    "Triton SwiGLU and rotary embedding",
    "always",
    "cuda",
    _TRITON_DTYPES,
    in_autocast=True,
    missing=lambda call: _no_kernel("elementwise", call.dtype, call.device_index),
)
ADD_NORM_TRITON = FastPath(
    "Triton residual addition with RMSNorm",
    "where a layer adds and then norms",
    "cuda",
    _TRITON_DTYPES,
    missing=lambda call: _no_kernel("add_rms_norm", call.dtype, call.device_index),
)
DECODE_TRITON = FastPath(
    "Triton attention of a token to a cache",
    "in generation, with even groups of queries",
    "cuda",
    (torch.bfloat16, torch.float16, torch.float32),
    missing=lambda call: _no_kernel("decode_attention", call.dtype, call.device_index),
)
CUDA_GRAPHS = FastPath(
    "CUDA graph of a token's pass",
    "in generation, where Triton attends to the cache",
    "cuda",
    missing=lambda call: (
        None
        if processes.is_on(processes.CUDA_GRAPHS)
        else f"nobody has run it on a GPU yet; {processes.CUDA_GRAPHS}=1 tries it"
    ),
)
RMS_NORM = FastPath("RMSNorm in few passes", "for fp32 and fp64", "cpu", (torch.float32, torch.float64))
# Under this many multiplications oneDNN's 10 microseconds to prepare a product are not won back.
ONEDNN = FastPath(
    "oneDNN's fp32 products",
    "for large matrices",
    "cpu",
    (torch.float32,),
    1 << 23,
    "multiplications",
    missing=lambda call: _module("products").why_not_onednn(),
)
# Smaller tensors get memory that the allocator already had.
HUGE_PAGES = FastPath(
    "huge pages",
    "for tensors of 16 MiB or more",
    "cpu",
    (),
    16 << 20,
    "bytes",
    in_autocast=True,
    missing=lambda call: _module("host_memory").why_not_huge_pages(),
)
# The C library maps anything larger anew and gives it back when it is freed, page faults and all (mallopt(3),
# M_MMAP_THRESHOLD).
PLACED_OUTPUTS = FastPath("outputs in huge pages", "for those of 32 MiB or more", "cpu", (), 32 << 20, "bytes")

# Between ranks, and so not one of the paths that a device has by itself.
REDUCE_NORM = FastPath(
    "Triton exchange of inference layers",
    "in fused mode with sequence parallelism, where the ranks reach each other's memory",
    "cuda",
    _TRITON_DTYPES,
    missing=lambda call: _no_kernel("reduce_norm", call.dtype, call.device_index),
)


PATHS = (
    LOSS_CPU,
    LOSS_TRITON,
    ELEMENTWISE,
    ELEMENTWISE_TRITON,
    RMS_NORM,
    ADD_NORM_TRITON,
    DECODE_TRITON,
    CUDA_GRAPHS,
    ONEDNN,
    HUGE_PAGES,
    PLACED_OUTPUTS,
)


def report(
    device_type: str,
    dtype: torch.dtype | None = None,
    *,
    sizes: Mapping[FastPath, int] | None = None,
    device_index: int = 0,
) -> list[Choice]:
    """What is chosen on a device.

    Args:
        device_type: such as ``"cuda"``.
        dtype: of the work; any if None.
        sizes: how much work there is for each path that matters; all paths, and enough for each, if None.
        device_index: of several devices of a type.
    """
    return [
        path.report(Call(device_type, dtype, None if sizes is None else sizes[path], device_index))
        for path in PATHS
        if path.device_type == device_type and (sizes is None or path in sizes)
    ]


def loss_kernels(
    logits: Tensor, out: Tensor | None = None, *, softcap: float | None = None, size: int | None = None
) -> Any:
    """Which of ``loss_reference`` and its kin does the loss' work on this rank's logits.

    Args:
        logits: ``[n, v]``.
        out: where a gradient is written; the logits' own memory if None.
        softcap: option of the loss.
        size: by which it is chosen on a CPU, where these are a part of more logits; their number if None.
    """
    matrices = (logits,) if out is None else (logits, out)

    def lie_by_rows() -> bool:
        return all(matrix.stride(1) == 1 for matrix in matrices)

    if LOSS_CPU.runs(*matrices, size=size, fits=lambda: softcap is None and lie_by_rows()):
        return _module("loss_cpu")
    if LOSS_TRITON.runs(*matrices, fits=lambda: logits.size(1) == 1 or lie_by_rows()):
        return _module("loss_triton")
    return loss_reference


def swiglu_kernels(inner: Tensor, *, at_any_size: bool = False) -> Any:
    """What computes ``swiglu.swiglu`` in one pass over ``inner``, ``[..., 2f]``; None for single operations."""
    is_even = inner.size(-1) % 2 == 0
    size = ELEMENTWISE.min_size if at_any_size else inner.numel()
    if ELEMENTWISE.runs(inner, size=size, fits=lambda: inner.is_contiguous() and is_even):
        return _module("elementwise_cpu")
    return _module("elementwise_triton") if ELEMENTWISE_TRITON.runs(inner, fits=lambda: is_even) else None


def rotary_kernels(input_: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """What rotates heads ``[s, b, ...]`` by angles ``[s, 1 or b, 1, r/2]``; None for single operations."""

    def fits() -> bool:
        s, b = input_.shape[:2]
        return cos.shape == sin.shape and cos.dim() == 4 and cos.shape[:3] in ((s, 1, 1), (s, b, 1))

    return _module("elementwise_triton") if ELEMENTWISE_TRITON.runs(input_, cos, sin, fits=fits) else None


def add_norm_kernels(residual: Tensor, added: Tensor, weight: Tensor) -> Any:
    """What computes ``norms.add_rms_norm`` in one pass; None for two operations."""

    def fits() -> bool:
        return (
            residual.shape == added.shape
            and weight.shape == residual.shape[-1:]
            and weight.numel() * max(4, weight.element_size()) <= _MAX_NORM_BYTES
        )

    return _module("norms_triton") if ADD_NORM_TRITON.runs(residual, added, weight, fits=fits) else None


def decode_kernels(query: Tensor, keys: Tensor, values: Tensor) -> Any:
    """What computes ``decode_attention.attend_to_cache`` from what is filled alone; None for single operations."""

    def fits() -> bool:
        return keys.stride(3) == values.stride(3) == 1 and keys.size(3) <= WIDEST_HEAD

    return _module("decode_attention_triton") if DECODE_TRITON.runs(query, keys, values, fits=fits) else None


def why_not_fused_optimizer(device_type: str, *, has_copies: bool) -> str | None:
    """Why an optimizer's step is not one fused kernel; None if it is.

    Args:
        device_type: where a parameter is.
        has_copies: whether several ranks hold parts of it, which must stay the same bit for bit.
    """
    if device_type == "cpu" and has_copies:
        # The last elements of a tensor are rounded otherwise than those before, and copies of a key-value head do not
        # lie at the same place on all of their ranks.
        return "on a CPU it rounds copies of a key-value head differently on their ranks"
    return None


def why_repeat_keys(backend: str, device_type: str, dtype: torch.dtype, *, head_dim: int, masked: bool) -> str | None:
    """Why keys and values are repeated for all of their query heads; None where they are used as they are.

    On CUDA two kernels take grouped heads (flash, and cuDNN's, which is narrower) and one more has less than quadratic
    memory: the memory-efficient one, to which every head must be given its own keys. Without them PyTorch falls back to
    explicit products, which keep all ``s * s`` weights of each head.

    Args:
        backend: ``config.attention_backend``.
        device_type: such as ``"cuda"``.
        dtype: of the queries.
        head_dim: width of a head.
        masked: attention has a mask or bias beside the causal one.

    Source: the conditions are PyTorch's, ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``.
    """
    if backend == "fused":
        return "the backend 'fused' is that of kernels of which one takes no grouped heads"
    if device_type != "cuda" or backend == "unfused":
        return None
    if masked:
        return "flash attention takes no mask"
    if dtype == torch.float32:
        return "flash attention takes no float32"
    # In fp64 there are explicit products alone, whatever they are given.
    if head_dim > WIDEST_HEAD and dtype != torch.float64:
        return f"flash attention takes no heads wider than {WIDEST_HEAD}"
    return None
