"""Training steps without Shardwise: one process, and DTensor.

Each ``make_...`` returns a function that runs one whole training step. The baselines are written as an expert would:
fused AdamW, gradients set to None, local tensors between the parallel layers, one reduction if three linear layers
share an input.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from steps.dense_llama import DenseLlama
from steps.problem import (
    ADAM_EPSILON,
    BETAS,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    WEIGHT_DECAY,
    Problem,
    Step,
)


def split_parameters(model: nn.Module) -> tuple[list[Parameter], list[Parameter]]:
    """Return the matrices, and the weights of norms."""
    params = list(model.parameters())
    return [param for param in params if param.dim() >= 2], [param for param in params if param.dim() < 2]


def make_adamw(matrices: Iterable[Parameter], norms: Iterable[Parameter]) -> torch.optim.AdamW:
    """Create a fused AdamW with weight decay only for matrices; it needs groups of only DTensors or plain tensors."""
    groups = [
        {"params": list(matrices), "weight_decay": WEIGHT_DECAY},
        {"params": list(norms), "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=ADAM_EPSILON, fused=True)


def gradients_of(params: Iterable[Parameter]) -> list[Tensor]:
    """Return the gradients that are not None."""
    return [param.grad for param in params if param.grad is not None]


def by_mesh(params: Iterable[Parameter]) -> list[list[Parameter]]:
    """Separate parameters by their mesh, and plain ones: neither norms nor the fused AdamW accept a mixture."""
    several: dict[DeviceMesh | None, list[Parameter]] = {}
    for param in params:
        several.setdefault(param.device_mesh if isinstance(param, DTensor) else None, []).append(param)
    return list(several.values())


def clip_together_(several: Iterable[list[Parameter]]) -> Tensor:
    """Clip the gradients of all lists, as of ``by_mesh``, by their one norm, and return the norm."""
    several = list(several)
    norm: Tensor = torch.linalg.vector_norm(
        torch.stack([whole(get_total_norm(gradients_of(each))) for each in several])
    )
    for each in several:
        clip_grads_with_norm_(each, MAX_GRAD_NORM, norm)
    return norm


def whole(value: Tensor) -> Tensor:
    """Return a DTensor's full tensor, and a plain tensor itself."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def make_single(problem: Problem, *, fused: bool = False) -> Step:
    """Create a step of the whole model in one process."""
    model = DenseLlama(problem.sizes, fused=fused).load(problem.weights)
    matrices, norms = split_parameters(model)
    optimizer = make_adamw(matrices, norms)
    ids, labels = problem.ids, problem.labels.flatten()

    def step() -> tuple[Tensor, Tensor]:
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels)
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm

    return step


def make_dtensor(problem: Problem, mesh: DeviceMesh, *, sequence_parallel: bool = False, fused: bool = False) -> Step:
    """Create a step with the plan of torchtitan's Llama, with or without sequence parallelism.

    With sequence parallelism the sequence is the first dimension, so that gathering and scattering need no copies.
    Without it, norms stay plain parameters, which are faster than replicated DTensors.
    """
    sequence_dim = 0 if sequence_parallel else 1
    model = DenseLlama(problem.sizes, sequence_dim=sequence_dim, fused=fused)
    model.load(problem.weights, num_ranks=mesh.size())
    _parallelize_(model, mesh, Shard(sequence_dim) if sequence_parallel else None)
    matrices, norms = split_parameters(model)
    optimizer = make_adamw(matrices, norms)
    ids, labels = problem.ids, problem.labels
    if sequence_parallel:
        ids, labels = ids.t().contiguous(), labels.t()
    labels = labels.flatten()

    def step() -> tuple[Tensor, Tensor]:
        with loss_parallel():
            loss = F.cross_entropy(model(ids).flatten(0, 1), labels)
            loss.backward()
        norm = _clip_dtensor_gradients_(matrices, norms)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm

    return step


def _parallelize_(model: DenseLlama, mesh: DeviceMesh, sequence: Shard | None) -> None:
    """Split the model; ``sequence`` is the placement between the parallel layers, None without sequence parallelism."""
    between = Replicate() if sequence is None else sequence
    # One style per input, so that queries, keys and values share one reduction of their input's gradient.
    prepare = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
    plan: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "output": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
        "layers.*.attention": prepare,
        "layers.*.feed_forward": prepare,
        "layers.*.attention.wo": RowwiseParallel(output_layouts=between),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=between),
    }
    columns = ["attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"]
    if model.fused:
        columns = ["attention.wqkv", "feed_forward.w13"]
    plan |= {f"layers.*.{name}": ColwiseParallel() for name in columns}
    if sequence is not None:
        for name in ("layers.*.attention_norm", "layers.*.ffn_norm", "norm"):
            plan[name] = SequenceParallel(sequence_dim=sequence.dim)
    parallelize_module(model, mesh, plan)
    model.tie()


def _clip_dtensor_gradients_(matrices: list[Parameter], norms: list[Parameter]) -> Tensor:
    """Clip like ``clip_grad_norm_``, which does not accept a mixture of DTensors and plain tensors."""
    for param in (*matrices, *norms):
        # The embedding's gradient is whole, and the gradients of sequence-parallel norms are partial sums. They are
        # redistributed to their parameters' placements once here, and not again by each later use.
        if isinstance(param, DTensor) and isinstance(param.grad, DTensor) and param.grad.placements != param.placements:
            param.grad = param.grad.redistribute(placements=param.placements)
    return clip_together_([matrices, norms])
