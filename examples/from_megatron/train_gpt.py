"""A program written for Megatron: train a small GPT for five steps, save it and load it again.

    export OMP_NUM_THREADS=1
    torchrun --nproc-per-node 4 examples/from_megatron/train_gpt.py --tp 2 --pp 2 --checkpoint CHECKPOINT

Only the first two lines of code name Shardwise; all other imports are Megatron's. The losses are the same in every
layout, and a checkpoint can be loaded in any other layout:

    torchrun --nproc-per-node 2 examples/from_megatron/train_gpt.py --tp 2 --load CHECKPOINT
"""

# ruff: noqa: E402 - the imports below find what install() puts in place
import shardwise.megatron

shardwise.megatron.install()

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.tokenizers import MegatronTokenizer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.data import DataLoader

SEQUENCE_LENGTH, VOCABULARY = 32, 64
# Sizes of a global batch, over all data-parallel ranks.
MICRO_BATCHES, MICRO_BATCH_SIZE = 4, 2


def make_model(tp: int, pp: int, dropout: float) -> DistributedDataParallel:
    """Make this rank's part of the model; its gradients are averaged over data-parallel ranks."""
    config = TransformerConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
        num_layers=2,
        hidden_size=24,
        num_attention_heads=4,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        sequence_parallel=tp > 1,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCABULARY,
        SEQUENCE_LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)
    wrapped = DistributedDataParallel(config, ddp_config, model)
    # All micro-batches but the last only accumulate; the schedule completes the gradients at its end.
    config.no_sync_func = wrapped.no_sync
    config.finalize_model_grads_func = finalize_model_grads
    return wrapped


def micro_batches() -> Iterator[dict[str, Tensor]]:
    """Return this data-parallel rank's samples of each global batch, in order."""
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=SEQUENCE_LENGTH,
        tokenizer=MegatronTokenizer.from_pretrained(metadata_path={"library": "null-text"}, vocab_size=VOCABULARY),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    samples, _, _ = BlendedMegatronDatasetBuilder(MockGPTDataset, [1000, None, None], lambda: True, config).build()
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    # The global batch is the same in every layout; its micro-batches are distributed over the ranks.
    own = [index for index in range(1000) if index // MICRO_BATCH_SIZE % size == rank]
    return iter(DataLoader(torch.utils.data.Subset(samples, own), batch_size=MICRO_BATCH_SIZE))


def forward_step(batches: Iterator[dict[str, Tensor]], model: DistributedDataParallel) -> tuple[Tensor, Callable]:
    """Run one micro-batch through this stage; return the output and the loss function."""
    batch = next(batches)
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])

    def loss_of(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = (losses * loss_mask).sum() / loss_mask.sum()
        return loss, {"loss": loss.detach()}

    return output, partial(loss_of, batch["loss_mask"])


def train(
    tp: int, pp: int, steps: int = 5, load: str | None = None, save: str | None = None, dropout: float = 0.0
) -> list[float]:
    """Train, and return the mean loss of each step on every rank."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, pp)
    model_parallel_cuda_manual_seed(123)
    torch.manual_seed(123)
    model = make_model(tp, pp, dropout)
    state = {"model": model.module.sharded_state_dict(), "steps": steps}
    if load is not None:
        loaded = dist_checkpointing.load(state, load)
        model.load_state_dict(loaded["model"])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches, step = micro_batches(), get_forward_backward_func()
    losses = []
    for _ in range(steps):
        model.zero_grad_buffer()
        results = step(
            forward_step_func=forward_step,
            data_iterator=batches,
            model=model,
            num_microbatches=MICRO_BATCHES // parallel_state.get_data_parallel_world_size(),
            seq_length=SEQUENCE_LENGTH,
            micro_batch_size=MICRO_BATCH_SIZE,
        )
        optimizer.step()
        # The last stage has the losses; the all-reduce gives their mean to all ranks.
        total = sum((result["loss"] for result in results), torch.zeros(()))
        dist.all_reduce(total)
        losses.append(float(total) / (tp * MICRO_BATCHES))
    if save is not None:
        dist_checkpointing.save(state, save)
    parallel_state.destroy_model_parallel()
    return losses


def main() -> None:
    """Run on a rank that ``torchrun`` started."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tp", type=int, default=1, help="ranks that split each layer")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--load", help="folder of a checkpoint to begin with")
    parser.add_argument("--checkpoint", help="folder to save into")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    losses = train(arguments.tp, arguments.pp, load=arguments.load, save=arguments.checkpoint)
    if dist.get_rank() == 0:
        print("losses", *(f"{loss:.4f}" for loss in losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
