"""Cross entropy over a split vocabulary, step by step.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 examples/mpu_walkthrough/cross_entropy.py

No rank ever has all logits of a token. Per token, the ranks exchange only three numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from by_rank import by_rank, four_ranks, print_once, row
from torch import Tensor

from shardwise import parallel_state
from shardwise.core.communication.collectives import all_reduce
from shardwise.core.sharding import balanced_range
from shardwise.tensor_parallel import vocab_parallel_cross_entropy

# Three tokens; seven ids on two ranks: four and three.
VOCABULARY = 7
LOGITS = torch.tensor(
    [
        [0.5, 2.0, -1.0, 0.0, 1.5, 3.0, -0.5],
        [4.0, 1.0, 0.0, 2.5, -2.0, 0.5, 1.0],
        [-1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0],
    ]
)
TARGETS = torch.tensor([1, 3, 6])


@dataclass(frozen=True)
class Steps:
    """Intermediate results on one rank; each tensor is ``[tokens]``.

    Attributes:
        first, last: range of the ids whose logits this rank has, ``last`` excluded.
        local_max, global_max: largest logit on this rank and on all ranks.
        masked_target: index of the target among this rank's logits; -1 where another rank has it.
        local_predicted, predicted: target's logit minus the maximum, 0 where another rank has it; its sum over ranks.
        local_sum_exp, sum_exp: sum of exp(logit - maximum) over this rank's logits and over all logits.
        loss: logarithm of ``sum_exp`` minus ``predicted``.
        library_loss: loss from ``vocab_parallel_cross_entropy``.
    """

    first: int
    last: int
    local_max: Tensor
    global_max: Tensor
    masked_target: Tensor
    local_predicted: Tensor
    predicted: Tensor
    local_sum_exp: Tensor
    sum_exp: Tensor
    loss: Tensor
    library_loss: Tensor


def experiment() -> Steps:
    """Compute the loss of the three tokens step by step and with the library."""
    group = parallel_state.get_tensor_model_parallel_group()
    first, last = balanced_range(VOCABULARY, group.size(), group.rank())
    logits = LOGITS[:, first:last]
    local_max = logits.amax(dim=-1)
    global_max = all_reduce(local_max, group=group, op=dist.ReduceOp.MAX)
    shifted = logits - global_max[:, None]
    is_mine = (first <= TARGETS) & (last > TARGETS)
    masked_target = torch.where(is_mine, TARGETS - first, -1)
    at_target = shifted.gather(-1, masked_target.clamp(min=0)[:, None])[:, 0]
    local_predicted = torch.where(is_mine, at_target, 0.0)
    predicted = all_reduce(local_predicted, group=group)
    local_sum_exp = shifted.exp().sum(dim=-1)
    sum_exp = all_reduce(local_sum_exp, group=group)
    return Steps(
        first=first,
        last=last,
        local_max=local_max,
        global_max=global_max,
        masked_target=masked_target,
        local_predicted=local_predicted,
        predicted=predicted,
        local_sum_exp=local_sum_exp,
        sum_exp=sum_exp,
        loss=sum_exp.log() - predicted,
        library_loss=vocab_parallel_cross_entropy(logits[:, None], TARGETS[:, None], vocab_size=VOCABULARY)[:, 0],
    )


def lines(steps: Steps) -> list[str]:
    """Return this rank's lines of the output."""
    expected = F.cross_entropy(LOGITS, TARGETS, reduction="none")
    equal = torch.allclose(steps.loss, expected) and torch.allclose(steps.library_loss, expected)
    return [
        f"has the logits of ids {steps.first} to {steps.last - 1} of {VOCABULARY}",
        *(f"token {n}: {row(part)}" for n, part in enumerate(LOGITS[:, steps.first : steps.last])),
        f"local max               {row(steps.local_max)}",
        f"global max              {row(steps.global_max)}",
        f"target                  {row(TARGETS)}",
        f"target among mine       {row(steps.masked_target)}",
        f"predicted logit, mine   {row(steps.local_predicted)}",
        f"predicted logit, summed {row(steps.predicted)}",
        f"sum of exp, mine        {row(steps.local_sum_exp)}",
        f"sum of exp, summed      {row(steps.sum_exp)}",
        f"loss                    {row(steps.loss)}",
        f"library's loss          {row(steps.library_loss)}",
        f"equal to torch.nn.functional.cross_entropy: {equal}",
    ]


def main() -> None:
    """Run on this rank."""
    with four_ranks():
        print_once(by_rank(lines(experiment())))


if __name__ == "__main__":
    main()
