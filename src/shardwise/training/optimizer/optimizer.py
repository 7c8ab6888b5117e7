"""The protocol of optimizers for training and checkpoints, and optimizers that update other tensors than a model's.

Three kinds of other tensors: fp32 copies of parameters in 16 bits, this data-parallel rank's elements of each parameter
(ZeRO, stage 1), and its rows of a fully sharded model. The optimizer that updates them works element by element, or
takes ``Division``s, and knows no difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from shardwise.core.sharding import Interval, ParamLayout, ParamShard
from shardwise.core.sharding.balanced import interval_of_rows, local_rows
from shardwise.training.gradients import Division, GradientBuffers, GradientTrees, ParameterBuffers
from shardwise.training.optimizer.gradients import gradient_of

if TYPE_CHECKING:
    from shardwise.training.gradients.fully_sharded import FullyShardedModel


class ShardedOptimizer(Protocol):
    """An optimizer of a split model: one of PyTorch's, with the last three functions.

    An optimizer with fp32 copies of weights also has ``weight_of(param)``, the copy. One that has only some elements of
    a parameter, in one-dimensional tensors, has ``interval_of(param)``, these elements.

    Attributes:
        param_groups: groups of trained parameters, each with its learning rate ``"lr"``.
        why_not_fused: the reason why a step is not one kernel for all parameters; None if it is.
    """

    param_groups: list[dict[str, Any]]
    why_not_fused: str | None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        ...

    def step(self) -> Any:
        """Update every parameter from its gradient, in place."""
        ...

    def state_of(self, param: Parameter, layout: ParamLayout) -> Mapping[str, tuple[Tensor, ParamLayout]]:
        """The state of a trained parameter of a layout, to be stored in a checkpoint and to be filled from one.

        Returns:
            By kind, this rank's part, in the optimizer's own memory (made where there is none yet), and its layout.
        """
        ...

    def set_step_(self, step: int) -> None:
        """Take ``step`` steps for done, as after loading; the count is not in ``state_of``."""
        ...

    def train_instead_(
        self, copies: Mapping[Parameter, Parameter], shares: Mapping[Parameter, Division] | None = None
    ) -> None:
        """From the first step on update other parameters instead of those that the optimizer was made for.

        Args:
            copies: by parameter, its replacement: of the same shape, or with ``shares`` this rank's elements of it, in
                one dimension.
            shares: by parameter, the elements of each rank.
        """
        ...


class _OfOtherTensors:
    """An optimizer of a model, by another (``optimizer``) that updates other tensors instead of the parameters.

    Args:
        optimizer: of the model's parameters, before its first step.
        others: by parameter, the tensor that is updated instead.
    """

    def __init__(self, optimizer: ShardedOptimizer, others: Mapping[Parameter, Parameter]) -> None:
        self.optimizer = optimizer
        self.param_groups: list[dict[str, Any]] = optimizer.param_groups
        self.why_not_fused: str | None = optimizer.why_not_fused
        self._others = others

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, those of the model's parameters too."""
        self.optimizer.zero_grad(set_to_none)
        for param in self._others:
            param.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update the other tensors from the gradients of the parameters, wherever these are (``gradient_of``)."""
        for param, other in self._others.items():
            gradient = gradient_of(param)
            other.grad = None if gradient is None else gradient.to(other.dtype)
        self.optimizer.step()
        for other in self._others.values():
            other.grad = None

    def state_of(self, param: Parameter, layout: ParamLayout) -> Mapping[str, tuple[Tensor, ParamLayout]]:
        """The state of the tensor that is updated instead of the parameter."""
        return self.optimizer.state_of(self._others.get(param, param), layout)

    def set_step_(self, step: int) -> None:
        """Take ``step`` steps for done."""
        self.optimizer.set_step_(step)

    def train_instead_(
        self, copies: Mapping[Parameter, Parameter], shares: Mapping[Parameter, Division] | None = None
    ) -> None:
        """Not of an optimizer that trains other tensors already."""
        raise NotImplementedError(f"{type(self).__name__} trains other tensors instead of the parameters already")


class MasterWeights(_OfOtherTensors):
    """An optimizer of a model in 16 bits, by another that updates fp32 copies of its parameters.

    A step of AdamW changes a weight by about the learning rate, and bf16 has 8 bits: most steps are less than half the
    distance to the next number, and would be lost. The parameters are the copies rounded.

    Args:
        optimizer: of the model's parameters, before its first step; from here on it updates the copies.
        model: the model, or the parameters that ``optimizer`` updates.

    Source: Micikevicius et al. 2018 (arXiv:1710.03740), section 3.1.
    """

    def __init__(self, optimizer: ShardedOptimizer, model: nn.Module | Iterable[Parameter]) -> None:
        self._masters = {
            param: Parameter(param.detach().float())
            for param in (model.parameters() if isinstance(model, nn.Module) else model)
            if param.requires_grad and param.dtype in (torch.float16, torch.bfloat16)
        }
        super().__init__(optimizer, self._masters)
        optimizer.train_instead_(self._masters)

    def step(self) -> None:
        """Update the copies, and round the parameters to them."""
        super().step()
        self.round_()

    def set_step_(self, step: int) -> None:
        """Take ``step`` steps for done, and the copies for loaded."""
        self.optimizer.set_step_(step)
        self.round_()

    def weight_of(self, param: Parameter) -> Tensor:
        """The fp32 copy of a parameter, of its shape; the parameter itself if it has none."""
        return self._masters.get(param, param).detach()

    @torch.no_grad()
    def round_(self) -> None:
        """Make the model's parameters the copies, rounded."""
        if self._masters:
            torch._foreach_copy_(list(self._masters), list(self._masters.values()))


class ZeroOptimizer(_OfOtherTensors):
    """An optimizer of a model, by another that updates this rank's elements of each parameter (ZeRO, stage 1).

    Each data-parallel rank owns an interval of each bucket of gradients. Gradients are summed to their owners, and each
    rank updates its elements, which are one-dimensional parameters. ``step`` starts the gathers of the parameters and
    returns; ``parameters`` waits for them where they are needed, while the next forward runs.

    Args:
        optimizer: of the model's parameters, before its first step; from here on it updates this rank's elements.
        model: the module, or a pipeline stage's chunks; its parameters' memory moves.
        gradients: its gradients, made with ``scatter``.
        has_masters: parameters in 16 bits have fp32 copies, which are updated.

    Attributes:
        parameters: where they lie, and which elements are whose.
        optimizer: as given, or with fp32 copies.

    Source: Rajbhandari et al. 2020 (arXiv:1910.02054), section 5, P_os.
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
        shares = self.parameters.shares
        self._own = {param: Parameter(share.data) for param, share in shares.items()}
        for param, own in self._own.items():
            tensor: Any = own
            tensor.main_grad = shares[param].gradient
        optimizer.train_instead_(self._own, shares=shares)
        super().__init__(MasterWeights(optimizer, self._own.values()) if has_masters else optimizer, self._own)

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

    def set_step_(self, step: int) -> None:
        """Take ``step`` steps for done, and what this rank owns for loaded; every rank calls."""
        self.optimizer.set_step_(step)
        self.parameters.gather_()
        self.parameters.wait()

    def interval_of(self, param: Parameter) -> Interval:
        """Which of a parameter's elements this rank has, in row-major order."""
        return self.parameters.shares[param].interval

    def weight_of(self, param: Parameter) -> Tensor:
        """This rank's elements of a parameter, ``[m]``, or their fp32 copy."""
        own = self._own[param]
        return self.optimizer.weight_of(own) if isinstance(self.optimizer, MasterWeights) else own.detach()


class LocalShards(_OfOtherTensors):
    """An optimizer of a fully sharded model, by another that updates plain tensors: the rows of this rank.

    Args:
        optimizer: of the model's parameters as they were before it was sharded, before its first step.
        sharded: what has sharded the model.
    """

    def __init__(self, optimizer: ShardedOptimizer, sharded: FullyShardedModel) -> None:
        super().__init__(optimizer, sharded.shards)
        optimizer.train_instead_(sharded.replaced, sharded.divisions)


def optimizer_state(weights: Mapping[str, ParamShard], optimizer: ShardedOptimizer) -> dict[str, ParamShard]:
    """The optimizer's tensors, for a checkpoint.

    Args:
        weights: of the model that ``optimizer`` was made for, as ``sharded_state_dict`` returns them.

    Returns:
        Entries ``KIND.KEY``, such as ``exp_avg.KEY``, for each parameter that it trains.
    """
    result: dict[str, ParamShard] = {}
    for key, weight in weights.items():
        if isinstance(weight.data, Parameter) and weight.data.requires_grad:
            for kind, (tensor, layout) in optimizer.state_of(weight.data, weight.layout).items():
                name = f"{kind}.{key}"
                shard = ParamShard(
                    name, weight.data, layout, weight.rank, weight.sharded_offsets, replicas=weight.replicas
                )
                result[name] = _held(shard, tensor, weight.data, optimizer)
    return result


def stored_weights(weights: Mapping[str, ParamShard], optimizer: ShardedOptimizer) -> dict[str, ParamShard]:
    """The weights for a checkpoint, from the model's: fp32 copies if any, and of each weight this rank's elements."""
    weight_of = getattr(optimizer, "weight_of", None)
    result = dict(weights)
    for key, weight in weights.items():
        param = weight.data
        if isinstance(param, Parameter) and param.requires_grad:
            result[key] = _held(weight, param if weight_of is None else weight_of(param), param, optimizer)
    return result


def _held(shard: ParamShard, tensor: Tensor, param: Parameter, optimizer: ShardedOptimizer) -> ParamShard:
    """A part, or the elements of it that the optimizer has."""
    interval_of = getattr(optimizer, "interval_of", interval_of_rows)
    if (interval := interval_of(param)) is None:
        return shard.with_data(tensor)
    # Stages that hold copies of a tied weight may cut them at different places.
    return shard.with_interval(interval, local_rows(tensor).view(-1), is_copy=shard.replicas.is_copy)


def set_learning_rate_(optimizer: ShardedOptimizer, learning_rate: float) -> None:
    """Use ``learning_rate`` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
