"""The loss on one GPU, from logits and with the output layer, compared with PyTorch and other libraries."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from gpus.measuring import Row, extra_bytes, milliseconds
from shardwise.nn.loss.cross_entropy import vocab_parallel_cross_entropy
from shardwise.nn.loss.linear_cross_entropy import vocab_parallel_linear_cross_entropy

GOAL_PLAIN_MS, GOAL_LINEAR_MS = 1.75, 41.0
"""Goals on an H200 for 8,192 tokens and 131,072 ids in bf16, at a hidden size of 4,096; forward and backward."""
# Goal for the peak memory, without inputs and results.
_GOAL_EXTRA_MIB = 16.0
# Gradients in bf16 that differ by more, relative to the largest one, are wrong: one rounding is 2^-8.
_MOST_ERROR = 2**-5


@dataclass(frozen=True)
class LossSizes:
    """Sizes of the problem."""

    num_tokens: int = 8_192
    vocab_size: int = 131_072
    hidden_size: int = 4_096
    repeats: int = 20


def _rival(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    if not torch.cuda.is_available():
        raise ImportError("a rehearsal compiles nothing")
    return torch.compile(function)


def plain_candidates(group: ProcessGroup, vocab_size: int) -> dict[str, Callable[[], Callable[..., Tensor]]]:
    """Return loaders of the candidates, functions of logits and targets; a loader may raise ImportError.

    Ours, Liger's and "quack, in place" may overwrite the logits with their gradient; the others make a tensor for it.
    """

    def ours(logits: Tensor, target: Tensor) -> Tensor:
        options: Any = {"group": group, "vocab_size": vocab_size, "reduction": "mean"}
        return vocab_parallel_cross_entropy(logits, target, inplace_=True, **options)

    def quack(**options: Any) -> Callable[..., Tensor]:
        cross_entropy = _rival("quack.cross_entropy", "cross_entropy")
        return lambda logits, target: cross_entropy(logits, target, **options).mean()

    return {
        "shardwise": lambda: ours,
        "torch": lambda: F.cross_entropy,
        "torch, compiled": lambda: _compiled(F.cross_entropy),
        "Liger": lambda: _rival("liger_kernel.transformers.functional", "liger_cross_entropy"),
        "quack": quack,
        "quack, in place": lambda: quack(inplace_backward=True),
    }


def linear_candidates(group: ProcessGroup, vocab_size: int) -> dict[str, Callable[[], Callable[..., Tensor]]]:
    """Return loaders of the candidates, functions of hidden states, weight and targets."""

    options: Any = {"group": group, "vocab_size": vocab_size, "reduction": "mean"}

    def plain(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(hidden @ weight.t(), target)

    return {
        "shardwise": lambda: partial(vocab_parallel_linear_cross_entropy, **options),
        "shardwise, in slices": lambda: partial(vocab_parallel_linear_cross_entropy, plan="chunked", **options),
        "torch": lambda: plain,
        "torch, compiled": lambda: _compiled(plain),
        "Liger": lambda: _rival("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy"),
        "cut-cross-entropy": lambda: _rival("cut_cross_entropy", "linear_cross_entropy"),
    }


def measure_plain(device: torch.device, sizes: LossSizes, group: ProcessGroup) -> list[Row]:
    """Measure forward and backward pass on logits that may be overwritten by their gradient."""
    logits = torch.randn(sizes.num_tokens, sizes.vocab_size, device=device).to(torch.bfloat16).requires_grad_()
    target = torch.randint(sizes.vocab_size, (sizes.num_tokens,), device=device)
    return _measure(
        f"loss of [{sizes.num_tokens}, {sizes.vocab_size}] bf16",
        plain_candidates(group, sizes.vocab_size),
        (logits,),
        target,
        device,
        repeats=sizes.repeats,
        goal=GOAL_PLAIN_MS,
        floor=0,
    )


def measure_linear(device: torch.device, sizes: LossSizes, group: ProcessGroup) -> list[Row]:
    """Measure forward and backward pass with the output layer; the memory of the two gradients is subtracted."""
    hidden = torch.randn(sizes.num_tokens, sizes.hidden_size, device=device).to(torch.bfloat16).requires_grad_()
    weight = torch.randn(sizes.vocab_size, sizes.hidden_size, device=device) / sizes.hidden_size**0.5
    weight = weight.to(torch.bfloat16).requires_grad_()
    target = torch.randint(sizes.vocab_size, (sizes.num_tokens,), device=device)
    return _measure(
        f"loss with output layer, hidden {sizes.hidden_size}",
        linear_candidates(group, sizes.vocab_size),
        (hidden, weight),
        target,
        device,
        repeats=max(1, sizes.repeats // 4),
        goal=GOAL_LINEAR_MS,
        floor=hidden.nbytes + weight.nbytes,
    )


def _measure(
    section: str,
    candidates: dict[str, Callable[[], Callable[..., Tensor]]],
    inputs: tuple[Tensor, ...],
    target: Tensor,
    device: torch.device,
    *,
    repeats: int,
    goal: float,
    floor: int,
) -> list[Row]:
    rows = []
    originals = [each.detach().clone() for each in inputs]

    def restore() -> None:
        for each, original in zip(inputs, originals, strict=True):
            each.detach().copy_(original)

    expected: Sequence[Tensor] = ()
    for name, find in candidates.items():
        try:
            function = find()
        except ImportError:
            rows.append(Row(section, name, "not installed"))
            continue

        def step(function: Callable[..., Tensor] = function) -> Sequence[Tensor]:
            return torch.autograd.grad(function(*inputs, target), inputs)

        try:
            took = milliseconds(step, device, repeats=repeats, restore=restore)
            restore()
            extra = (extra_bytes(step, device) - floor) / 2**20
            restore()
            # Copies, because a candidate may return its inputs as their gradients.
            gradients = [each.clone() for each in step()]
        # A failure of another library must not prevent the other measurements.
        except Exception as error:
            if name.startswith("shardwise"):
                raise
            rows.append(Row(section, name, f"failed: {type(error).__name__}"))
            continue
        expected = expected or gradients
        if any(map(_differs, gradients, expected)):
            rows.append(Row(section, name, "failed: other gradients than ours"))
            continue
        note = f"{extra:.0f} MiB over the floor" if device.type == "cuda" else ""
        if name == "shardwise":
            met = took <= goal if device.type == "cuda" and "H200" in torch.cuda.get_device_name(device) else None
            rows.append(Row(section, name, f"{took:.3f} ms", f"{goal} ms on an H200", met, note))
        elif name.startswith("shardwise"):
            met = extra <= _GOAL_EXTRA_MIB + 64 if device.type == "cuda" else None
            rows.append(Row(section, name, f"{took:.3f} ms", "memory at its floor and a slice", met, note))
        else:
            rows.append(Row(section, name, f"{took:.3f} ms", note=note))
    return rows


def _differs(gradient: Tensor, expected: Tensor) -> bool:
    # Written so that a NaN differs.
    return not (gradient - expected).abs().max() <= _MOST_ERROR * expected.abs().max()
