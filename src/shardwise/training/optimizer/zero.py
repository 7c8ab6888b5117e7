"""An optimizer whose state, and fp32 copies of weights, are split over the data-parallel ranks (ZeRO, stage 1).

Each rank owns an interval of each bucket of gradients. Gradients are summed to their owners, each rank updates what it
owns, and parameters are gathered again while the next forward runs. What the optimizer is made for are the rank's
elements of each parameter, as one-dimensional parameters: an optimizer that works element by element knows no
difference.

Source: Rajbhandari et al. 2020 (arXiv:1910.02054), section 5, P_os.

An optimizer of the rows that each data-parallel rank holds of a fully sharded model.

Tensors of which each rank has a piece, dealt out so that each is whole on one rank, and handed back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from shardwise.core.communication.collectives import all_to_all
from shardwise.core.sharding import ParamLayout
from shardwise.training.gradients import Division
from shardwise.training.optimizer.gradients import gradient_of
from shardwise.training.optimizer.optimizer import ShardedOptimizer

if TYPE_CHECKING:
    from shardwise.training.gradients.fully_sharded import FullyShardedModel

from torch import nn

from shardwise.core.sharding import Interval
from shardwise.training.gradients import GradientBuffers, GradientTrees, ParameterBuffers
from shardwise.training.optimizer.mixed_precision import MasterWeights


class ZeroOptimizer:
    """An optimizer of a model, by another that updates this rank's elements of each parameter.

    Its ``step`` starts the gathers of the parameters, and returns; ``parameters`` waits for them where they are needed.

    Args:
        optimizer: of the model's parameters, before its first step; from here on it updates this rank's elements.
        model: the module, or a pipeline stage's chunks; its parameters' memory moves.
        gradients: its gradients, made with ``scatter``.
        has_masters: parameters in 16 bits have fp32 copies, which are updated.

    Attributes:
        parameters: where they lie, and which elements are whose.
        optimizer: as given, or with fp32 copies.
        param_groups, why_not_fused: the optimizer's.
    """

    def __init__(
        self,
        optimizer: ShardedOptimizer,
        model: nn.Module | Sequence[nn.Module],
        gradients: GradientBuffers | GradientTrees,
        *,
        has_masters: bool,
    ) -> None:
        self.parameters = ParameterBuffers(model, gradients)
        self._gradients = gradients
        self._own = {param: Parameter(share.data) for param, share in self.parameters.shares.items()}
        for param, own in self._own.items():
            tensor: Any = own
            tensor.main_grad = self.parameters.shares[param].gradient
        optimizer.train_instead_(self._own, shares=self.parameters.shares)
        self.optimizer = MasterWeights(optimizer, self._own.values()) if has_masters else optimizer
        self.param_groups: list[dict[str, Any]] = optimizer.param_groups
        self.why_not_fused: str | None = optimizer.why_not_fused

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        self._gradients.zero_()

    def step(self) -> None:
        """Update what this rank owns, and start to gather the parameters; every rank calls."""
        self.parameters.wait()
        for param, own in self._own.items():
            gradient = self.parameters.shares[param].gradient
            own.grad = gradient if gradient.dtype == own.dtype else None
        self.optimizer.step()
        self.parameters.gather_()

    def state_of(self, param: Parameter, layout: ParamLayout) -> Mapping[str, tuple[Tensor, ParamLayout]]:
        """What the optimizer keeps of this rank's elements of a parameter: one-dimensional tensors."""
        return self.optimizer.state_of(self._own[param], layout)

    def set_step_(self, step: int) -> None:
        """Take ``step`` steps for done, and what this rank owns for loaded; every rank calls."""
        self.optimizer.set_step_(step)
        self.parameters.gather_()
        self.parameters.wait()

    def train_instead_(
        self, copies: Mapping[Parameter, Parameter], shares: Mapping[Parameter, Division] | None = None
    ) -> None:
        """Not of an optimizer that is split already."""
        raise NotImplementedError("the optimizer's state is split over the ranks already")

    def interval_of(self, param: Parameter) -> Interval:
        """Which of a parameter's elements this rank has, in row-major order."""
        return self.parameters.shares[param].interval

    def weight_of(self, param: Parameter) -> Tensor:
        """This rank's elements of a parameter, ``[m]``, or their fp32 copy."""
        own = self._own[param]
        return self.optimizer.weight_of(own) if isinstance(self.optimizer, MasterWeights) else own.detach()


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


def dealt_out(shapes: Sequence[tuple[int, ...]], num_ranks: int) -> list[list[int]]:
    """Which matrices each rank computes: the most work first, always to the rank with the least."""
    work = [math.prod(shape) * min(shape) for shape in shapes]
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    for index in sorted(range(len(work)), key=lambda index: -work[index]):
        min(dealt, key=lambda indices: sum(work[k] for k in indices)).append(index)
    return dealt


class Dealing:
    """An exchange of the pieces of several tensors: two all-to-alls, one to collect them and one to hand them back.

    Args:
        sizes: of each tensor the elements of each rank's piece.
        dealt: for each rank the tensors that it is given, by index; the same on every rank.
        group: the ranks; None if there is one.
    """

    def __init__(
        self, sizes: Sequence[Sequence[int]], dealt: Sequence[Sequence[int]], group: ProcessGroup | None
    ) -> None:
        self._sizes, self._dealt = sizes, dealt
        self._group = None if group is None or group.size() == 1 else group
        rank = 0 if group is None else group.rank()
        self._own = dealt[rank]
        self._order = [index for indices in dealt for index in indices]
        # To each rank what it is given, and from each what it has of what this one is given.
        self._sent = [sum(sizes[index][rank] for index in indices) for indices in dealt]
        self._received = [sum(sizes[index][other] for index in self._own) for other in range(len(dealt))]
        self._pieces = [sizes[index][rank] for index in self._order]

    def collect(self, pieces: Sequence[Tensor]) -> dict[int, list[Tensor]]:
        """All ranks' pieces of what this rank was given.

        Args:
            pieces: this rank's piece of every tensor, in one dimension.

        Returns:
            By the tensor's index, a piece of each rank, in rank order.
        """
        if self._group is None:
            return {index: [pieces[index]] for index in self._own}
        flat = _joined([pieces[index] for index in self._order], like=pieces[0])
        flat = all_to_all(flat, group=self._group, input_sizes=self._sent, output_sizes=self._received)
        runs = [
            run.split([self._sizes[index][other] for index in self._own])
            for other, run in enumerate(flat.split(self._received))
        ]
        return {index: [run[place] for run in runs] for place, index in enumerate(self._own)}

    def hand_back(self, wholes: Mapping[int, Sequence[Tensor]], like: Tensor) -> list[Tensor]:
        """This rank's piece of every tensor, in one dimension.

        Args:
            wholes: by index, a piece for each rank of the tensors that this rank was given.
            like: has the pieces' dtype and device.
        """
        if self._group is None:
            return [wholes[index][0] for index in range(len(self._sizes))]
        flat = _joined([wholes[index][other] for other in range(len(self._dealt)) for index in self._own], like=like)
        flat = all_to_all(flat, group=self._group, input_sizes=self._received, output_sizes=self._sent)
        by_index = dict(zip(self._order, flat.split(self._pieces), strict=True))
        return [by_index[index] for index in range(len(self._sizes))]


def _joined(pieces: Sequence[Tensor], like: Tensor) -> Tensor:
    # A rank may have nothing to send.
    return torch.cat([like.new_empty(0), *(piece.reshape(-1) for piece in pieces)])
