"""``RowwiseParallel`` with an input that is split unevenly: seven features on three ranks.

``ColwiseParallel`` returns a local tensor of 3, 3 or 1 features, and ``RowwiseParallel`` takes each for a third of the
whole. Report: pytorch/pytorch#150336.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def run(rank: int) -> None:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ.setdefault("MASTER_PORT", "29612")
    dist.init_process_group("gloo", rank=rank, world_size=3)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 5))
    x = torch.randn(2, 4)
    expected = model(x).detach()
    parallelize_module(model, init_device_mesh("cpu", (3,)), {"0": ColwiseParallel(), "1": RowwiseParallel()})
    try:
        difference = (model(x) - expected).abs().max().item()
        print(f"rank {rank}: largest difference {difference:.3g}")
    except RuntimeError as error:
        difference = float("inf")
        print(f"rank {rank}: {str(error).splitlines()[0]}")
    dist.destroy_process_group()
    sys.exit(difference > 1e-5)


if __name__ == "__main__":
    try:
        mp.spawn(run, nprocs=3, join=False).join(grace_period=5)
    except mp.ProcessExitedException:
        sys.exit(1)
