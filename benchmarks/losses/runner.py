"""What a rank runs: the candidates of one contest, compared, timed and weighed on demand."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import torch.distributed as dist
import torch.nn.functional as F
from ranks import NUM_RANKS, join_ranks, leave_ranks
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

from losses import from_logits
from losses.exact import ExactGradients
from losses.problem import DTYPES, Candidate, LossSizes, Problem

SEED = 1234


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
        self._group: ProcessGroup = self._topology.group("tp")

    def make(self, contest: str, dtype: str, sizes: LossSizes) -> dict[str, float]:
        """Make the candidates of ``contest`` in place of the last ones.

        Returns:
            Each candidate's largest error, relative to the largest gradient; limits have none.
        """
        self._candidates = {}
        one_rank = contest == "one_rank"
        self._group = self._topology.group("dp" if one_rank else "tp")
        rank, num_ranks = self._group.rank(), self._group.size()
        problem = Problem.draw(sizes, DTYPES[dtype], rank, num_ranks, SEED)
        if contest == "logits":
            self._candidates = from_logits.make_candidates(problem, self._group, self._mesh)
            logits = from_logits.make_logits(problem)
            error_of = ExactGradients(problem, lambda rows: logits[rows].double(), self._group).logits_error
        else:
            # Needed here only.
            from losses import with_head

            if one_rank:
                self._candidates = with_head.make_one_rank_candidates(problem, self._group)
            else:
                self._candidates = with_head.make_candidates(problem, self._group, self._mesh)
            weight = problem.weight.float()
            error_of = ExactGradients(
                problem, lambda rows: F.linear(problem.hidden[rows].float(), weight), self._group
            ).head_error
        errors = {}
        for name, candidate in self._candidates.items():
            candidate.prepare()
            gradients = candidate.step()
            if gradients:
                errors[name] = error_of(gradients)
        return errors

    def time_steps(self, name: str, num_steps: int) -> tuple[float, float]:
        """Wall and processor seconds of a step of a candidate on this rank, from when all ranks are ready."""
        candidate = self._candidates[name]
        # Another candidate had the caches.
        candidate.prepare()
        candidate.step()
        gc.collect()
        gc.disable()
        wall = processor = 0.0
        for _ in range(num_steps):
            candidate.prepare()
            dist.barrier(self._group)
            processor -= time.process_time()
            wall -= time.perf_counter()
            candidate.step()
            wall += time.perf_counter()
            processor += time.process_time()
        gc.enable()
        return wall / num_steps, processor / num_steps

    def extra_bytes(self, name: str) -> int | None:
        """What a step takes beyond what it starts with at its peak, results included; None if that cannot be told."""
        candidate = self._candidates[name]
        candidate.prepare()
        candidate.step()
        candidate.prepare()
        gc.collect()
        before = _reset_peak()
        kept = candidate.step()
        after = _status("VmHWM")
        del kept
        return None if before is None or after is None else max(0, after - before)

    def close(self) -> None:
        """Leave the process groups."""
        self._candidates = {}
        leave_ranks(self._topology)


def _reset_peak() -> int | None:
    """Make the present memory the peak, and return it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return _status("VmRSS")


def _status(name: str) -> int | None:
    """Bytes that Linux knows of this process."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":")), None)
