"""Tensors of a module that are computed once and never learned: where they lie, and that they keep their digits."""

from typing import Any, Self

import torch
from torch import Tensor, nn

# MPS has no fp64, and a tensor on the meta device has no values.
_WITHOUT_FP64 = ("mps", "meta")


class FixedTensors(nn.Module):
    """A module whose tensors of the names in ``_fixed`` move with it from device to device, and change in nothing else.

    As buffers they would be rounded by ``module.bfloat16()``, and ``to_empty`` would lose their values.
    """

    _fixed: tuple[str, ...] = ()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        for name in self._fixed:
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, _on(fn(tensor).device, tensor))
        return self


def on_default_device(tensor: Tensor) -> Tensor:
    """A tensor in fp64 on PyTorch's default device, or where it is, if that device has no such tensors."""
    return _on(torch.get_default_device(), tensor)


def _on(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor if device.type in _WITHOUT_FP64 else tensor.to(device)
