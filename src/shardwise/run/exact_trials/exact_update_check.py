"""Whether a device updates weights with the bits on which exact runs rely, tried before a run starts.

- AdamW and the elementwise part of Muon have the same bits in whatever piece of a tensor an element lies: parts of a
  layer, or what data-parallel ranks share out. The fused AdamW is tried on pieces of whole vectors, which is what it
  is given.
- Muon's products of whole matrices have the same bits at every number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from shardwise.kernels.dispatch import why_not_fused_optimizer
from shardwise.run.exact_trials.exact_trials import on_one_thread, require_same_bits
from shardwise.training.optimizer.adamw import STATE_NAMES, VECTOR
from shardwise.training.optimizer.muon import matrix_shapes, orthogonalized, product_dtype, update_, with_momentum
from shardwise.training.precision import PRECISIONS
from shardwise.training.settings import RunSettings

# Of whole vectors, and of any number of elements.
_VECTORS = [VECTOR, 3 * VECTOR, 100 * VECTOR, 2 * VECTOR]
_ELEMENTS = [1, 17, 1000, 3, 31, 256]

_Update = Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]


def check_updates(model: nn.Module, settings: RunSettings) -> None:
    """Try the optimizer of an exact run.

    Args:
        model: this rank's.
        settings: of the run.

    Raises:
        ConfigError: the device does not keep what is relied on; the message names what.
    """
    precision, device = PRECISIONS[settings.training.dtype], next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(0)

    def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def check(update: _Update, sizes: Sequence[int], what: str) -> None:
        dtype = torch.float32 if precision.has_masters else precision.params_dtype
        weight, gradient = (numbers(sum(sizes), dtype=dtype) for _ in range(2))
        whole = update([weight], [gradient])
        pieces = update(weight.split(sizes), gradient.split(sizes))
        for number, expected in enumerate(whole):
            found = torch.cat(list(pieces[number :: len(whole)]))
            require_same_bits(found, expected, f"{what} of a piece of {sum(sizes)} elements")

    def adamw(weights: Sequence[Tensor], gradients: Sequence[Tensor], *, fused: bool) -> list[Tensor]:
        params = [Parameter(weight.clone()) for weight in weights]
        options = settings.optimizer
        optimizer = torch.optim.AdamW(
            params,
            lr=options.learning_rate,
            betas=(options.beta1, options.beta2),
            eps=options.epsilon,
            weight_decay=options.weight_decay,
            fused=fused,
        )
        for factor in (1, -3):
            for param, gradient in zip(params, gradients, strict=True):
                param.grad = factor * gradient
            optimizer.step()
        kept = [[param.detach(), *(optimizer.state[param][kind] for kind in STATE_NAMES)] for param in params]
        return [tensor for tensors in kept for tensor in tensors]

    def muon(weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        found = []
        for weight, gradient in zip(weights, gradients, strict=True):
            weight, mean = weight.clone(), torch.zeros_like(weight)
            with_momentum(gradient, mean, 0.95)
            update_(weight, with_momentum(-3 * gradient, mean, 0.95), rate=0.013, weight_decay=0.1)
            found += [weight, mean]
        return found

    with torch.no_grad():
        if why_not_fused_optimizer(device.type, has_copies=False) is None:
            check(lambda *given: adamw(*given, fused=True), _VECTORS, "an update of the fused AdamW")
        check(lambda *given: adamw(*given, fused=False), _ELEMENTS, "an update of AdamW")
        if settings.optimizer.name != "muon":
            return
        check(muon, _ELEMENTS, "an update of Muon")
        for shape in sorted(matrix_shapes(model)) if torch.get_num_threads() > 1 else ():
            matrix = numbers(*shape, dtype=product_dtype(precision.params_dtype))
            one_step = partial(_one_step, matrix)
            what = f"Muon's product of a matrix {list(shape)} on one thread"
            require_same_bits(on_one_thread(one_step)[0], one_step()[0], what)


def _one_step(matrix: Tensor) -> list[Tensor]:
    # The products of every step have the same shapes.
    return [orthogonalized(matrix, 1)]
