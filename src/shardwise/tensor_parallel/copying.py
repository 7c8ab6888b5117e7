"""``copy.deepcopy`` of layers and models."""

from __future__ import annotations

import copy
from typing import Any, Self

from torch import nn
from torch.distributed import ProcessGroup


class GroupModule(nn.Module):
    """A module that holds process groups, and parameters with attributes of their own.

    ``copy.deepcopy`` (for moving averages, or a reference model) gives one with parameters and buffers of its own. The
    groups are the same, since a group cannot be copied; and parameters keep the attributes that say how they are split
    and how their gradients are summed (``sequence_parallel``, ``shared_embedding`` and others), which PyTorch's copy
    of a parameter loses. As there, gradients are not copied.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        for module in self.modules():
            for value in vars(module).values():
                if isinstance(value, ProcessGroup):
                    memo[id(value)] = value
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        for own, other in zip(self.parameters(), copied.parameters(), strict=True):
            vars(other).update(copy.deepcopy(vars(own), memo))
        return copied
