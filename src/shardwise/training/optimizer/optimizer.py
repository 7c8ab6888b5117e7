"""What training and checkpoints ask of an optimizer, whichever it is."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Parameter

from shardwise.core.sharding import ParamLayout, ParamShard
from shardwise.core.sharding.balanced import interval_of_rows, local_rows
from shardwise.training.gradients import Division


class ShardedOptimizer(Protocol):
    """An optimizer of a split model: one of PyTorch's, with the last three functions beside.

    One that keeps fp32 copies of weights has ``weight_of(param)`` too, which gives the copy, and one that has some of a
    parameter's elements only, and of all else tensors of one dimension, ``interval_of(param)``: which ones.

    Attributes:
        param_groups: what it trains, each group with its learning rate ``"lr"``.
        why_not_fused: why a step is not one kernel for all parameters; None if it is.
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
        """What is kept of a parameter, as a checkpoint stores it and fills it again.

        Args:
            param: one that it trains.
            layout: of the parameter.

        Returns:
            By kind, this rank's part, in the optimizer's own memory (made where there is none yet), and its layout.
        """
        ...

    def set_step_(self, step: int) -> None:
        """Take ``step`` steps for done, as after loading; the count is not among what is kept of each parameter."""
        ...

    def train_instead_(
        self, copies: Mapping[Parameter, Parameter], shares: Mapping[Parameter, Division] | None = None
    ) -> None:
        """From the first step on update these parameters in place of those that the optimizer was made for.

        Args:
            copies: by parameter, the one that is updated in its place: of the same shape, or with ``shares`` this
                rank's elements of it, in one dimension.
            shares: by parameter, which elements are whose.
        """
        ...


def optimizer_state(weights: Mapping[str, ParamShard], optimizer: ShardedOptimizer) -> dict[str, ParamShard]:
    """The optimizer's tensors, for a checkpoint.

    Args:
        weights: of the model whose parameters ``optimizer`` was made from, as ``sharded_state_dict`` returns them.
        optimizer: of that model.

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
    """What a checkpoint holds of the weights themselves: their fp32 copies, and what this rank has of them.

    Args:
        weights: of the model, as ``sharded_state_dict`` returns them.
        optimizer: of that model.
    """
    weight_of = getattr(optimizer, "weight_of", None)
    result = dict(weights)
    for key, weight in weights.items():
        param = weight.data
        if isinstance(param, Parameter) and param.requires_grad:
            result[key] = _held(weight, param if weight_of is None else weight_of(param), param, optimizer)
    return result


def _held(shard: ParamShard, tensor: Tensor, param: Parameter, optimizer: ShardedOptimizer) -> ParamShard:
    """What the optimizer has of a part: all of it, or some of its elements."""
    interval_of = getattr(optimizer, "interval_of", interval_of_rows)
    if (interval := interval_of(param)) is None:
        return shard.with_data(tensor)
    # Stages that hold copies of a tied weight may cut them at different places.
    return shard.with_interval(interval, local_rows(tensor).view(-1), is_copy=shard.replicas.is_copy)


def set_learning_rate_(optimizer: ShardedOptimizer, learning_rate: float) -> None:
    """Use ``learning_rate`` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
