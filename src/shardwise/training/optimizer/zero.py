"""An optimizer whose state, and fp32 copies of weights, are split over the data-parallel ranks (ZeRO, stage 1).

Each rank owns an interval of each bucket of gradients. Gradients are summed to their owners, each rank updates what it
owns, and parameters are gathered again while the next forward runs. What the optimizer is made for are the rank's
elements of each parameter, as one-dimensional parameters: an optimizer that works element by element knows no
difference.

Source: Rajbhandari et al. 2020 (arXiv:1910.02054), section 5, P_os.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from shardwise.core.sharding import Interval, ParamLayout
from shardwise.training.gradients import Division, GradientBuffers, GradientTrees, ParameterBuffers
from shardwise.training.optimizer.mixed_precision import MasterWeights
from shardwise.training.optimizer.optimizer import ShardedOptimizer


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
