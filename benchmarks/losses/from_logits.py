"""The loss of given logits, which a candidate may overwrite."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

from losses.problem import Candidate, Problem
from losses.reference import ReferenceCrossEntropy
from shardwise.nn.loss import vocab_parallel_cross_entropy

CANDIDATES = ("ours", "dtensor", "reference", "limit")


def make_logits(problem: Problem) -> Tensor:
    """Return this rank's logits, ``[n, v/t]``."""
    return F.linear(problem.hidden, problem.weight)


def make_candidates(problem: Problem, group: ProcessGroup, mesh: DeviceMesh) -> dict[str, Candidate]:
    """Create all candidates, on one working copy of the logits that is restored before every step."""
    pristine = make_logits(problem)
    logits = pristine.clone().requires_grad_()
    target, start = problem.target, problem.start

    def restore() -> None:
        with torch.no_grad():
            logits.copy_(pristine)

    def candidate(loss_of: Callable[[Tensor], Tensor]) -> Candidate:
        return Candidate(lambda: torch.autograd.grad(loss_of(logits), logits), restore)

    def dtensor() -> Sequence[Tensor]:
        whole = DTensor.from_local(logits, mesh, [Shard(1)])
        with loss_parallel():
            loss = F.cross_entropy(whole, target, reduction="sum")
            return torch.autograd.grad(loss, logits)

    return {
        "ours": candidate(
            lambda x: vocab_parallel_cross_entropy(
                x, target, group=group, vocab_size=problem.sizes.vocab_size, reduction="sum", inplace_=True
            )
        ),
        "dtensor": Candidate(dtensor, restore),
        "reference": candidate(lambda x: ReferenceCrossEntropy.apply(x, target, start, group).sum()),
        "limit": Candidate(_two_reads_and_a_write(logits.detach()), restore),
    }


def _two_reads_and_a_write(logits: Tensor) -> Callable[[], Sequence[Tensor]]:
    """Create a step with the least memory traffic: the statistics read every logit before the gradient can start."""
    # Use words of four bytes for any dtype, so that nothing is converted.
    flat = logits.view(-1)
    words = flat[: flat.numel() * flat.element_size() // 4 * 4 // flat.element_size()].view(torch.float32)

    def step() -> Sequence[Tensor]:
        words.amax()
        words.amax()
        words.zero_()
        return ()

    return step
