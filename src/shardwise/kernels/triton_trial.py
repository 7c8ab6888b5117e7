"""Trials of the Triton kernels on this machine: first the smallest kernel, then each of the others.

Triton compiles a kernel on its first call: Triton's ``ptxas`` makes machine code, and a C compiler with Python's
headers makes the launcher. A container image without them can still import Triton. On some GPU or release of Triton one
kernel may also fail while others run. Each kernel is therefore tried on a few numbers before a tensor needs it, while
the ranks of a group can still agree not to use it (``dispatch.agree_on_kernels``).
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

# Triton's convention: compile-time constants have names in capitals.
# ruff: noqa: N803

_SIZE = 32


@triton.jit
def _double_kernel(numbers, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(numbers + place, 2.0 * tl.load(numbers + place))


def why_not(device_index: int) -> str | None:
    """Return in one line why no Triton kernel runs on a CUDA device; None if one does."""

    def double() -> Iterator[bool]:
        numbers = torch.ones(_SIZE, dtype=torch.float32, device="cuda")
        _double_kernel[(1,)](numbers, SIZE=_SIZE)
        yield numbers.tolist() == [2.0] * _SIZE

    return _tried(double, device_index, "a kernel")


def why_not_kernel(name: str, dtype: torch.dtype, device_index: int) -> str | None:
    """Return in one line why a kernel of ``NAMES`` does not run for a dtype on a CUDA device; None if it does."""
    return _tried(lambda: outcomes(name, dtype, torch.device("cuda")), device_index, f"{name} of {dtype}")


def outcomes(name: str, dtype: torch.dtype, device: torch.device) -> Iterator[bool]:
    """Yield for each result of a kernel's trial whether it agrees with the definition."""
    return (_agree(found, expected) for found, expected in _TRIALS[name](dtype, device))


def _tried(trial: Callable[[], Iterator[bool]], device_index: int, what: str) -> str | None:
    """Return why a trial fails or computes wrong numbers; None if it succeeds."""
    try:
        # The caller's modes do not apply to trials.
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad(), torch.cuda.device(device_index):
            agrees = all(trial())
    # If an optional package or its compilers fail, PyTorch's own operations run.
    except Exception as error:
        reason = (str(error).strip() or "failed").splitlines()[0]
        return f"Triton cannot run {what} here: {type(error).__name__}: {reason}"
    return None if agrees else "the kernels of Triton that are compiled here compute wrong numbers"


def _agree(found: Tensor, expected: Tensor) -> bool:
    """True if the numbers agree with the definition, up to two roundings to 16 bits."""
    return torch.allclose(found.double().cpu(), expected.double().cpu(), rtol=0.05, atol=0.05)


def _numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return numbers on the CPU, where definitions, not kernels, compute the expected results."""
    size = torch.Size(shape).numel()
    return (torch.arange(size, device="cpu") % 13 / 6.0 - 1.0).view(shape).to(dtype)


def _try_loss(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    from shardwise.kernels import loss_reference, loss_triton

    logits, target = _numbers(2, 40, dtype=dtype), torch.tensor([3, -1], device="cpu")
    expected = loss_reference.row_statistics(logits, target, want_sum=True)
    yield loss_triton.row_statistics(logits.to(device), target.to(device), want_sum=True), expected
    rows = (target, expected[:, 0], expected[:, 1].reciprocal(), -expected[:, 1].reciprocal())
    gradient, found = torch.empty_like(logits), torch.empty_like(logits, device=device)
    loss_reference.gradient_(gradient, logits, *rows)
    loss_triton.gradient_(found, logits.to(device), *(each.to(device) for each in rows))
    yield found, gradient


def _try_elementwise(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    from shardwise.kernels import elementwise, elementwise_triton

    inner, incoming = _numbers(3, 48, dtype=dtype), _numbers(3, 24, dtype=dtype)
    with torch.enable_grad():
        leaf = inner.clone().requires_grad_()
        gate, up = leaf.chunk(2, dim=-1)
        output = F.silu(gate) * up
        (gradient,) = torch.autograd.grad(output, leaf, incoming)
    yield elementwise_triton.swiglu(inner.to(device)), output.detach()
    yield elementwise_triton.swiglu_gradient(inner.to(device), incoming.to(device)), gradient

    mixed, angles = _numbers(2, 1, 32, dtype=dtype), _numbers(2, 1, 1, 4, dtype=dtype)
    cos, sin = angles.cos(), angles.sin()
    query, key, value = elementwise.split(mixed, queries_per_group=2, head_dim=8)
    expected = elementwise.rotate(query, cos, sin), elementwise.rotate(key, cos, sin), value
    there = mixed.to(device), cos.to(device), sin.to(device)
    parts = elementwise_triton.split_and_rotate(*there, 2, 8, False)
    yield from zip(parts, expected, strict=True)
    # Rotating back undoes the rotation.
    yield elementwise_triton.split_and_rotate_gradient(*parts, *there[1:], False), mixed


def _try_add_rms_norm(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    from shardwise.kernels import norms_triton

    residual, added, weight = _numbers(3, 40, dtype=dtype), _numbers(3, 40, dtype=dtype), _numbers(40, dtype=dtype)
    with torch.enable_grad():
        leaves = (residual + added).requires_grad_(), weight.clone().requires_grad_()
        output = F.rms_norm(leaves[0], weight.shape, leaves[1], 1e-5)
        gradients = torch.autograd.grad(output, leaves, added)
    there = residual.to(device), added.to(device), weight.to(device)
    total, normed, scale = norms_triton.add_rms_norm(*there, 1e-5)
    yield from ((total, leaves[0].detach()), (normed, output.detach()))
    found = norms_triton.add_rms_norm_gradient(total, there[2], scale, there[1], None, needs_weight=True)
    assert found[1] is not None
    yield from ((found[0], gradients[0]), (found[1], gradients[1]))


def _try_decode_attention(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    from shardwise.kernels import decode_attention, decode_attention_triton

    query, keys = _numbers(1, 4, 1, 16, dtype=dtype), _numbers(1, 2, 8, 16, dtype=dtype)
    values, position = keys.flip(2), torch.tensor([5], device="cpu")
    expected = decode_attention.attend_to_cache(query, keys, values, position, scale=0.25)
    query, keys, values, position = (each.to(device) for each in (query, keys, values, position))
    yield decode_attention_triton.attend_to_cache(query, keys, values, position, 0.25, -1, None, None, None), expected


def _try_flexible_attention(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    from shardwise.kernels import flexible_attention

    size, window, slope, cap = 300, 140, 0.01, 4.0
    tensors = _numbers(1, 4, size, 16, dtype=dtype), *(_numbers(1, 2, size, 16, dtype=dtype) for _ in range(2))
    incoming, places = _numbers(1, 4, size, 16, dtype=dtype), torch.arange(size, device="cpu")
    distances = places[:, None] - places
    with torch.enable_grad():
        leaves = [each.double().requires_grad_() for each in tensors]
        query, key, value = leaves[0], *(each.repeat_interleave(2, dim=1) for each in leaves[1:])
        scores = (query @ key.mT * 0.25 / cap).tanh() * cap - slope * distances
        scores = scores.masked_fill((distances < 0) | (distances > window), -torch.inf)
        sums = scores.logsumexp(dim=-1)
        output = (scores - sums.unsqueeze(-1)).exp() @ value * sums.sigmoid().unsqueeze(-1)
        expected = output, *torch.autograd.grad(output, leaves, incoming.double())

        def sees(sample: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k <= q) & (q - k <= window)

        def changed(score: Tensor, sample: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return torch.tanh(score / cap) * cap - slope * (q - k)

        query, key, value = there = [each.to(device).requires_grad_() for each in tensors]
        functions = flexible_attention.Functions(
            flexible_attention.blocks_of(sees, (1, 1, size, size), device), changed
        )
        found, found_sums = flexible_attention.attend(query, key, value, lambda: functions, scale=0.25, has_sums=True)
        assert found_sums is not None
        found = found * found_sums.sigmoid().unsqueeze(-1)
        gradients = torch.autograd.grad(found, there, incoming.to(device, found.dtype))
    return zip((found, *gradients), expected, strict=True)


def _try_reduce_norm(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    from shardwise.kernels import norms, norms_triton

    buffer, residual, weight = _numbers(2, 64, dtype=dtype), _numbers(2, 64, dtype=dtype), _numbers(64, dtype=dtype)
    there = buffer.to(device, copy=True)
    expected = norms.reduce_norm_([buffer], 0, residual, None, weight, None, 1e-5)
    addresses = torch.tensor([there.data_ptr()], device=device)
    own = residual.to(device), None, weight.to(device), None
    yield norms_triton.reduce_norm_(addresses, 0, *own, 1e-5), expected
    yield there, buffer


def _try_adamw(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    from shardwise.kernels import adamw_triton

    weight, gradient = _numbers(40, dtype=torch.float32), _numbers(40, dtype=torch.float32).flip(0)
    # In the first step, the quotient of the means is the gradient's sign.
    expected = 0.999 * weight - 0.1 * gradient.sign()
    rounded = None if dtype == torch.float32 else torch.empty(40, dtype=dtype, device=device)
    held = gradient.to(device, copy=True), weight.to(device, copy=True)
    numbers = torch.tensor([1.0, 0.5], dtype=torch.float32, device=device)
    means = numbers.new_zeros(40), numbers.new_zeros(40)
    step, factor = numbers[0].clone(), numbers[1].clone()
    addresses = [0 if each is None else each.data_ptr() for each in (*held, *means, rounded, step)]
    made = adamw_triton.tables([[*addresses, 40]], device)
    adamw_triton.update_(
        *made,
        factor=factor,
        learning_rate=0.1,
        weight_decay=0.01,
        betas=(0.9, 0.999),
        epsilon=1e-8,
        rounded=None if rounded is None else dtype,
        clears=True,
    )
    yield held[1], expected
    yield held[0], torch.zeros_like(weight)
    if rounded is not None:
        yield rounded, expected


_TRIALS = {
    "loss": _try_loss,
    "elementwise": _try_elementwise,
    "add_rms_norm": _try_add_rms_norm,
    "adamw": _try_adamw,
    "decode_attention": _try_decode_attention,
    "flexible_attention": _try_flexible_attention,
    "reduce_norm": _try_reduce_norm,
}
NAMES = tuple(_TRIALS)
"""Names of the kernels that are tried."""
