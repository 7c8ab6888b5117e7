"""Measure times, memory and the limits of the machine for the benchmark on a GPU; and a row of its table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        section, name: the measurement, and the candidate.
        value: result with its unit.
        goal: goal with its unit; empty if there is none.
        met: whether the goal is met; None if there is no goal or no result.
        note: additional information.
    """

    section: str
    name: str
    value: str
    goal: str = ""
    met: bool | None = None
    note: str = ""


def synchronize(device: torch.device) -> None:
    """Wait for all launched work of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(
    step: Callable[[], object],
    device: torch.device,
    *,
    repeats: int,
    warmups: int = 3,
    restore: Callable[[], object] = lambda: None,
) -> float:
    """Return the median time of one call, measured by the GPU's clock if there is a GPU; ``restore`` is not timed."""
    for _ in range(warmups):
        restore()
        step()
    times = []
    for _ in range(repeats):
        restore()
        synchronize(device)
        if device.type == "cuda":
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            step()
            ended.record()
            synchronize(device)
            times.append(begun.elapsed_time(ended))
        else:
            start = time.perf_counter()
            step()
            times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def extra_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Return the peak bytes of ``step`` beyond those allocated before it; 0 on devices that do not count them."""
    if device.type != "cuda":
        return 0
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def busy_share(step: Callable[[], object], device: torch.device) -> float | None:
    """Return the fraction of the time of ``step`` in which the GPU ran a kernel or a copy; None without a GPU."""
    if device.type != "cuda":
        return None
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    step()
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        synchronize(device)
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == DeviceType.CUDA
    ]
    return share_covered(spans)


def share_covered(spans: list[tuple[float, float]]) -> float | None:
    """Return the fraction of the time from the first start to the last end that the union of the spans covers."""
    covered, reached = 0.0, -float("inf")
    for start, stop in sorted(spans):
        covered += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    whole = reached - min((start for start, _ in spans), default=0.0)
    return covered / whole if whole > 0 else None


@dataclass(frozen=True)
class Limits:
    """Measured peak performance of the device.

    Attributes:
        flops: FLOP/s of bf16 products.
        bandwidth: bytes per second, the sum of reads and writes.
    """

    flops: float
    bandwidth: float

    @classmethod
    def measure(cls, device: torch.device, *, width: int, num_bytes: int) -> Limits:
        """Measure square products of this width, and a copy of this many bytes."""
        a, b = (torch.randn(width, width, device=device).to(torch.bfloat16) for _ in range(2))
        product = milliseconds(lambda: a @ b, device, repeats=10)
        source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copy = milliseconds(lambda: target.copy_(source), device, repeats=10)
        return cls(2 * width**3 / product * 1000, 2 * num_bytes / copy * 1000)

    def rows(self) -> list[Row]:
        """Return the rows of the table."""
        return [
            Row("limits", "bf16 products", f"{self.flops / 1e12:.1f} TFLOP/s"),
            Row("limits", "copies, read and written", f"{self.bandwidth / 1e12:.3f} TB/s"),
        ]
