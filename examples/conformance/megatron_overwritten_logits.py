"""fp32 logits after the loss over a split vocabulary, in Megatron Core: they hold the softmax.

A program that uses its logits again, for an entropy or a second loss, gets others. A related report is
NVIDIA/TransformerEngine#3193, about a loss that stored its gradient in its input.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy


def run(rank: int) -> None:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ.setdefault("MASTER_PORT", "29616")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(2)
    torch.manual_seed(0)
    logits = torch.randn(1, 1, 8).chunk(2, -1)[rank].contiguous()
    before = logits.clone()
    vocab_parallel_cross_entropy(logits, torch.tensor([[3]]))
    print(f"rank {rank}: before {before.flatten().tolist()}, after {logits.flatten().tolist()}")
    dist.destroy_process_group()
    sys.exit(not torch.equal(before, logits))


if __name__ == "__main__":
    try:
        mp.spawn(run, nprocs=2, join=False).join(grace_period=5)
    except mp.ProcessExitedException:
        sys.exit(1)
