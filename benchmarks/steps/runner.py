"""The object in a worker process: runs and times the variants by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ranks import NUM_RANKS, join_ranks, leave_ranks, seconds_of
from torch.distributed.device_mesh import init_device_mesh

from shardwise.core.topology import Topology
from shardwise.kernels.host_memory import keep_freed_memory
from steps.baselines import make_dtensor, make_single, whole
from steps.problem import LlamaSizes, Problem, Step
from steps.raw_collectives import make_raw
from steps.shardwise_step import make_shardwise
from steps.transformers_steps import make_by_plan, make_by_transformers

RANK_VARIANTS = (
    *("ours", "ours_sp", "dtensor", "dtensor_sp", "dtensor_fused", "dtensor_sp_fused", "raw"),
    # A model of transformers, split by its plan.
    *("by_plan", "by_transformers"),
)
SINGLE_VARIANTS = ("single", "single_passive", "single_fused")

SEED = 1234

Maker = Callable[[Problem], Step]


class Runner:
    """A worker and its current variants.

    Args:
        store: file through which the ranks connect; None for the single process.
        rank: this rank.
        keep_freed: whether the process keeps the memory that it frees, as a run of ``shardwise train`` does.
    """

    def __init__(self, store: str | None, rank: int = 0, keep_freed: bool = False) -> None:
        if keep_freed:
            keep_freed_memory()
        self._topology: Topology | None = None
        self._makers: dict[str, Maker] = {
            "single": make_single,
            "single_passive": make_single,
            "single_fused": lambda problem: make_single(problem, fused=True),
        }
        if store is not None:
            self._topology = join_ranks(store, rank)
            self._makers = _rank_makers(self._topology)
        self._steps: dict[str, Step] = {}

    def prepare(self, sizes: LlamaSizes, variants: Sequence[str]) -> int:
        """Create the variants of a model, discard the previous ones, and return the number of parameters."""
        self._steps = {}
        problem = Problem.draw(sizes, SEED)
        for variant in variants:
            self._steps[variant] = self._makers[variant](problem)
        return sum(weight.numel() for weight in problem.weights.values())

    def run_steps(self, variant: str, num_steps: int) -> list[tuple[float, float]]:
        """Run the next steps and return the loss and the gradient norm of each."""
        results = [self._steps[variant]() for _ in range(num_steps)]
        return [(float(whole(loss)), float(whole(norm))) for loss, norm in results]

    def time_steps(self, variant: str, num_steps: int) -> float:
        """Return the seconds that the next steps take on this rank, starting when all ranks are ready."""
        return seconds_of(self._steps[variant], num_steps, together=self._topology is not None)

    def close(self) -> None:
        """Leave the process groups."""
        self._steps = {}
        if self._topology is not None:
            leave_ranks(self._topology)


def _rank_makers(topology: Topology) -> dict[str, Maker]:
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    return {
        "ours": lambda problem: make_shardwise(problem, topology),
        "ours_sp": lambda problem: make_shardwise(problem, topology, sequence_parallel=True),
        "dtensor": lambda problem: make_dtensor(problem, mesh),
        "dtensor_sp": lambda problem: make_dtensor(problem, mesh, sequence_parallel=True),
        "dtensor_fused": lambda problem: make_dtensor(problem, mesh, fused=True),
        "dtensor_sp_fused": lambda problem: make_dtensor(problem, mesh, sequence_parallel=True, fused=True),
        "raw": lambda problem: make_raw(problem, topology.group("tp")),
        "by_plan": lambda problem: make_by_plan(problem, topology),
        "by_transformers": make_by_transformers,
    }
