"""The output layer and the loss together: from hidden states to the gradients of hidden states and weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

from losses.problem import Candidate, Problem
from losses.reference import ReferenceCrossEntropy
from shardwise.core.communication import moves
from shardwise.nn.loss import vocab_parallel_cross_entropy
from shardwise.nn.loss.linear_cross_entropy import vocab_parallel_linear_cross_entropy

CANDIDATES = ("ours_local", "ours_chunked", "ours_plain", "dtensor", "reference", "three_gemms", "four_gemms")


def make_candidates(problem: Problem, group: ProcessGroup, mesh: DeviceMesh) -> dict[str, Candidate]:
    """Create all candidates for several ranks."""
    hidden, weight = (x.clone().requires_grad_() for x in (problem.hidden, problem.weight))
    target, start = problem.target, problem.start

    def plain(loss_of: Callable[[Tensor], Tensor]) -> Candidate:
        def loss() -> Tensor:
            return loss_of(F.linear(moves.copy(hidden, group=group), weight))

        return Candidate(lambda: torch.autograd.grad(loss(), (hidden, weight)))

    def dtensor() -> Sequence[Tensor]:
        placed = DTensor.from_local(hidden, mesh, [Replicate()]), DTensor.from_local(weight, mesh, [Shard(0)])
        with loss_parallel():
            loss = F.cross_entropy(F.linear(*placed), target, reduction="sum")
            grad_hidden, grad_weight = torch.autograd.grad(loss, placed)
        # The layers before the output layer would wait for the sum over the ranks.
        assert isinstance(grad_hidden, DTensor)
        return _local(grad_hidden.redistribute(placements=[Replicate()])), _local(grad_weight)

    return {
        **_ours(problem.sizes.vocab_size, hidden, weight, target, group),
        "ours_plain": plain(
            lambda x: vocab_parallel_cross_entropy(
                x, target, group=group, vocab_size=problem.sizes.vocab_size, reduction="sum", inplace_=True
            )
        ),
        "dtensor": Candidate(dtensor),
        "reference": plain(lambda x: ReferenceCrossEntropy.apply(x, target, start, group).sum()),
        "three_gemms": Candidate(_gemms(hidden.detach(), weight.detach(), num_forwards=1)),
        "four_gemms": Candidate(_gemms(hidden.detach(), weight.detach(), num_forwards=2)),
    }


def make_one_rank_candidates(problem: Problem, group: ProcessGroup) -> dict[str, Candidate]:
    """Create all candidates for one rank; ``group`` has only this rank."""
    hidden, weight = (x.clone().requires_grad_() for x in (problem.hidden, problem.weight))
    target = problem.target

    def separate() -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight), target, reduction="sum")

    def together() -> Tensor:
        # Missing in some versions of PyTorch.
        fused: Any = F.linear_cross_entropy
        loss: Tensor = fused(hidden, weight, target, reduction="sum")
        return loss

    losses = {"linear_and_cross_entropy": separate}
    if hasattr(F, "linear_cross_entropy"):
        losses["linear_cross_entropy"] = together
    theirs = {name: Candidate(partial(_gradients, loss, hidden, weight)) for name, loss in losses.items()}
    return _ours(problem.sizes.vocab_size, hidden, weight, target, group) | theirs


def _ours(vocab_size: int, hidden: Tensor, weight: Tensor, target: Tensor, group: ProcessGroup) -> dict[str, Candidate]:
    def loss(plan: Any, memory_budget: int) -> Tensor:
        return vocab_parallel_linear_cross_entropy(
            hidden,
            weight,
            target,
            group=group,
            vocab_size=vocab_size,
            reduction="sum",
            plan=plan,
            memory_budget=memory_budget,
        )

    # The first plan stores this rank's logits, the second only a slice. The goal leaves 16 MiB for this slice, another
    # slice in the bf16 product of the weight gradient, and two tensors of 4 MiB in the hidden gradient's reduction.
    budgets = {"local_logits": 1 << 40, "chunked": 4 << 20}
    return {
        "ours_" + plan.partition("_")[0]: Candidate(partial(_gradients, partial(loss, plan, budget), hidden, weight))
        for plan, budget in budgets.items()
    }


def _gradients(loss: Callable[[], Tensor], hidden: Tensor, weight: Tensor) -> Sequence[Tensor]:
    return torch.autograd.grad(loss(), (hidden, weight))


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def _gemms(hidden: Tensor, weight: Tensor, *, num_forwards: int) -> Callable[[], Sequence[Tensor]]:
    """Create a step with only the matrix products: logits, hidden gradient, weight gradient."""

    def step() -> Sequence[Tensor]:
        for _ in range(num_forwards):
            logits = F.linear(hidden, weight)
        torch.mm(logits, weight)
        torch.mm(logits.t(), hidden)
        return ()

    return step
