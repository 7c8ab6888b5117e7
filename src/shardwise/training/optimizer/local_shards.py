"""An optimizer of the rows that each data-parallel rank holds of a fully sharded model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import Parameter

from shardwise.core.sharding import ParamLayout
from shardwise.training.gradients import Division
from shardwise.training.optimizer.gradients import gradient_of
from shardwise.training.optimizer.optimizer import ShardedOptimizer

if TYPE_CHECKING:
    from shardwise.training.gradients.fully_sharded import FullyShardedModel


class LocalShards:
    """An optimizer of a fully sharded model, by another that updates plain tensors: the rows of this rank.

    Args:
        optimizer: of the model's parameters as they were before it was sharded, before its first step.
        sharded: what has sharded the model.

    Attributes:
        optimizer: as given.
        param_groups, why_not_fused: the optimizer's.
    """

    def __init__(self, optimizer: ShardedOptimizer, sharded: FullyShardedModel) -> None:
        self.optimizer = optimizer
        self._shards = sharded.shards
        optimizer.train_instead_(sharded.replaced, sharded.divisions)
        self.param_groups: list[dict[str, Any]] = optimizer.param_groups
        self.why_not_fused: str | None = optimizer.why_not_fused

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, those of the model's parameters too."""
        self.optimizer.zero_grad(set_to_none)
        for param in self._shards:
            param.grad = None

    def step(self) -> None:
        """Update the rows of this rank."""
        for param, shard in self._shards.items():
            shard.grad = gradient_of(param)
        self.optimizer.step()
        for shard in self._shards.values():
            shard.grad = None

    def state_of(self, param: Parameter, layout: ParamLayout) -> Mapping[str, tuple[Tensor, ParamLayout]]:
        """What the optimizer keeps of the rows of this rank."""
        return self.optimizer.state_of(self._shards[param], layout)

    def set_step_(self, step: int) -> None:
        """Take ``step`` steps for done."""
        self.optimizer.set_step_(step)

    def train_instead_(
        self, copies: Mapping[Parameter, Parameter], shares: Mapping[Parameter, Division] | None = None
    ) -> None:
        """Not of an optimizer that trains other tensors already."""
        raise NotImplementedError("the rows of a fully sharded model are trained in place of its parameters already")
