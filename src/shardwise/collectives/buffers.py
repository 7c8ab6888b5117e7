"""Communication buffers that are kept and used again."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class GlobalMemoryBuffer:
    """Named scratch memory that grows to the largest request and is handed out again and again.

    What ``get_tensor`` returns is overwritten by whoever asks for the same name and dtype next: use it only for values
    that are dead by then.
    """

    def __init__(self) -> None:
        self.buffer: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def get_tensor(
        self,
        tensor_shape: Sequence[int],
        dtype: torch.dtype,
        name: str,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """A tensor of the given shape and dtype with arbitrary values; ``device`` is the default device if None."""
        numel = math.prod(tensor_shape)
        where = torch.empty(0, device=device).device
        key = (name, dtype, where)
        held = self.buffer.get(key)
        if held is None or held.numel() < numel:
            # Made in inference mode it could not be written to outside of it.
            with torch.inference_mode(False):
                held = self.buffer[key] = torch.empty(numel, dtype=dtype, device=where, requires_grad=False)
        return held[:numel].view(tuple(tensor_shape))
