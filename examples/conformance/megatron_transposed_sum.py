"""A sum over tensor-parallel ranks of a tensor that is not contiguous, in Megatron Core.

``_reduce`` sums a contiguous copy and returns the tensor that it was given. Report: NovaSky-AI/SkyRL#1886.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)


def run(rank: int) -> None:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ.setdefault("MASTER_PORT", "29614")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(2)
    # Rank 0 holds ones and rank 1 twos: the sum is 3.
    own = torch.full((4, 3), rank + 1.0)
    x = torch.zeros(3, 4, requires_grad=True)
    copy_to_tensor_model_parallel_region(x).backward(own.t())
    total = reduce_from_tensor_model_parallel_region(own.t().clone(memory_format=torch.preserve_format))
    print(f"rank {rank}: gradient of the copy {x.grad[0, 0]:g}, result of the sum {total[0, 0]:g}, both must be 3")
    dist.destroy_process_group()
    sys.exit(bool(x.grad[0, 0] != 3 or total[0, 0] != 3))


if __name__ == "__main__":
    try:
        mp.spawn(run, nprocs=2, join=False).join(grace_period=5)
    except mp.ProcessExitedException:
        sys.exit(1)
