"""Choose the implementation of each kernel, and report the choices.

A ``FastPath`` states which calls a kernel accepts and what it requires of the machine. All choices depend on plain
values. The kernel itself is in another file, next to its definition in PyTorch. The definition runs if no fast path
does: for small tensors, other dtypes, devices and layouts, tensor subclasses, and under ``torch.compile``.

Kernels round differently, so the ranks of a group make the same choices (``agree_on_kernels``). Otherwise a rank
without a compiler, or with a GPU on which a kernel fails, would compute a norm with other bits than the other ranks.
"""

import importlib
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.core import processes
from shardwise.core.communication import accounting
from shardwise.core.communication.agreement import gather_objects
from shardwise.core.communication.context import context_of
from shardwise.core.errors import ConfigError
from shardwise.kernels import loss_reference
from shardwise.kernels.fake_device import device_type_of, plain_tensors, planned_device

# Widest head of flash attention, and of the attention to a cache.
WIDEST_HEAD = 256


class Call(NamedTuple):
    """The values that a choice depends on.

    ``dtype`` None means any dtype of the path, ``size`` is in the path's unit, None if it is enough.
    """

    device_type: str
    dtype: torch.dtype | None = None
    size: int | None = None
    device_index: int = 0
    is_autocast: bool = False


class Choice(NamedTuple):
    """One line of a report; ``why`` says where the path is used if it is on, otherwise why it is off."""

    name: str
    on: bool
    why: str


@dataclass(eq=False)
class FastPath:
    """An optional implementation of a computation that PyTorch's operations define.

    Attributes:
        name: name of the path in reports.
        where: cases in which the path is used, for reports.
        device_type: type of device that the path supports.
        dtypes: dtypes that the path supports; empty means all dtypes.
        min_size: smallest amount of work for which the path pays off. The choice depends only on the call, so that a
            resumed run computes the same bits.
        unit: unit of sizes.
        in_autocast: whether the path is used under autocast.
        missing: returns why this machine cannot run the path; None if it can. Called last, since it may compile.
        trial: cheap part of ``missing``, for ranks that agree on a path before they need it.
        refusal: why another rank cannot run the path, so that this rank does not either (``agree_on_kernels``).
        is_agreed: whether all ranks of a group have reported that they can run the path.
        rounds: whether results differ from PyTorch's by rounding.
        module: name of the module with the kernels; "" if callers only use ``runs``.
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
    rounds: bool = True
    module: str = ""

    def why_not(self, call: Call) -> str | None:
        """Return why this path does not run for ``call``; None if it does."""
        return self._refusal(call) or self._why_missing(call)

    def try_out(self, call: Call) -> str | None:
        """Return why this path would not run for ``call`` on this machine, using its trial if it has one."""
        return self._refusal(call) or self.refusal or (self.trial or self.missing)(call)

    def report(self, call: Call) -> Choice:
        """Return the choice for ``call`` as a line of a report."""
        why_not = self.why_not(call)
        return Choice(f"{self.name} on {call.device_type}", why_not is None, why_not or self.where)

    def runs(self, *tensors: Tensor, size: int | None = None, fits: Callable[[], bool] = lambda: True) -> bool:
        """True if this path computes with ``tensors``; for the arguments see ``why_not_with``."""
        return self.why_not_with(*tensors, size=size, fits=fits) is None

    def why_not_with(
        self, *tensors: Tensor, size: int | None = None, fits: Callable[[], bool] = lambda: True
    ) -> str | None:
        """Return why this path does not compute with ``tensors``; None if it does.

        Args:
            tensors: tensors on one device. The path requires a single dtype, and plain tensors: a subclass (fake,
                functional, distributed) has no memory that a kernel could read.
            size: amount of work; None means the first tensor's number of elements.
            fits: returns whether the kernel accepts the tensors' layout and the options.
        """
        first = tensors[0]
        size = first.numel() if size is None else size
        # Cheap and decisive conditions come first: a step makes many calls with small tensors.
        if torch.compiler.is_compiling():
            return "torch.compile traces the call"
        if size < self.min_size:
            return "there is too little work"
        if device_type_of(first) != self.device_type:
            return "its kernel is for another type of device"
        plain = plain_tensors()
        for tensor in tensors:
            if type(tensor) not in plain or tensor.dtype != first.dtype:
                return "it takes plain tensors of one dtype"
        is_autocast = torch.is_autocast_enabled(self.device_type)
        call = Call(self.device_type, first.dtype, size, first.device.index or 0, is_autocast)
        if (why := self._refusal(call)) is not None:
            return why
        if not fits():
            return "it does not take such tensors or options"
        if planned_device() is None:
            return self._why_missing(call)
        # Paths that only move memory would touch the memory that fake tensors lack.
        return None if self.rounds and self._is_planned(call) else "the plan cannot run it"

    def kernels(self, *tensors: Tensor, size: int | None = None, fits: Callable[[], bool] = lambda: True) -> Any:
        """Return the path's module if ``runs`` is True for these arguments; otherwise None."""
        return self.loaded() if self.runs(*tensors, size=size, fits=fits) else None

    def loaded(self) -> Any:
        """Return the path's module, for a call for which ``runs`` is True."""
        return _module("fake_kernels" if planned_device() == "cuda" else self.module)

    def _is_planned(self, call: Call) -> bool:
        # A planned CPU is one like this machine's, a planned GPU may be of another machine.
        if call.device_type != "cpu":
            return True
        # Trials compute with real tensors.
        with _disable_current_modes():
            return self.try_out(call) is None

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
    """Import a kernel's module on first use, since most of these modules import this one."""
    return importlib.import_module(f"shardwise.kernels.{name}")


@cache
def _no_kernel(name: str, dtype: torch.dtype | None, device_index: int) -> str | None:
    """Return why a Triton kernel does not run on a CUDA device; None if it does. Try it on a few numbers."""
    why_not: str | None = _no_triton(device_index)
    return why_not or _module("triton_trial").why_not_kernel(name, dtype or torch.float32, device_index)


def _triton(name: str) -> Callable[[Call], str | None]:
    return lambda call: _no_kernel(name, call.dtype, call.device_index)


@cache
def _no_triton(device_index: int) -> str | None:
    """Return why Triton kernels do not run on a CUDA device; None if they do. Try the smallest kernel."""
    if not processes.is_on(processes.TRITON):
        return f"{processes.TRITON} is 0"
    try:
        _module("loss_triton")
    # Triton is an optional package; the reference runs without it.
    except Exception as error:
        return f"the triton kernels cannot be imported: {type(error).__name__}: {error}"
    major, minor = torch.cuda.get_device_capability(torch.device("cuda", device_index))
    if (major, minor) < (8, 0) and torch.version.hip is None:
        return f"Triton's kernels need compute capability 8.0, and cuda:{device_index} has {major}.{minor}"
    why_not: str | None = _module("triton_trial").why_not(device_index)
    return why_not


_TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

# At this size the kernel saves a quarter of a millisecond per step: a thousand steps pay for the compilation.
LOSS_CPU = FastPath(
    "compiled loss",
    "for fp32 and bf16 logits, 2^18 of them or more",
    "cpu",
    (torch.float32, torch.bfloat16),
    1 << 18,
    "logits",
    in_autocast=True,
    missing=lambda call: _module("compiled").why_not("loss_cpu.c", call.dtype or torch.float32),
    trial=lambda call: _module("compiled").why_no_compiler(),
    module="compiled",
)
LOSS_TRITON = FastPath(
    "Triton loss",
    "always",
    "cuda",
    _TRITON_DTYPES,
    unit="logits",
    in_autocast=True,
    missing=_triton("loss"),
    module="loss_triton",
)
ELEMENTWISE = FastPath(
    "compiled SwiGLU, rotary and RMSNorm",
    "for fp32, 2^16 elements or more",
    "cpu",
    (torch.float32,),
    1 << 16,
    missing=lambda call: _module("compiled").why_not("elementwise_cpu.c"),
    trial=lambda call: _module("compiled").why_no_compiler(),
    module="compiled",
)
ELEMENTWISE_TRITON = FastPath(
    "Triton SwiGLU and rotary embedding",
    "always",
    "cuda",
    _TRITON_DTYPES,
    in_autocast=True,
    missing=_triton("elementwise"),
    module="elementwise_triton",
)
ADD_NORM_TRITON = FastPath(
    "Triton residual addition with RMSNorm",
    "where a layer adds and then norms",
    "cuda",
    _TRITON_DTYPES,
    missing=_triton("add_rms_norm"),
    module="norms_triton",
)
DECODE_TRITON = FastPath(
    "Triton attention of a token to a cache",
    "in generation, with even groups of queries",
    "cuda",
    (torch.bfloat16, torch.float16, torch.float32),
    missing=_triton("decode_attention"),
    module="decode_attention_triton",
)
FLEXIBLE_ATTENTION = FastPath(
    "FlexAttention",
    "for windows, ALiBi, soft caps, sinks and other masks, from 2^24 scores on",
    "cuda",
    (torch.bfloat16, torch.float16, torch.float32),
    1 << 24,
    "scores",
    missing=_triton("flexible_attention"),
    trial=lambda call: _no_triton(call.device_index),
    module="flexible_attention",
)
ADAMW_TRITON = FastPath(
    "Triton update of AdamW",
    "for fp32 weights and fp32 copies of weights, but not in exact runs",
    "cuda",
    (torch.bfloat16, torch.float16, torch.float32),
    missing=_triton("adamw"),
    module="adamw_triton",
)
CUDA_GRAPHS = FastPath(
    "CUDA graph of a token's pass",
    "in generation, where Triton attends to the cache",
    "cuda",
    missing=lambda call: (
        None
        if processes.is_on(processes.CUDA_GRAPHS)
        else f"it has not been run on a GPU yet; {processes.CUDA_GRAPHS}=1 tries it"
    ),
)
RMS_NORM = FastPath("RMSNorm in few passes", "for fp32 and fp64", "cpu", (torch.float32, torch.float64))
# Products with fewer multiplications do not recover the 10 microseconds that oneDNN takes to prepare a product.
ONEDNN = FastPath(
    "oneDNN's fp32 products",
    "for large matrices",
    "cpu",
    (torch.float32,),
    1 << 23,
    "multiplications",
    missing=lambda call: _module("products").why_not_onednn(),
)
# Smaller tensors get memory that the allocator already holds.
HUGE_PAGES = FastPath(
    "huge pages",
    "for tensors of 16 MiB or more",
    "cpu",
    (),
    16 << 20,
    "bytes",
    in_autocast=True,
    missing=lambda call: _module("host_memory").why_not_huge_pages(),
    rounds=False,
)
# The C library maps new memory for each larger block and unmaps it when the block is freed, so that every block causes
# page faults (mallopt(3), M_MMAP_THRESHOLD).
PLACED_OUTPUTS = FastPath(
    "outputs in huge pages", "for those of 32 MiB or more", "cpu", (), 32 << 20, "bytes", rounds=False
)

# This path runs between ranks, so it is not among the paths of a device.
REDUCE_NORM = FastPath(
    "Triton exchange of inference layers",
    "in fused mode with sequence parallelism, where the ranks reach each other's memory",
    "cuda",
    _TRITON_DTYPES,
    missing=_triton("reduce_norm"),
    module="norms_triton",
)


_CPU_PATHS = (LOSS_CPU, ELEMENTWISE, RMS_NORM, ONEDNN, HUGE_PAGES, PLACED_OUTPUTS)
_CUDA_PATHS = (
    LOSS_TRITON,
    ELEMENTWISE_TRITON,
    ADD_NORM_TRITON,
    FLEXIBLE_ATTENTION,
    ADAMW_TRITON,
    DECODE_TRITON,
    CUDA_GRAPHS,
)
PATHS = (*_CPU_PATHS, *_CUDA_PATHS)


def report(
    device_type: str,
    dtype: torch.dtype | None = None,
    *,
    sizes: Mapping[FastPath, int] | None = None,
    device_index: int = 0,
) -> list[Choice]:
    """Return the choices for a device.

    Args:
        device_type: type of the device, such as ``"cuda"``.
        dtype: dtype of the work; None means any dtype.
        sizes: amount of work for each path to report; None means all paths, with enough work for each.
        device_index: index among the devices of this type.
    """
    return [
        path.report(Call(device_type, dtype, None if sizes is None else sizes[path], device_index))
        for path in PATHS
        if path.device_type == device_type and (sizes is None or path in sizes)
    ]


def agree_on_kernels(like: Tensor, *, group: ProcessGroup) -> list[str]:
    """Turn off on every rank, for the rest of the process, each fast path that some rank of ``group`` cannot run.

    The first call for a group, a device and a dtype is collective: one gather of Python objects. Later calls, and calls
    in traced code, are no-ops.

    Args:
        like: tensor with the device and dtype of the work; the call is a no-op for a subclass of Tensor.
        group: the ranks that must choose the same kernels.

    Returns:
        A line for each path that this call turns off on ranks that could run it; the same on every rank.

    Raises:
        DesyncError: a rank is gone, or does not arrive within the group's timeout.
    """
    # Traced code and tensors without memory use no fast path.
    if group.size() == 1 or torch.compiler.is_compiling() or type(like) not in (Tensor, Parameter):
        return []
    agreed, device = context_of(group).agreed_kernels, like.device
    if (device, like.dtype) in agreed:
        return []
    call = Call(device.type, like.dtype, device_index=device.index or 0)
    paths = [path for path in (*PATHS, REDUCE_NORM) if path.device_type == device.type and path.rounds]
    # The caller's modes apply to the model's operations, not to trials.
    with _disable_current_modes(), accounting.uncounted():
        own = platform.node(), [path.try_out(call) for path in paths]
        every = gather_objects(own, "which kernels each can run", group=group)
    agreed.add((device, like.dtype))
    lines = [_settle(path, [(host, whys[place]) for host, whys in every]) for place, path in enumerate(paths)]
    return [line for line in lines if line is not None]


def _settle(path: FastPath, answers: list[tuple[str, str | None]]) -> str | None:
    """Turn a path on or off from each rank's host and refusal; return a line if only some ranks refuse."""
    refusing = [(rank, host, why) for rank, (host, why) in enumerate(answers) if why is not None]
    path.is_agreed |= not refusing
    if not refusing or len(refusing) == len(answers):
        return None
    rank, host, why = refusing[0]
    path.refusal = f"rank {rank} of {len(answers)}, on {host}, cannot run it: {why}"
    return f"{path.name}: off on all ranks of the group, since {path.refusal}"


def loss_kernels(
    logits: Tensor, out: Tensor | None = None, *, softcap: float | None = None, size: int | None = None
) -> Any:
    """Return the module for the loss on this rank's logits: ``loss_reference`` or one with the same functions.

    Args:
        logits: ``[n, v]``.
        out: memory for a gradient; None means the logits' memory.
        softcap: option of the loss.
        size: number of logits that decides the choice on a CPU, if ``logits`` is a part of more; None means this part.
    """
    matrices = (logits,) if out is None else (logits, out)

    def lie_by_rows() -> bool:
        return all(matrix.stride(1) == 1 for matrix in matrices)

    return (
        LOSS_CPU.kernels(*matrices, size=size, fits=lambda: softcap is None and lie_by_rows())
        or LOSS_TRITON.kernels(*matrices, fits=lambda: logits.size(1) == 1 or lie_by_rows())
        or loss_reference
    )


def why_not_fused_optimizer(device_type: str, *, has_copies: bool) -> str | None:
    """Return why an optimizer's step is not one fused kernel; None if it is.

    Where several ranks hold the same part of a parameter (``has_copies``), these must keep the same bits.
    """
    if device_type == "cpu" and has_copies:
        # The kernel rounds the last elements of a tensor differently from the others, and the copies of a key-value
        # head have different positions on their ranks.
        return "on a CPU it rounds copies of a key-value head differently on their ranks"
    return None


def why_repeat_keys(backend: str, device_type: str, dtype: torch.dtype, *, head_dim: int, masked: bool) -> str | None:
    """Return why keys and values are repeated for all of their query heads; None if they are not.

    On CUDA two kernels accept grouped heads: flash attention, and cuDNN's kernel, which is more limited. A third
    kernel with less than quadratic memory, memory-efficient attention, needs separate keys for every head. Otherwise
    PyTorch falls back to explicit products, which keep all ``s * s`` weights of each head. ``masked`` means a mask or
    bias besides the causal mask.

    Source: PyTorch's conditions, ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``.
    """
    if backend == "fused":
        return "one kernel of the backend 'fused' takes no grouped heads"
    if device_type != "cuda" or backend == "unfused":
        return None
    if masked:
        return "flash attention takes no mask"
    if dtype == torch.float32:
        return "flash attention takes no float32"
    # fp64 only has explicit products.
    if head_dim > WIDEST_HEAD and dtype != torch.float64:
        return f"flash attention takes no heads wider than {WIDEST_HEAD}"
    return None
