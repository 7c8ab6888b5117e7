"""Four ranks, tensor parallel 2 x pipeline parallel 2, that print one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise import parallel_state

TENSOR_PARALLEL, PIPELINE_PARALLEL = 2, 2


@contextmanager
def four_ranks() -> Iterator[None]:
    """Initialize ``torch.distributed`` from torchrun's environment, and the groups of the walk-through."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        parallel_state.initialize_model_parallel(TENSOR_PARALLEL, PIPELINE_PARALLEL)
        yield
        parallel_state.destroy_model_parallel()
    finally:
        dist.destroy_process_group()


def by_rank(lines: Iterable[str]) -> str:
    """Return all ranks' lines in rank order, each rank's under its place in the grid. Collective."""
    tensor_ranks = dist.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group())
    stage_ranks = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    place = (
        f"rank {dist.get_rank()}: tensor-parallel rank {parallel_state.get_tensor_model_parallel_rank()} of ranks "
        f"{tensor_ranks}, stage {parallel_state.get_pipeline_model_parallel_rank()} of ranks {stage_ranks}"
    )
    everything: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everything, "\n".join([place, *(f"  {line}" for line in lines)]))
    return "\n".join(everything)


def print_once(text: str) -> None:
    """Print on rank 0 only, so that the lines of four processes do not mix."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def row(tensor: Tensor) -> str:
    """Format a small tensor's numbers on one line."""
    if tensor.is_floating_point():
        return " ".join(f"{value:7.4f}" for value in tensor.flatten().tolist())
    return " ".join(f"{int(value):7d}" for value in tensor.flatten().tolist())
