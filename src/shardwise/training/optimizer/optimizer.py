"""Protocol of sharded optimizers, and optimizers that update other tensors than the model's parameters.

There are three kinds of other tensors: fp32 copies of 16-bit parameters, this data-parallel rank's elements of each
parameter (ZeRO stage 1), and this rank's rows of a fully sharded model. The optimizer that updates them must be
elementwise or use the shares of a ``Division``; it needs no other change.
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
from shardwise.training.gradients.finalize import gradient_of
from shardwise.training.optimizer.adamw import AdamW

if TYPE_CHECKING:
    from shardwise.training.gradients.fully_sharded import FullyShardedModel


class ShardedOptimizer(Protocol):
    """Optimizer of a split model: a PyTorch optimizer with three more methods, the last three.

    An optimizer with fp32 copies of weights also has ``weight_of(param)``, which returns the copy. An optimizer that
    holds only some elements of a parameter, in one-dimensional tensors, has ``interval_of(param)``, their interval.

    Attributes:
        param_groups: groups of trained parameters, each with its learning rate ``"lr"``.
        why_not_fused: the reason why a step is not one kernel for all parameters; None if it is one.
    """

    param_groups: list[dict[str, Any]]
    why_not_fused: str | None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients."""
        ...

    def step(self) -> Any:
        """Update every parameter in place from its gradient."""
        ...

    def state_of(self, param: Parameter, layout: ParamLayout) -> Mapping[str, tuple[Tensor, ParamLayout]]:
        """Return the state of a trained parameter, for saving it to a checkpoint or loading it.

        Returns:
            By kind of state, this rank's part and its layout. The tensors are the optimizer's own, and are made if
            missing.
        """
        ...

    def set_step_(self, step: int) -> None:
        """Set the number of completed steps, which ``state_of`` does not include; called after loading."""
        ...

    def train_instead_(
        self, copies: Mapping[Parameter, Parameter], shares: Mapping[Parameter, Division] | None = None
    ) -> None:
        """Update other parameters instead of the model's; called before the first step.

        Args:
            copies: replacement of each parameter, of the same shape, or with ``shares`` this rank's elements,
                flattened.
            shares: division of each parameter between ranks.
        """
        ...


class _OfOtherTensors:
    """Optimizer of a model that wraps another optimizer, which updates other tensors instead of the parameters.

    Args:
        optimizer: optimizer of the model's parameters, before its first step.
        others: the tensor that is updated instead of each parameter.
    """

    def __init__(self, optimizer: ShardedOptimizer, others: Mapping[Parameter, Parameter]) -> None:
        self.optimizer = optimizer
        self.param_groups: list[dict[str, Any]] = optimizer.param_groups
        self.why_not_fused: str | None = optimizer.why_not_fused
        self._others = others
        # Factor of copies of narrower gradients in the next step: a product in 16 bits would be rounded.
        self.factor_of_copies = 1.0

    @property
    def innermost(self) -> Any:
        """The optimizer that this one wraps, or that one wraps, and so on."""
        return getattr(self.optimizer, "innermost", self.optimizer)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, including those of the model's parameters."""
        self.optimizer.zero_grad(set_to_none)
        for param in self._others:
            param.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update the other tensors from the gradients of the parameters (``gradient_of``)."""
        copies = []
        for param, other in self._others.items():
            gradient = gradient_of(param)
            other.grad = None if gradient is None else gradient.to(other.dtype)
            if other.grad is not None and other.grad is not gradient:
                copies.append(other.grad)
        if copies and self.factor_of_copies != 1.0:
            torch._foreach_mul_(copies, self.factor_of_copies)
        self.factor_of_copies = 1.0
        self.optimizer.step()
        for other in self._others.values():
            other.grad = None

    def state_of(self, param: Parameter, layout: ParamLayout) -> Mapping[str, tuple[Tensor, ParamLayout]]:
        """Return the state of the tensor that is updated instead of the parameter."""
        return self.optimizer.state_of(self._others.get(param, param), layout)

    def set_step_(self, step: int) -> None:
        """Set the number of completed steps."""
        self.optimizer.set_step_(step)

    def train_instead_(
        self, copies: Mapping[Parameter, Parameter], shares: Mapping[Parameter, Division] | None = None
    ) -> None:
        """Raise NotImplementedError: this optimizer already updates other tensors."""
        raise NotImplementedError(f"{type(self).__name__} trains other tensors instead of the parameters already")


class MasterWeights(_OfOtherTensors):
    """Optimizer of a 16-bit model that wraps another optimizer, which updates fp32 copies of the parameters.

    A step of AdamW changes a weight by about the learning rate, and bf16 has 8 significant bits: most steps are less
    than half the distance to the next number, and would be lost. The parameters are the rounded copies.

    Args:
        optimizer: optimizer of the model's parameters, before its first step; it then updates the copies.
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
        if isinstance(optimizer, AdamW):
            optimizer.rounds.update({master: param for param, master in self._masters.items()})

    def step(self) -> None:
        """Update the copies, and set the parameters to the rounded copies."""
        super().step()
        if not (isinstance(self.optimizer, AdamW) and self.optimizer.has_rounded):
            self.round_()

    def set_step_(self, step: int) -> None:
        """Set the number of completed steps, and the parameters from the copies, which were loaded."""
        self.optimizer.set_step_(step)
        self.round_()

    def weight_of(self, param: Parameter) -> Tensor:
        """Return the fp32 copy of a parameter, of the same shape; the parameter itself if it has none."""
        return self._masters.get(param, param).detach()

    @torch.no_grad()
    def reload_(self) -> None:
        """Set the copies to the model's parameters, which were changed."""
        if self._masters:
            torch._foreach_copy_(list(self._masters.values()), list(self._masters))

    @torch.no_grad()
    def round_(self) -> None:
        """Set the model's parameters to the rounded copies."""
        if self._masters:
            torch._foreach_copy_(list(self._masters), list(self._masters.values()))


class ZeroOptimizer(_OfOtherTensors):
    """Optimizer of a model that wraps another optimizer, which updates this rank's elements (ZeRO stage 1).

    Each data-parallel rank owns an interval of each bucket of gradients. Gradients are reduce-scattered to their
    owners, and each rank updates its elements, which are one-dimensional parameters. ``step`` starts to gather the
    parameters and returns; ``parameters`` waits for each bucket when the next forward needs it.

    Args:
        optimizer: optimizer of the model's parameters, before its first step; it then updates this rank's elements.
        model: the module, or a pipeline stage's chunks; the memory of its parameters moves.
        gradients: gradients of the model, made with ``scatter``.
        has_masters: whether 16-bit parameters have fp32 copies, which are updated.

    Attributes:
        parameters: buffers of the parameters, and each rank's elements.
        optimizer: the wrapped optimizer, with fp32 copies if ``has_masters``.

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
        self._gradients.zero_()

    def step(self) -> None:
        """Update this rank's elements, and start to gather the parameters; called on every rank."""
        self.parameters.wait()
        for param, own in self._own.items():
            gradient = self.parameters.shares[param].gradient
            own.grad = gradient if gradient.dtype == own.dtype else None
        self.optimizer.step()
        self.parameters.gather_()

    def set_step_(self, step: int) -> None:
        """Set the number of completed steps, and gather the elements, which were loaded; called on every rank."""
        self.optimizer.set_step_(step)
        self.parameters.gather_()
        self.parameters.wait()

    def interval_of(self, param: Parameter) -> Interval:
        """Return the interval of a parameter's elements that this rank has, in row-major order."""
        return self.parameters.shares[param].interval

    def weight_of(self, param: Parameter) -> Tensor:
        """Return this rank's elements of a parameter, ``[m]``, or their fp32 copy."""
        own = self._own[param]
        return self.optimizer.weight_of(own) if isinstance(self.optimizer, MasterWeights) else own.detach()


class LocalShards(_OfOtherTensors):
    """Optimizer of a fully sharded model that wraps another optimizer, which updates this rank's rows.

    Args:
        optimizer: optimizer of the model's parameters before they were sharded, before its first step.
        sharded: the sharded model.
    """

    def __init__(self, optimizer: ShardedOptimizer, sharded: FullyShardedModel) -> None:
        super().__init__(optimizer, sharded.shards)
        optimizer.train_instead_(sharded.replaced, sharded.divisions)


def optimizer_state(weights: Mapping[str, ParamShard], optimizer: ShardedOptimizer) -> dict[str, ParamShard]:
    """Return the optimizer's tensors for a checkpoint."""
    result: dict[str, ParamShard] = {}
    for key, weight in weights.items():
        if isinstance(weight.data, Parameter) and weight.data.requires_grad:
            for kind, (tensor, layout) in optimizer.state_of(weight.data, weight.layout).items():
                name = f"{kind}.{key}"
                shard = weight.with_layout(name, layout)
                result[name] = _held(shard, tensor, weight.data, optimizer)
    return result


def stored_weights(weights: Mapping[str, ParamShard], optimizer: ShardedOptimizer) -> dict[str, ParamShard]:
    """Return the model's weights for a checkpoint, this rank's elements of each, or their fp32 copies."""
    weight_of = getattr(optimizer, "weight_of", None)
    result = dict(weights)
    for key, weight in weights.items():
        param = weight.data
        if isinstance(param, Parameter) and param.requires_grad:
            result[key] = _held(weight, param if weight_of is None else weight_of(param), param, optimizer)
    return result


def _held(shard: ParamShard, tensor: Tensor, param: Parameter, optimizer: ShardedOptimizer) -> ParamShard:
    """Return the whole shard, or the interval of it that the optimizer holds, with the data of ``tensor``."""
    interval_of = getattr(optimizer, "interval_of", interval_of_rows)
    if (interval := interval_of(param)) is None:
        return shard.with_data(tensor)
    # Stages may cut their copies of a tied weight at different places.
    return shard.with_interval(interval, local_rows(tensor).view(-1), is_copy=shard.replicas.is_copy)


def set_learning_rate_(optimizer: ShardedOptimizer, learning_rate: float) -> None:
    """Set the learning rate of the following steps."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
