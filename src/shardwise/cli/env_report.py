"""The report of ``shardwise env`` on this machine."""

import importlib
import importlib.metadata
import os
import platform
import shutil
import textwrap
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardwise
from shardwise.cli.arguments import VARIABLES
from shardwise.cli.launch import physical_cores
from shardwise.core.communication.symmetric_memory import why_no_symmetric_memory
from shardwise.core.communication.transports.shared_memory import why_not_here
from shardwise.kernels.dispatch import REDUCE_NORM, Call, Choice, report, why_repeat_keys
from shardwise.run.banner import tf32
from shardwise.run.processes.ranks import choose_device

_REQUIRED = ("torch", "numpy", "safetensors", "tokenizers", "tyro", "tqdm")
_OPTIONAL = ("matplotlib", "tensorboard", "triton")


def gather() -> dict[str, Any]:
    """Return the report of ``shardwise env`` as JSON values."""
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda", 0))
    return {
        "versions": versions(),
        "machine": {
            "platform": platform.platform(),
            "cpu": f"{physical_cores()} cores to use, {torch.get_num_threads()} threads, "
            f"{torch.backends.cpu.get_cpu_capability()}",
            "accelerators": _accelerators(),
            "device": _device(),
        },
        "distributed backends": _backends(),
        "environment": {name: os.environ.get(name) for name in VARIABLES},
        "fast paths": [{"name": path.name, "on": path.on, "why": path.why} for path in fast_paths(devices)],
    }


def versions() -> dict[str, str]:
    """Return the version of each package, or why it cannot be used."""
    found = {"shardwise": shardwise.__version__, "python": platform.python_version()}
    for name in _REQUIRED:
        found[name] = importlib.metadata.version(name)
    for name in _OPTIONAL:
        try:
            module = importlib.import_module(name)
            found[name] = str(getattr(module, "__version__", "installed"))
        except ModuleNotFoundError as error:
            found[name] = "not installed" if error.name == name else f"does not import: {error}"
        except Exception as error:  # importing an optional package can raise anything
            found[name] = f"does not import: {type(error).__name__}: {error}"
    return found


def fast_paths(devices: Iterable[torch.device]) -> list[Choice]:
    """Try each fast path of ``shardwise train`` on ``devices`` and return the results."""
    choices = []
    for device in devices:
        refusal = _refusal(partial(_try_fused_adamw, device))
        choices.append(Choice(f"fused AdamW on {device.type}", refusal is None, refusal or "always"))
        choices.append(_fused_attention(device))
        choices.append(_grouped_heads(device))
        choices.extend(tf32(device.type, "float32"))
        choices.extend(report(device.type, device_index=device.index or 0))
        choices.append(REDUCE_NORM.report(Call(device.type, device_index=device.index or 0)))
    refusal, no_symmetric = why_not_here(), why_no_symmetric_memory()
    return [
        *choices,
        Choice("symmetric memory of GPUs", no_symmetric is None, no_symmetric or "--tp-comm-overlap"),
        Choice("shared memory between CPU ranks", refusal is None, refusal or "ranks of one machine, 2 to 8 of them"),
    ]


def _try_fused_adamw(device: torch.device) -> None:
    weight = torch.nn.Parameter(torch.zeros(8, device=device))
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], fused=True).step()


def _fused_attention(device: torch.device) -> Choice:
    dtypes_of: dict[str, list[str]] = {}
    refusals, with_dropout = [], False
    for label, backend in (
        ("flash", SDPBackend.FLASH_ATTENTION),
        ("memory-efficient", SDPBackend.EFFICIENT_ATTENTION),
        ("cuDNN", SDPBackend.CUDNN_ATTENTION),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            refusal = _refusal(partial(_try_attention, device, backend, dtype, 0.0))
            if refusal is None:
                dtypes_of.setdefault(label, []).append(str(dtype).removeprefix("torch."))
                with_dropout |= _refusal(partial(_try_attention, device, backend, dtype, 0.1)) is None
            else:
                refusals.append(f"{label}: {refusal}")
    name = f"fused attention on {device.type}"
    if not dtypes_of:
        return Choice(name, False, refusals[0])
    kernels = ", ".join(f"{label} ({', '.join(dtypes)})" for label, dtypes in dtypes_of.items())
    return Choice(name, True, kernels if with_dropout else f"{kernels}; none with dropout")


def _grouped_heads(device: torch.device) -> Choice:
    as_they_are, repeated = [], []
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        why = why_repeat_keys("auto", device.type, dtype, head_dim=64, masked=False)
        if why is None:
            as_they_are.append(name)
        else:
            repeated.append(f"; copied for each query in {name}: {why}")
    why = f"without copies ({', '.join(as_they_are)}){''.join(repeated)}"
    return Choice(f"attention on grouped heads on {device.type}", bool(as_they_are), why)


def _try_attention(device: torch.device, backend: Any, dtype: torch.dtype, dropout: float) -> None:
    # Batch 1, 2 heads, 16 tokens, head size 64.
    query = torch.zeros(1, 2, 16, 64, device=device, dtype=dtype, requires_grad=True)
    with sdpa_kernel(backend):
        attend = torch.nn.functional.scaled_dot_product_attention
        attend(query, query, query, dropout_p=dropout, is_causal=True).sum().backward()


def _refusal(attempt: Callable[[], None]) -> str | None:
    """Return PyTorch's reason for a failed attempt in one line, or None if it succeeds."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            attempt()
        except (RuntimeError, ValueError) as error:
            # PyTorch gives the reason in warnings; the error only says that no kernel is available.
            reasons = [*(str(warning.message) for warning in caught), str(error)]
            reasons = [reason.partition(" (Triggered")[0].partition("\n")[0] for reason in reasons]
            return next((reason for reason in reasons if not reason.endswith(":")), type(error).__name__)
    return None


def _accelerators() -> list[str]:
    if torch.cuda.is_available():
        found = []
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            found.append(f"cuda:{index} {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
        return found
    other = torch.accelerator.current_accelerator()
    # `shardwise train` supports only "cpu" and "cuda".
    return [] if other is None else [f"{other.type}, which `shardwise train` does not use"]


def _device() -> str:
    device, why = choose_device("auto", local_rank=0, num_local=1)
    return f"{device.type}: {why}"


def _backends() -> dict[str, str]:
    if not dist.is_available():
        return {"none": "this PyTorch was built without torch.distributed"}
    nccl = "used by CUDA ranks" if torch.cuda.is_available() else "no CUDA device here"
    return {
        "gloo": "used by CPU ranks" if dist.is_gloo_available() else "not in this PyTorch",
        "nccl": nccl if dist.is_nccl_available() else "not in this PyTorch",
        "mpi": "in this PyTorch, not used" if dist.is_mpi_available() else "not in this PyTorch",
    }


def as_table(report: dict[str, Any]) -> str:
    """Format ``gather``'s report in two columns, no wider than the terminal."""
    accelerators = report["machine"]["accelerators"] or ["none"]
    rows = [
        *report["versions"].items(),
        ("", ""),
        ("platform", report["machine"]["platform"]),
        ("cpu", report["machine"]["cpu"]),
        *(("accelerator", text) for text in accelerators),
        ("device of one rank", report["machine"]["device"]),
        ("", ""),
        *((f"backend {name}", text) for name, text in report["distributed backends"].items()),
        ("", ""),
        *((name, value) for name, value in report["environment"].items() if value is not None),
        ("", ""),
        *((path["name"], f"{'on' if path['on'] else 'off'}: {path['why']}") for path in report["fast paths"]),
    ]
    indent = max(len(name) for name, _ in rows) + 2
    width = max(indent + 30, min(shutil.get_terminal_size().columns, 120))
    lines = [
        textwrap.fill(text, width, initial_indent=name.ljust(indent), subsequent_indent=" " * indent).rstrip()
        for name, text in rows
    ]
    return "\n".join(lines)
