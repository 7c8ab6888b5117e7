"""The loss of bf16 logits is rounded to bf16: with ``loss_parallel``, and in ``cross_entropy`` on one rank.

A loss near 20 is then a multiple of 0.125. torchtitan converts the logits to fp32 first.
Report: Modalities/modalities#464.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel


def run(rank: int) -> None:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ.setdefault("MASTER_PORT", "29611")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    logits, labels = (torch.randn(6, 8) * 10).bfloat16(), torch.randint(8, (6,))
    with loss_parallel():
        losses = F.cross_entropy(distribute_tensor(logits, mesh, [Shard(1)]), labels, reduction="none")
    losses = losses.to_local().float()
    expected = F.cross_entropy(logits.float(), labels, reduction="none")
    difference = (losses - expected).abs().max().item()
    if rank == 0:
        print("losses   ", losses.tolist())
        print("expected ", [round(each, 4) for each in expected.tolist()])
        print(f"largest difference {difference:.3f}")
    dist.destroy_process_group()
    sys.exit(difference > 1e-3)


if __name__ == "__main__":
    try:
        mp.spawn(run, nprocs=2)
    except mp.ProcessExitedException:
        sys.exit(1)
