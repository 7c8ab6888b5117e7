"""fp32 copies of parameters in 16 bits, which an optimizer updates in their place.

A step of AdamW changes a weight by about the learning rate, and bf16 has 8 bits: most steps are less than half the
distance to the next number, and are lost. Here the optimizer updates fp32 copies from fp32 gradients, and parameters
are the copies rounded.

Source: Micikevicius et al. 2018 (arXiv:1710.03740), section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from shardwise.core.sharding import ParamLayout
from shardwise.training.gradients import Division
from shardwise.training.optimizer.gradients import gradient_of
from shardwise.training.optimizer.optimizer import ShardedOptimizer


class MasterWeights:
    """An optimizer of a model in 16 bits, by another that updates fp32 copies of its parameters.

    Gradients are read where they are: from ``param.main_grad`` if there is one, else from ``param.grad``.

    Args:
        optimizer: of the model's parameters, before its first step; from here on it updates the copies.
        model: the model, or the parameters that ``optimizer`` updates.

    Attributes:
        optimizer: as given.
        param_groups, why_not_fused: the optimizer's.
    """

    def __init__(self, optimizer: ShardedOptimizer, model: nn.Module | Iterable[Parameter]) -> None:
        self.optimizer = optimizer
        params = model.parameters() if isinstance(model, nn.Module) else model
        self._masters = {
            param: Parameter(param.detach().float())
            for param in params
            if param.requires_grad and param.dtype in (torch.float16, torch.bfloat16)
        }
        optimizer.train_instead_(self._masters)
        self.param_groups: list[dict[str, Any]] = optimizer.param_groups
        self.why_not_fused: str | None = optimizer.why_not_fused

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, those of the model's parameters too."""
        self.optimizer.zero_grad(set_to_none)
        for param in self._masters:
            param.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update the copies, and round the parameters to them."""
        for param, master in self._masters.items():
            gradient = gradient_of(param)
            master.grad = None if gradient is None else gradient.to(master.dtype)
        self.optimizer.step()
        self.round_()
        for master in self._masters.values():
            master.grad = None

    def state_of(self, param: Parameter, layout: ParamLayout) -> Mapping[str, tuple[Tensor, ParamLayout]]:
        """What the other optimizer keeps of the parameter's copy; the copy itself is ``weight_of``."""
        return self.optimizer.state_of(self._masters.get(param, param), layout)

    def set_step_(self, step: int) -> None:
        """Take ``step`` steps for done, and the copies for loaded."""
        self.optimizer.set_step_(step)
        self.round_()

    def train_instead_(
        self, copies: Mapping[Parameter, Parameter], shares: Mapping[Parameter, Division] | None = None
    ) -> None:
        """Not of an optimizer that has copies already."""
        raise NotImplementedError("the parameters have fp32 copies already")

    def weight_of(self, param: Tensor) -> Tensor:
        """The fp32 copy of a parameter, of its shape; the parameter itself if it has none."""
        return (self._masters.get(param, param) if isinstance(param, Parameter) else param).detach()

    @torch.no_grad()
    def round_(self) -> None:
        """Make the model's parameters the copies, rounded."""
        if self._masters:
            torch._foreach_copy_(list(self._masters), list(self._masters.values()))
