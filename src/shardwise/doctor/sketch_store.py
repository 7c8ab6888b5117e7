"""The tensors that a rank has recorded: a sketch of each, within a budget of bytes."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shardwise.doctor.places import Declared, Key
from shardwise.doctor.sketches import Sketch

_PARTS = 512


class SketchStore:
    """Sketches of tensors (``pending`` in this step, ``views`` of earlier ones), and their ``TensorFacts``."""

    def __init__(self, budget: int, full: Sequence[str]) -> None:
        self._budget, self._full, self._num_bytes = budget, tuple(full), 0
        self.step = 0
        self.numbers: dict[Key, int] = {}
        self.facts: list[dict[str, Any]] = []
        self.views: dict[str, Tensor] = {}
        self.pending: list[tuple[int, Sketch]] = []
        self.dropped: list[str] = []

    def keep(self, key: Key, tensor: Tensor, declared: Declared) -> int:
        """Keep a sketch of a tensor, and return its number; -1 for integers, and once the budget is used up."""
        if not tensor.is_floating_point():
            return -1
        if key in self.numbers:
            return self.numbers[key]
        # No tensor takes more than this part of what is left, so that later ones find room too.
        most = (self._budget - self._num_bytes) // (_PARTS * tensor.itemsize)
        if any(fnmatch.fnmatchcase(key.name, pattern) for pattern in self._full):
            most = tensor.numel()
        sketch = Sketch.of(tensor, most_elements=most)
        if self._num_bytes + sketch.num_bytes > self._budget:
            self.dropped.append(key.name)
            return -1
        self._num_bytes += sketch.num_bytes
        number = self.numbers[key] = len(self.facts)
        shape, dtype = list(sketch.shape), str(sketch.dtype).removeprefix("torch.")
        facts = dataclasses.asdict(key) | {"shape": shape, "dtype": dtype, "strides": list(sketch.strides)}
        self.facts.append(facts | ({"layouts": declared} if declared else {}))
        self.pending.append((number, sketch))
        return number

    def end_step(self) -> None:
        """Move the sketches of the step to the host."""
        for number, sketch in self.pending:
            for name, view in sketch.views.items():
                self.views[f"{number}.{name}"] = view.cpu().contiguous()
        self.pending.clear()
        self.step += 1
