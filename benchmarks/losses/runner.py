"""The object in a rank's process: checks the candidates of one contest, and measures their time and memory."""

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
    """A rank and its current candidates.

    Args:
        store: file through which the ranks connect.
        rank: this rank.
    """

    def __init__(self, store: str, rank: int) -> None:
        self._topology = join_ranks(store, rank)
        self._mesh = init_device_mesh("cpu", (NUM_RANKS,))
        self._candidates: dict[str, Candidate] = {}
        self._group: ProcessGroup = self._topology.group("tp")

    def make(self, contest: str, dtype: str, sizes: LossSizes) -> dict[str, float]:
        """Create the candidates of ``contest``, and discard the previous ones.

        Returns:
            Each candidate's largest error, relative to the largest gradient, without lower bounds.
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
            # Not at the top, because only this branch needs it.
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
        """Return wall and processor seconds per step of a candidate on this rank, starting when all ranks are ready."""
        candidate = self._candidates[name]
        # Warm up, because the caches are filled by another candidate.
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
        """Return the peak memory of a step beyond its start, including results, in bytes; None if it is unknown."""
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
    """Reset the peak to the current memory, and return it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return _status("VmRSS")


def _status(name: str) -> int | None:
    """Return a size in bytes from Linux's status of this process."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":")), None)
