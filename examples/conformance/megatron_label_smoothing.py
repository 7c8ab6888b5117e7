"""Label smoothing over a vocabulary that is split over two ranks, in Megatron Core.

The mean of the log probabilities is over this rank's ids, so that the losses differ between the ranks. The logarithm of
a probability that underflows is -inf. Reports: NVIDIA/Megatron-LM#737, #5522, #7464.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

SMOOTHING, VOCABULARY = 0.1, 8


def dense(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the losses; smoothing is spread over all ids but the label."""
    log_p = logits.double().log_softmax(-1)
    own = log_p.gather(-1, labels[..., None])[..., 0]
    return -(1 - SMOOTHING) * own - SMOOTHING * (log_p.sum(-1) - own) / (VOCABULARY - 1)


def run(rank: int) -> None:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ.setdefault("MASTER_PORT", "29615")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(2)
    torch.manual_seed(0)
    differences = []
    for scale in (1.0, 1000.0):
        logits, labels = torch.randn(3, 1, VOCABULARY) * scale, torch.randint(VOCABULARY, (3, 1))
        losses = vocab_parallel_cross_entropy(logits.chunk(2, -1)[rank].clone(), labels, SMOOTHING)
        expected = dense(logits, labels)
        differences.append((losses - expected).abs().max().item() / scale)
        found, must = ([round(each, 3) for each in values.flatten().tolist()] for values in (losses, expected))
        print(f"rank {rank}, logits of about {scale:g}: losses {found}, and must be {must}")
    dist.destroy_process_group()
    sys.exit(not max(differences) < 1e-3)


if __name__ == "__main__":
    try:
        mp.spawn(run, nprocs=2, join=False).join(grace_period=5)
    except mp.ProcessExitedException:
        sys.exit(1)
