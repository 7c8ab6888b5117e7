"""How the benchmark on a GPU measures: times, memory, the machine's own limits; and a row of its table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        section, name: what was measured, and of which candidate.
        value: with its unit.
        goal: with its unit; empty if there is none.
        met: whether it is; None if there is none, or nothing was measured.
        note: what else is to be said.
    """

    section: str
    name: str
    value: str
    goal: str = ""
    met: bool | None = None
    note: str = ""


def synchronize(device: torch.device) -> None:
    """Wait for what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(step: Callable[[], object], device: torch.device, *, repeats: int, warmups: int = 3) -> float:
    """The median time of one call, on the GPU's own clock where there is one."""
    for _ in range(warmups):
        step()
    times = []
    for _ in range(repeats):
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
    """Bytes that ``step`` takes at its peak beyond what there is before it; 0 where nobody counts them."""
    if device.type != "cuda":
        return 0
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def busy_share(step: Callable[[], object], device: torch.device) -> float | None:
    """Share of the time of ``step`` in which the GPU had a kernel or a copy at work; None where there is no GPU."""
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
    """Share of the time from the first beginning to the last end that the spans cover, overlaps once."""
    covered, reached = 0.0, -float("inf")
    for start, stop in sorted(spans):
        covered += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    whole = reached - min((start for start, _ in spans), default=0.0)
    return covered / whole if whole > 0 else None


@dataclass(frozen=True)
class Limits:
    """What this device does at best, measured.

    Attributes:
        flops: of bf16 products, a second.
        bandwidth: bytes a second, read and written together.
    """

    flops: float
    bandwidth: float

    @classmethod
    def measure(cls, device: torch.device, *, width: int, num_bytes: int) -> Limits:
        """Of square products of this width, and of a copy of as many bytes."""
        a, b = (torch.randn(width, width, device=device).to(torch.bfloat16) for _ in range(2))
        product = milliseconds(lambda: a @ b, device, repeats=10)
        source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copy = milliseconds(lambda: target.copy_(source), device, repeats=10)
        return cls(2 * width**3 / product * 1000, 2 * num_bytes / copy * 1000)

    def rows(self) -> list[Row]:
        """Of the table."""
        return [
            Row("limits", "bf16 products", f"{self.flops / 1e12:.1f} TFLOP/s"),
            Row("limits", "copies, read and written", f"{self.bandwidth / 1e12:.3f} TB/s"),
        ]
