"""Hardware utilisation: peak FLOP/s of the devices, FLOPs of the model, peak memory.

Also traces of single steps by PyTorch's profiler.
"""

import contextlib
import logging
import re
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.profiler import ProfilerActivity, profile, schedule

from shardwise.core.atomic_files import write_atomically
from shardwise.core.errors import UnwritableError
from shardwise.models.by_plan.operations import forward_operations
from shardwise.models.config import ModelConfig
from shardwise.run.processes.ranks import Ranks
from shardwise.run.settings import ProfileSettings

# TFLOP/s of dense products in 16 bits, in TF32 and in fp32, by words of the device's name; the first match counts.
# Source: NVIDIA's data sheets (H100 and H200 Tensor Core GPU, A100, L40S, L4, A10, V100, Blackwell architecture);
# figures with sparsity are halved.
_GPUS: dict[str, tuple[float, float, float]] = {
    "B200": (2250.0, 1125.0, 75.0),
    "H200": (989.4, 494.7, 66.9),
    "H100 PCIe": (756.0, 378.0, 51.0),
    "H100": (989.4, 494.7, 66.9),
    "A100": (312.0, 156.0, 19.5),
    "L40S": (362.0, 183.0, 91.6),
    "L4": (121.0, 60.0, 30.3),
    "A10": (125.0, 62.5, 31.2),
    "V100": (125.0, 15.7, 15.7),
}
_WIDTH, _MOST_PRODUCTS, _LONGEST_SECONDS = 512, 5, 0.1


@dataclass(frozen=True)
class Peak:
    """Peak FLOP/s of a device."""

    flops: float | None
    source: str


def peak_of(device: torch.device, dtype: torch.dtype, given: float | None = None) -> Peak:
    """Return a device's peak for products in ``dtype``: ``given`` (TFLOP/s), from data sheets, or measured."""
    if given is not None:
        return Peak(given * 1e12, "as given")
    if device.type == "cpu":
        return Peak(_measured(dtype), f"measured on products of {_WIDTH} x {_WIDTH} in {_name(dtype)}")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    known = next((numbers for words, numbers in _GPUS.items() if re.search(rf"\b{words}\b", name)), None)
    if known is None or dtype == torch.float64:
        return Peak(None, f"not known of {name} in {_name(dtype)}; give --peak-tflops")
    uses_tf32 = torch.get_float32_matmul_precision() != "highest"
    tflops = known[0] if dtype.itemsize == 2 else known[1] if uses_tf32 else known[2]
    return Peak(
        tflops * 1e12, f"the data sheet's of {name} in {'TF32' if dtype.itemsize == 4 and uses_tf32 else _name(dtype)}"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _measured(dtype: torch.dtype) -> float:
    """Measure the fastest of a few products on the run's threads, while the other ranks do the same."""
    a = torch.ones(_WIDTH, _WIDTH, dtype=dtype)
    out = torch.empty_like(a)
    shortest, begun = float("inf"), time.perf_counter()
    for _ in range(_MOST_PRODUCTS):
        before = time.perf_counter()
        torch.mm(a, a, out=out)
        after = time.perf_counter()
        shortest = min(shortest, after - before)
        if after - begun > _LONGEST_SECONDS:
            break
    return 2 * _WIDTH**3 / shortest


@dataclass(frozen=True)
class Utilisation:
    """The reference for the utilisation of a run's steps."""

    flops_per_token: Callable[[int], int]
    peak: float | None
    source: str

    def metrics(self, computed: NDArray[np.int64], seconds: float) -> dict[str, float]:
        """Return the model FLOPs utilisation of a step; empty if the peak is unknown."""
        if not self.peak or seconds <= 0:
            return {}
        lengths, counts = (each.tolist() for each in np.unique(computed, return_counts=True))
        flops = sum(count * n * self.flops_per_token(n) for n, count in zip(lengths, counts, strict=True))
        return {"mfu": flops / seconds / self.peak}

    def line(self) -> str:
        """Return the line of the banner about utilisation."""
        peak = "" if self.peak is None else f"{self.peak / 1e12:,.2f} TFLOP/s of all ranks, "
        return f"peak   {peak}{self.source}"


def peak_memory(device: torch.device) -> tuple[str, int]:
    """Return the name and the value of this rank's peak memory in bytes.

    Returns:
        ``"peak_allocated_bytes"`` on CUDA, for tensors; ``"peak_resident_bytes"`` on a CPU, for the process.
    """
    if device.type == "cuda":
        return "peak_allocated_bytes", torch.cuda.max_memory_allocated(device)
    try:
        # Not from getrusage, which includes the process before exec.
        status = Path("/proc/self/status").read_text()
        return "peak_resident_bytes", 1024 * int(status.split("VmHWM:")[1].split()[0])
    except (OSError, IndexError):
        return "peak_resident_bytes", 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def model_flops_per_token(model: ModelConfig, sequence_length: int, *, trains_weights: bool = True) -> int:
    """Return the FLOPs per token of forward and backward pass; a multiply-add counts as two.

    ``6 N + 12 l a d s``: ``N`` elements of weight matrices that a token is multiplied with (of experts, those that it
    goes to; without embeddings, except one tied to the output layer), ``l`` layers of ``a`` heads of width ``d`` (the
    mean width of keys and values), and ``s`` tokens. Attention counts as if each token attended to all others, or in a
    layer with a smaller window to all tokens of the window. Recomputation does not count. Of a model by a plan these
    products are counted in a forward (``models.by_plan.operations``).

    Args:
        model: a ``"gpt"``.
        sequence_length: ``s``, length of the text that the token is in, padding included.
        trains_weights: False if the weights are frozen, as with adapters, whose own FLOPs are ignored. The formula is
            then ``4 N + 12 l a d s``.

    Raises:
        ConfigError: the products of a model by a plan cannot be counted.

    Source: Chowdhery et al. 2022 (arXiv:2204.02311), appendix B.
    """
    if model.transformers_config is not None:
        counted = forward_operations(model)
        passes = 3 if trains_weights else 2
        return round(passes * counted.of_weights + 3 * counted.of_attention(sequence_length))
    h = model.hidden_size
    each, ffn = (3 if model.gated_linear_unit else 2) * h, model.ffn_hidden_size
    assert ffn is not None
    numbers, heads = range(1, model.num_layers + 1), model.num_attention_heads
    if (latent := model.latent) is None:
        attention_weights = 0
        for number in numbers:
            _, groups, width = model.heads_of(number)
            attention_weights += h * (2 * heads + (1 if model.keys_are_values(number) else 2) * groups) * width
    else:
        attention_weights = h * (latent.key_value_rank + latent.rotary_width + heads * latent.value_width)
        attention_weights += heads * latent.key_value_rank * (latent.plain_width + latent.value_width)
        queries, rank = heads * latent.head_width, latent.query_rank
        attention_weights += h * queries if rank is None else rank * (h + queries)
        attention_weights *= model.num_layers
    inner = model.num_layers * each * ffn
    if (experts := model.experts) is not None:
        number = model.num_layers if experts.layers is None else sum(experts.layers)
        inner_width = experts.per_token * experts.ffn_hidden_size + (experts.shared_ffn_hidden_size or 0)
        inner = (model.num_layers - number) * each * ffn + number * (
            each * inner_width + h * (experts.num + experts.shared_gate)
        )
    # A token reads one row of the embeddings, and all rows of the output layer.
    multiplied = attention_weights + inner + h * model.vocab_size
    seen, windows = sequence_length, model.window_size or (-1, -1)
    if windows[0] >= 0:
        seen = min(seen, windows[0] + 1 + max(0, windows[1]))
    attention = 0
    for number in numbers:
        width = model.heads_of(number).width
        both = width + (width if latent is None else latent.value_width)
        attention += 6 * heads * both * (seen if model.windows(number) else sequence_length)
    return (6 if trains_weights else 4) * multiplied + attention


_LOGGER = logging.getLogger(__name__)


@contextlib.contextmanager
def profiled(settings: ProfileSettings, folder: Path, ranks: Ranks) -> Iterator[Callable[[], None]]:
    """Trace the steps given by ``settings`` into ``folder/profile/rank-N.json``.

    If a trace cannot be written, a message is printed and the run continues.
    """
    if not settings.enabled:
        yield lambda: None
        return
    path = folder / "profile" / f"rank-{ranks.rank}.json"
    activities = [ProfilerActivity.CPU]
    if ranks.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    steps: Any = schedule(wait=settings.wait, warmup=settings.warmup, active=settings.active, repeat=1)
    with profile(
        activities=activities, schedule=steps, on_trace_ready=lambda done: _write(done, path), acc_events=True
    ) as profiler:
        yield profiler.step


def _write(profiler: torch.profiler.profile, path: Path) -> None:
    try:
        with tempfile.TemporaryDirectory() as scratch:
            trace = Path(scratch) / path.name
            profiler.export_chrome_trace(str(trace))
            with trace.open("rb") as source:
                write_atomically(path, lambda file: shutil.copyfileobj(source, file))
    except (OSError, RuntimeError, UnwritableError) as error:
        _LOGGER.warning("the trace %s could not be written: %s", path, error)
