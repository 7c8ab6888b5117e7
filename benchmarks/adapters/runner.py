"""The object in a worker process: runs and times the variants by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from ranks import COLLECTIVE_TIMEOUT, NUM_RANKS, join_ranks, leave_ranks, seconds_of
from steps.problem import Step

from adapters.finetune_steps import make_ours, make_peft
from adapters.problem import Files, FinetuneSizes, draw_batch, quiet
from shardwise.core.topology import Topology

RANK_VARIANTS = ("ours", "tp_plan")
SINGLE_VARIANTS = ("ours_single", "peft_single")
SEED = 1234


class FinetuneRunner:
    """The variants that a worker can run.

    Args:
        store: file through which the ranks connect.
        rank: this rank.
        num_ranks: number of ranks that share the file.
    """

    def __init__(self, store: str, rank: int, num_ranks: int) -> None:
        if num_ranks == NUM_RANKS:
            self._topology = join_ranks(store, rank)
        else:
            one = dist.FileStore(store, num_ranks)  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=one, rank=rank, world_size=num_ranks, timeout=COLLECTIVE_TIMEOUT)
            self._topology = Topology.create(tp=num_ranks, timeout=COLLECTIVE_TIMEOUT)
        self._steps: dict[str, Step] = {}

    def prepare(self, sizes: FinetuneSizes, files: Files, variants: Sequence[str]) -> None:
        """Create the variants, and discard the previous ones."""
        batch = draw_batch(sizes, SEED)
        self._steps = {}
        for variant in variants:
            if variant.startswith("ours"):
                self._steps[variant] = make_ours(files, batch, self._topology)
                continue
            options = {"tp_plan": "auto"} if variant == "tp_plan" else {}
            with quiet():
                self._steps[variant] = make_peft(files, batch, **options)

    def run_steps(self, variant: str, num_steps: int) -> list[tuple[float, float]]:
        """Run the next steps and return the loss and the gradient norm of each."""
        results = [self._steps[variant]() for _ in range(num_steps)]
        return [(float(loss), float(norm)) for loss, norm in results]

    def time_steps(self, variant: str, num_steps: int) -> float:
        """Return the seconds that the next steps take on this rank, starting when all ranks are ready."""
        return seconds_of(self._steps[variant], num_steps, together=True)

    def close(self) -> None:
        """Leave the process groups."""
        self._steps = {}
        leave_ranks(self._topology)
