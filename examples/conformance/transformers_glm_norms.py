"""Gradients of GLM-4.5's norms of queries and keys (``use_qk_norm``) under tensor parallelism in ``transformers``.

With ``use_qk_norm`` each rank applies these norms to its own heads. The plan of the model does not sum
their gradients: each rank is left with its own share.
"""

import os
import shutil
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig


def make() -> Glm4MoeForCausalLM:
    torch.manual_seed(0)
    config = Glm4MoeConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        use_qk_norm=True,
        first_k_dense_replace=1,
        initializer_range=0.5,
    )
    return Glm4MoeForCausalLM(config).double()


def gradient(model: Glm4MoeForCausalLM) -> torch.Tensor:
    """Return the gradient of a query norm."""
    torch.manual_seed(1)
    ids = torch.randint(32, (2, 8))
    model(input_ids=ids, labels=ids).loss.backward()
    return model.model.layers[0].self_attn.q_norm.weight.grad


def run(rank: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ.setdefault("MASTER_PORT", "29617")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    expected = gradient(make())
    parallel = Glm4MoeForCausalLM.from_pretrained(
        folder, dtype=torch.float64, distributed_config=DistributedConfig(tp_size=2)
    )
    found = gradient(parallel.train())
    total = found.clone()
    dist.all_reduce(total)
    print(f"rank {rank}:", [round(each, 6) for each in found.tolist()])
    if rank == 0:
        print("one rank:", [round(each, 6) for each in expected.tolist()])
        print("sum of the ranks:", [round(each, 6) for each in total.tolist()])
    difference = (found - expected).abs().max().item()
    dist.destroy_process_group()
    sys.exit(difference > 1e-4)


if __name__ == "__main__":
    path = tempfile.mkdtemp()
    make().save_pretrained(path)
    try:
        mp.spawn(run, (path,), nprocs=2, join=False).join(grace_period=5)
    except mp.ProcessExitedException:
        sys.exit(1)
    finally:
        shutil.rmtree(path)
