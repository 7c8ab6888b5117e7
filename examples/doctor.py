"""Record a small model that PyTorch's DTensor splits over ranks, for ``shardwise doctor``.

One rank, and the same with other rounding; then two ranks; then the diagnosis::

    python examples/doctor.py recordings/one
    python examples/doctor.py recordings/rounding --perturb
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/doctor.py recordings/parallel
    shardwise doctor recordings/one recordings/parallel --rounding recordings/rounding

With ``--wrong``, one layer's output stays a partial sum, as with a wrong entry in a plan.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardwise.doctor import record


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--perturb", action="store_true")
    parser.add_argument("--wrong", action="store_true")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 32), *(Block(32) for _ in range(3)), nn.Linear(32, 50))
    mesh = None
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        for number in range(1, 4):
            wrong = arguments.wrong and number == 2
            # The input is the same on every rank, and its gradient is summed.
            plan = {
                "up": ColwiseParallel(input_layouts=Replicate()),
                "down": RowwiseParallel(output_layouts=Partial() if wrong else Replicate()),
            }
            parallelize_module(model[number], mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    recorder = record(model, arguments.folder, optimizer=optimizer, axes=mesh, perturb=1 if arguments.perturb else None)
    for step in range(2):
        ids = torch.randint(50, (4, 16), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        recorder.gradients()
        optimizer.step()
    if mesh is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
