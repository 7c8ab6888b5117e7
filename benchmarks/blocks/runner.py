"""The object in a rank's process: compares and times the candidates of one block."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from ranks import NUM_RANKS, join_ranks, leave_ranks, seconds_of
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from blocks.bare import make_bare
from blocks.candidates import make_dtensor, make_ours
from blocks.problem import BlockSizes, Candidate, Problem
from shardwise.core.initialization import Normal
from shardwise.megatron.config import ModelParallelConfig
from shardwise.tensor_parallel.layers import ColumnParallelLinear

CANDIDATES = ("ours", "dtensor", "bare")
LINEARS = ("ColumnParallelLinear", "F.linear")

SEED = 1234
# Enough to warm up the caches and the allocator if a step takes a millisecond or two.
_STEPS_PER_WARMUP_STEP = 10


class Runner:
    """A rank and its current candidates.

    Args:
        store: file through which the ranks connect.
        rank: this rank.
    """

    def __init__(self, store: str, rank: int) -> None:
        self._topology = join_ranks(store, rank)
        self._mesh = init_device_mesh("cpu", (NUM_RANKS,))
        self._candidates: dict[str, Candidate] = {}
        self._linears: dict[str, Callable[[], object]] = {}

    def compare(self, block: str, sizes: BlockSizes, sequence_parallel: bool) -> dict[str, dict[str, float]]:
        """Create the candidates of a block, discard the previous ones, and compare the results.

        Returns:
            ``differences`` between the candidates on this rank.
        """
        self._candidates = {}
        problem = Problem.draw(block, sizes, SEED)
        group = self._topology.group("tp")
        self._candidates = {
            "ours": make_ours(problem, group, sequence_parallel=sequence_parallel),
            "dtensor": make_dtensor(problem, self._mesh, sequence_parallel=sequence_parallel),
            "bare": make_bare(problem, group, sequence_parallel=sequence_parallel),
        }
        results = {}
        for name, candidate in self._candidates.items():
            # The state after one step must not change the results of the next.
            candidate.step()
            results[name] = candidate.results()
        return differences(results)

    def time_steps(self, name: str, num_steps: int) -> float:
        """Return the seconds that a candidate's next steps take on this rank, starting when all ranks are ready."""
        num_warmup_steps = max(1, num_steps // _STEPS_PER_WARMUP_STEP)
        return seconds_of(self._candidates[name].step, num_steps, num_warmup_steps=num_warmup_steps, together=True)

    def make_linears(self, num_tokens: int, width: int) -> None:
        """Create a square linear layer on one rank, with and without Shardwise, for ``num_tokens`` rows."""
        layer = ColumnParallelLinear(
            width, width, config=ModelParallelConfig(), init_method=Normal(0.02), tp_group=self._topology.group("dp")
        )
        input_ = torch.randn(num_tokens, 1, width, requires_grad=True)
        weight, bias = layer.weight, layer.bias
        assert weight is not None
        self._linears = dict(zip(LINEARS, (lambda: layer(input_), lambda: F.linear(input_, weight, bias)), strict=True))

    def time_linear(self, name: str, num_calls: int) -> float:
        """Return the seconds that the next forward passes of a linear layer take."""
        return seconds_of(self._linears[name], num_calls, num_warmup_steps=num_calls // _STEPS_PER_WARMUP_STEP)

    def close(self) -> None:
        """Leave the process groups."""
        self._candidates, self._linears = {}, {}
        leave_ranks(self._topology)


def differences(results: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, float]]:
    """Measure the differences between candidates.

    Args:
        results: tensors of each candidate, by name.

    Returns:
        For each candidate except the first, and each tensor of it or of the first: the norm of the difference, relative
        to the norm of the first candidate's tensor; infinite if one of them lacks the tensor or the shapes differ.
    """
    (_, expected), *others = results.items()
    return {
        candidate: {
            name: _relative_difference(tensors.get(name), expected.get(name))
            for name in dict.fromkeys((*expected, *tensors))
        }
        for candidate, tensors in others
    }


def _relative_difference(actual: Tensor | None, expected: Tensor | None) -> float:
    if actual is None or expected is None or actual.shape != expected.shape:
        return torch.inf
    norm = torch.linalg.vector_norm
    return float(norm((actual - expected).double()) / norm(expected.double()))
