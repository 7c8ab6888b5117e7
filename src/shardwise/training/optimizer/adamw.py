"""AdamW of a split model: PyTorch's AdamW, which is elementwise and so works shard by shard."""

import inspect
import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from shardwise.core.sharding import ParamLayout, has_copies
from shardwise.kernels.dispatch import why_not_fused_optimizer
from shardwise.nn import named_param_layouts
from shardwise.training.gradients import Division

STATE_NAMES = ("exp_avg", "exp_avg_sq")
# The fused kernel updates the last elements of a tensor, less than a vector, one by one, and rounds them differently.
VECTOR = 16


class AdamW(torch.optim.AdamW):
    """AdamW that decays weight matrices and embeddings, but not biases and norms.

    Args:
        model: the model whose parameters are trained.
        learning_rate: initial learning rate; ``set_learning_rate_`` changes it before each step.
        weight_decay: weight decay per unit of learning rate.
        betas: decay of the running means of the gradient and of its square.
        epsilon: number added to the root mean square.
        without: parameters that another optimizer trains.
        exact_parts: maximum number of parts for which an update has the same bits however parameters are split; None
            for no such guarantee.

    Source: Loshchilov and Hutter 2019 (arXiv:1711.05101).
    """

    # PyTorch's compiler leaves these out of its graphs. Its decorators import the compiler for that at the first call,
    # which takes a rank a second; the functions within need no compiler.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))

    def __init__(
        self,
        model: nn.Module,
        *,
        learning_rate: float,
        weight_decay: float,
        betas: tuple[float, float],
        epsilon: float,
        without: Collection[Parameter] = (),
        exact_parts: int | None = None,
    ) -> None:
        others = set(without)
        params = [param for param in model.parameters() if param.requires_grad and param not in others]
        groups: list[dict[str, Any]] = [
            {"params": [param for param in params if param.dim() >= 2], "weight_decay": weight_decay},
            {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
        ]
        if exact_parts is not None:
            whole = {
                param for _, param, layout in named_param_layouts(model, 1) if _has_whole_vectors(layout, exact_parts)
            }
            groups = [
                group | {"params": [each for each in group["params"] if (each in whole) is fused]} | options
                for group in groups
                for fused, options in ((True, {}), (False, {"fused": False}))
            ]
        reasons = (
            why_not_fused_optimizer(param.device.type, has_copies=has_copies(layout))
            for _, param, layout in named_param_layouts(model, 1)
        )
        self.why_not_fused = next((reason for reason in reasons if reason is not None), None)
        # If nothing is trained (a stage may be frozen), keep one group without parameters: torch requires a group.
        filled = [group for group in groups if group["params"]] or groups[:1]
        super().__init__(filled, lr=learning_rate, betas=betas, eps=epsilon, fused=self.why_not_fused is None)

    def state_of(self, param: Parameter, layout: ParamLayout) -> Mapping[str, tuple[Tensor, ParamLayout]]:
        """Return the running means of the gradient and of its square, in the parameter's layout; initially zero."""
        state = self._made_state(param)
        return {kind: (state[kind], layout) for kind in STATE_NAMES}

    def set_step_(self, step: int) -> None:
        """Set the number of completed steps, for the bias correction."""
        for group in self.param_groups:
            for param in group["params"]:
                self._made_state(param)["step"].fill_(float(step))

    def train_instead_(
        self, copies: Mapping[Parameter, Parameter], shares: Mapping[Parameter, Division] | None = None
    ) -> None:
        for group in self.param_groups:
            group["params"] = [copies.get(param, param) for param in group["params"]]

    def _made_state(self, param: Parameter) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[param]
        if not state:
            # The same state as torch's AdamW makes in its first step; the fused one keeps the count on the parameter's
            # device.
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            for kind in STATE_NAMES:
                state[kind] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return state


def _has_whole_vectors(layout: ParamLayout, parts: int) -> bool:
    """True if each part of the parameter consists of whole vectors, at every layout."""
    if layout.dim is None:
        return True
    sections = parts * layout.stride
    return layout.global_shape[layout.dim] % sections == 0 and math.prod(layout.global_shape) // sections % VECTOR == 0
