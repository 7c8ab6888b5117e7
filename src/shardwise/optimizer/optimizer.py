"""What training and checkpoints ask of an optimizer, whichever it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Parameter

from shardwise.sharding import ParamLayout, ParamShard
from shardwise.sharding.rows import interval_of_rows


class ShardedOptimizer(Protocol):
    """An optimizer of a split model: one of PyTorch's, with the last two functions beside.

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

    def train_instead_(self, copies: Mapping[Parameter, Parameter]) -> None:
        """From the first step on update these parameters in place of those that the optimizer was made for.

        Args:
            copies: by parameter, the one that is updated in its place, of the same shape.
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
                name, interval = f"{kind}.{key}", interval_of_rows(weight.data)
                data = tensor if interval is None else tensor.view(-1)
                result[name] = ParamShard(name, data, layout, weight.rank, weight.sharded_offsets, interval=interval)
    return result


def set_learning_rate_(optimizer: ShardedOptimizer, learning_rate: float) -> None:
    """Use ``learning_rate`` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
