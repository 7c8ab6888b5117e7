"""Count the bytes that tensors created in a block hold."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Tracks every storage that an operation in the block makes, including values saved by autograd.

    >>> with LiveBytes() as made:
    ...     x = torch.ones(1024)
    >>> made.count()
    4096
    >>> del x
    >>> made.count()
    0
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, StorageWeakRef] = {}
        self._before: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What is first seen as an argument was made before the block.
        self._see(self._before, (args, kwargs))
        result = func(*args, **(kwargs or {}))
        self._see(self._made, result)
        return result

    def _see(self, storages: dict[int, StorageWeakRef], value: Any) -> None:
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                # The weak reference prevents reuse of the address, so that each entry is one storage.
                weak = StorageWeakRef(leaf.untyped_storage())
                if weak.cdata not in self._made and weak.cdata not in self._before:
                    storages[weak.cdata] = weak

    def count(self) -> int:
        """Return the bytes of the storages that are still alive, at their current sizes."""
        total = 0
        for weak in self._made.values():
            storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
            if storage is not None:
                total += storage.nbytes()
        return total


class Peak(LiveBytes):
    """The most bytes that tensors hold at once that are made in the block; views of the given ones do not count."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self.given = [StorageWeakRef(tensor.untyped_storage()) for tensor in given]
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = len(self._made)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for weak in self.given:
            self._made.pop(weak.cdata, None)
        if len(self._made) > before:
            for address in [address for address, weak in self._made.items() if weak.expired()]:
                del self._made[address]
            self.peak = max(self.peak, self.count())
        return result
