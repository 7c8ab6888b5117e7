"""AdamW over a split model: PyTorch's, since it works element by element and so shard by shard."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from shardwise.layers import named_param_layouts
from shardwise.sharding import ParamShard, has_copies

STATE_NAMES = ("exp_avg", "exp_avg_sq")


def make_adamw(
    model: nn.Module,
    *,
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
    epsilon: float,
) -> torch.optim.AdamW:
    """AdamW that decays weight matrices and embeddings, and neither biases nor norms.

    Args:
        model: its parameters.
        learning_rate: at the start; set anew before each step by ``set_learning_rate_``.
        weight_decay: per unit of learning rate.
        betas: decay of the gradient's mean and of its mean square.
        epsilon: added to the root mean square.

    Source: Loshchilov and Hutter 2019 (arXiv:1711.05101).
    """
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in params if param.dim() >= 2], "weight_decay": weight_decay},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
    ]
    # On a CPU the fused step rounds the last elements of a tensor otherwise than those before. Copies of a key-value
    # head do not lie at the same place on all of their ranks, and must stay the same bit for bit.
    fused = all(
        param.device.type != "cpu" or not has_copies(layout) for _, param, layout in named_param_layouts(model, 1)
    )
    # Where nothing is trained (all of a stage may be frozen), one group without parameters: torch refuses to have none.
    filled = [group for group in groups if group["params"]] or groups[:1]
    return torch.optim.AdamW(filled, lr=learning_rate, betas=betas, eps=epsilon, fused=fused)


def learning_rate_at(step: int, *, steps: int, warmup_steps: int, highest: float, final_ratio: float) -> float:
    """Learning rate of step ``step`` (from 0) of ``steps``: a linear rise, then half a cosine down.

    >>> learning_rate_at(9, steps=100, warmup_steps=10, highest=1.0, final_ratio=0.1)
    1.0
    """
    if step < warmup_steps:
        return highest * (step + 1) / warmup_steps
    progress = min(1.0, (step + 1 - warmup_steps) / max(1, steps - warmup_steps))
    return highest * (final_ratio + (1.0 - final_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress)))


def set_learning_rate_(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Use ``learning_rate`` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def optimizer_state(weights: Mapping[str, ParamShard], optimizer: torch.optim.AdamW) -> dict[str, ParamShard]:
    """The optimizer's tensors, each laid out as its parameter; made (as zeros) where there is none yet.

    The number of steps is not among them: it is the same for all parameters, and the caller's.

    Args:
        weights: of the model whose parameters ``optimizer`` was made from, as ``sharded_state_dict`` returns them.
        optimizer: from ``make_adamw``.

    Returns:
        Entries ``exp_avg.KEY`` and ``exp_avg_sq.KEY``, in the optimizer's own memory, for each parameter that it
        trains.
    """
    result: dict[str, ParamShard] = {}
    for key, weight in weights.items():
        if not isinstance(weight.data, Parameter) or not weight.data.requires_grad:
            continue
        state = _state_of(optimizer, weight.data)
        for kind in STATE_NAMES:
            name = f"{kind}.{key}"
            result[name] = ParamShard(name, state[kind], weight.layout, weight.rank, weight.sharded_offsets)
    return result


def set_step_(model: nn.Module, optimizer: torch.optim.AdamW, step: int) -> None:
    """Tell the optimizer that ``step`` steps are done, as its bias correction needs."""
    for param in model.parameters():
        if param.requires_grad:
            _state_of(optimizer, param)["step"].fill_(float(step))


def _state_of(optimizer: torch.optim.AdamW, param: Parameter) -> dict[str, Tensor]:
    state: dict[str, Tensor] = optimizer.state[param]
    if not state:
        # As AdamW makes them at its first step; the fused one keeps the count beside the parameter.
        state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        for kind in STATE_NAMES:
            state[kind] = torch.zeros_like(param, memory_format=torch.preserve_format)
    return state
