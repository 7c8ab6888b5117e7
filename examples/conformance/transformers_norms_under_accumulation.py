"""Gradients of the norms of queries and keys under tensor parallelism and gradient accumulation, in ``transformers``.

The plan of Qwen 3 sums these gradients over the ranks by a hook on ``param.grad``. The hook runs after every backward:
the first micro-batch's sum is summed again together with the second one's.
"""

import os
import shutil
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

BATCHES = 2


def make() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        initializer_range=0.5,
    )
    return Qwen3ForCausalLM(config).double()


def gradient(model: Qwen3ForCausalLM) -> torch.Tensor:
    """Return the gradient of a query norm after all micro-batches."""
    torch.manual_seed(1)
    for _ in range(BATCHES):
        ids = torch.randint(32, (2, 8))
        model(input_ids=ids, labels=ids).loss.backward()
    return model.model.layers[0].self_attn.q_norm.weight.grad


def run(rank: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ.setdefault("MASTER_PORT", "29613")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    expected = gradient(make())
    parallel = Qwen3ForCausalLM.from_pretrained(
        folder, dtype=torch.float64, distributed_config=DistributedConfig(tp_size=2)
    )
    found = gradient(parallel.train())
    ratio = (found.norm() / expected.norm()).item()
    if rank == 0:
        print("one rank  ", [round(each, 6) for each in expected.tolist()])
        print("two ranks ", [round(each, 6) for each in found.tolist()])
        print(f"the norm of the gradient is {ratio:.3f} times as large")
    dist.destroy_process_group()
    sys.exit(abs(ratio - 1) > 1e-3)


if __name__ == "__main__":
    path = tempfile.mkdtemp()
    make().save_pretrained(path)
    try:
        mp.spawn(run, (path,), nprocs=2)
    except mp.ProcessExitedException:
        sys.exit(1)
    finally:
        shutil.rmtree(path)
