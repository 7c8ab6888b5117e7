"""Count the bytes that the forward pass saves for the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Kept:
    """Records the tensors that operations in the block save for their backward pass."""

    def __init__(self, *modules: nn.Module) -> None:
        self._params = {param.untyped_storage()._cdata for module in modules for param in module.parameters()}
        self._tensors: list[torch.Tensor] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self._tensors.append(tensor)
        return tensor

    def __enter__(self) -> Kept:
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.__exit__(*exception)

    @property
    def num_bytes(self) -> int:
        """Bytes of the saved storages at their current sizes, each counted once, without parameters."""
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in self._tensors}
        return sum(storage.nbytes() for key, storage in storages.items() if key not in self._params)


def kept_by(function: Any, *inputs: Any, **options: Any) -> int:
    """Return the bytes that ``function`` saves for its backward pass, which is then run."""
    modules = [function] if isinstance(function, nn.Module) else []
    with Kept(*modules) as kept:
        output = function(*inputs, **options)
        output = output[0] if isinstance(output, tuple) else output
    num_bytes = kept.num_bytes
    output.float().sum().backward()
    return num_bytes
