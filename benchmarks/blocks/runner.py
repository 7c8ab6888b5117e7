"""What a rank runs: the candidates of one block, compared and timed on demand."""

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
# Enough for the caches and the allocator to settle where a step takes a millisecond or two.
_STEPS_PER_WARMUP_STEP = 10


class Runner:
    """What a worker holds: its rank, and the candidates made last.

    Args:
        store: file through which the ranks meet.
        rank: this rank.
    """

    def __init__(self, store: str, rank: int) -> None:
        self._topology = join_ranks(store, rank)
        self._mesh = init_device_mesh("cpu", (NUM_RANKS,))
        self._candidates: dict[str, Candidate] = {}
        self._linears: dict[str, Callable[[], object]] = {}

    def compare(self, block: str, sizes: BlockSizes, sequence_parallel: bool) -> dict[str, dict[str, float]]:
        """Make the candidates of a block in place of those of the last one, and compare what they compute.

        Returns:
            ``differences`` between them on this rank.
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
            # What a step leaves behind must not change the next one.
            candidate.step()
            results[name] = candidate.results()
        return differences(results)

    def time_steps(self, name: str, num_steps: int) -> float:
        """Seconds that the next steps of a candidate take on this rank, from when all ranks are ready."""
        num_warmup_steps = max(1, num_steps // _STEPS_PER_WARMUP_STEP)
        return seconds_of(self._candidates[name].step, num_steps, num_warmup_steps=num_warmup_steps, together=True)

    def make_linears(self, num_tokens: int, width: int) -> None:
        """Make one linear layer on one rank, with Shardwise and without; ``num_tokens`` rows, square weight."""
        layer = ColumnParallelLinear(
            width, width, config=ModelParallelConfig(), init_method=Normal(0.02), tp_group=self._topology.group("dp")
        )
        input_ = torch.randn(num_tokens, 1, width, requires_grad=True)
        weight, bias = layer.weight, layer.bias
        assert weight is not None
        self._linears = dict(zip(LINEARS, (lambda: layer(input_), lambda: F.linear(input_, weight, bias)), strict=True))

    def time_linear(self, name: str, num_calls: int) -> float:
        """Seconds that the next forwards of a linear layer take."""
        return seconds_of(self._linears[name], num_calls, num_warmup_steps=num_calls // _STEPS_PER_WARMUP_STEP)

    def close(self) -> None:
        """Leave the process groups."""
        self._candidates, self._linears = {}, {}
        leave_ranks(self._topology)


def differences(results: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, float]]:
    """How far apart candidates are.

    Args:
        results: for each candidate, its tensors by name.

    Returns:
        For each candidate but the first, and each tensor of it or of the first: the norm of the difference to the
        first's, relative to the first's norm; infinite where only one of them has the tensor, or its shape is another.
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
