"""AdamW of a split model, which is elementwise and so works shard by shard: PyTorch's, or on CUDA a Triton kernel."""

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from shardwise.core.sharding import ParamLayout, has_copies
from shardwise.kernels import dispatch
from shardwise.kernels.dispatch import why_not_fused_optimizer
from shardwise.kernels.fake_device import planned_device
from shardwise.nn import named_param_layouts
from shardwise.training.gradients import Division

STATE_NAMES = ("exp_avg", "exp_avg_sq")

# Gradient, weight, both running means, the rounded weight if there is one, and the number of steps.
Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]


class AdamW(torch.optim.AdamW):
    """AdamW that decays weight matrices and embeddings, but not biases and norms.

    Args:
        model: the model whose parameters are trained.
        learning_rate: initial learning rate; ``set_learning_rate_`` changes it before each step.
        weight_decay: weight decay per unit of learning rate.
        betas: decay of the running means of the gradient and of its square.
        epsilon: number added to the root mean square.
        without: parameters that another optimizer trains.

    Attributes:
        why_not_fused: see ``ShardedOptimizer``.
        scales_gradients: whether a fused step also divides by ``grad_scale``.
        grad_scale: fp32 scalar on the parameters' device that divides the gradients in the next step, as in PyTorch's
            fused optimizers; None for 1. ``step`` sets it to None.
        rounds: for fp32 copies of weights, the 16-bit weights that a step may set to the rounded copies.
        clears_gradients: whether a step may set the gradients to zero.
        has_rounded, has_cleared: whether the last step did so, for all parameters.

    Source: Loshchilov and Hutter 2019 (arXiv:1711.05101).
    """

    # PyTorch's compiler leaves these out of its graphs. Its decorators import the compiler for that at the first call,
    # which takes a rank a second; the functions within need no compiler.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    _torch_step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))

    grad_scale: Tensor | None = None
    scales_gradients = True
    clears_gradients = has_rounded = has_cleared = False

    def __init__(
        self,
        model: nn.Module,
        *,
        learning_rate: float,
        weight_decay: float,
        betas: tuple[float, float],
        epsilon: float,
        without: Collection[Parameter] = (),
    ) -> None:
        self.rounds: dict[Parameter, Parameter] = {}
        self._tables: dict[Any, tuple[Tensor, Tensor]] = {}
        others = set(without)
        params = [param for param in model.parameters() if param.requires_grad and param not in others]
        groups: list[dict[str, Any]] = [
            {"params": [param for param in params if param.dim() >= 2], "weight_decay": weight_decay},
            {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
        ]
        groups = self._divided(groups, model)
        reasons = (
            why_not_fused_optimizer(param.device.type, has_copies=has_copies(layout))
            for _, param, layout in named_param_layouts(model, 1)
        )
        self.why_not_fused = next((reason for reason in reasons if reason is not None), None)
        # If nothing is trained (a stage may be frozen), keep one group without parameters: torch requires a group.
        filled = [group for group in groups if group["params"]] or groups[:1]
        super().__init__(filled, lr=learning_rate, betas=betas, eps=epsilon, fused=self.why_not_fused is None)

    def _divided(self, groups: list[dict[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
        """Return groups of parameters with the same options of PyTorch's AdamW."""
        return groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter in place from its gradient; ``closure`` computes them first, as in PyTorch."""
        result, kernels, batches = None, None, []
        if closure is None and planned_device() is None:
            batches = [each for group in self.param_groups for each in self._batches(group)]
            kernels = self._kernels([tensors for _, _, rows in batches for tensors in rows])
        self.has_rounded = self.has_cleared = False
        if kernels is None:
            result = self._torch_step(closure)
        else:
            self._update_(kernels, batches)
            self.has_rounded = all(dtype is not None for _, dtype, _ in batches)
            self.has_cleared = self.clears_gradients
        self.grad_scale = None
        return result

    def _batches(self, group: dict[str, Any]) -> Iterator[tuple[dict[str, Any], torch.dtype | None, list[Tensors]]]:
        """Yield the parameters that have a gradient, by the dtype of their rounded copies."""
        rows: dict[torch.dtype | None, list[Tensors]] = {}
        for param in group["params"]:
            if param.grad is not None and param.device.type == dispatch.ADAMW_TRITON.device_type:
                rounded, state = self.rounds.get(param), self._made_state(param)
                tensors = (param.grad, param, state["exp_avg"], state["exp_avg_sq"], rounded, state["step"])
                rows.setdefault(None if rounded is None else rounded.dtype, []).append(tensors)
        return ((group, dtype, several) for dtype, several in rows.items())

    def _kernels(self, rows: Sequence[Tensors]) -> Any:
        """Return the module of the Triton kernel if it can update these parameters; otherwise None."""
        if not rows:
            return None

        def fits() -> bool:
            wide = [each for *tensors, _, step in rows for each in (*tensors, step)]
            narrow = [rounded for *_, rounded, _ in rows if rounded is not None]
            return (
                all(each.dtype == torch.float32 for each in wide)
                and all(each.is_contiguous() for each in (*wide, *narrow))
                and all(each.data_ptr() % 16 == 0 for *tensors, _ in rows for each in tensors if each is not None)
                and not any(group["amsgrad"] or group["maximize"] for group in self.param_groups)
            )

        return dispatch.ADAMW_TRITON.kernels(rows[0][1], fits=fits)

    def _update_(
        self, kernels: Any, batches: Sequence[tuple[dict[str, Any], torch.dtype | None, list[Tensors]]]
    ) -> None:
        factor = None if self.grad_scale is None else self.grad_scale.reciprocal()
        torch._foreach_add_([step for _, _, rows in batches for *_, step in rows], 1.0)
        for number, (group, dtype, rows) in enumerate(batches):
            addresses = tuple(
                (*(0 if each is None else each.data_ptr() for each in tensors), tensors[1].numel()) for tensors in rows
            )
            if (number, addresses) not in self._tables:
                self._tables = {key: made for key, made in self._tables.items() if key[0] != number}
                self._tables[number, addresses] = kernels.tables(addresses, rows[0][1].device)
            kernels.update_(
                *self._tables[number, addresses],
                factor=factor,
                learning_rate=float(group["lr"]),
                weight_decay=group["weight_decay"],
                betas=group["betas"],
                epsilon=group["eps"],
                rounded=dtype,
                clears=self.clears_gradients,
            )
            # PyTorch did not see these writes. A backward through the old weights must raise an error.
            written = [each for _, weight, *_, rounded, _ in rows for each in (weight, rounded) if each is not None]
            torch.autograd.graph.increment_version(written)

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
