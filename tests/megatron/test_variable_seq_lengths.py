"""A program of Megatron with ``variable_seq_lengths`` trains on micro-batches of different lengths as on one rank."""

import pytest
import torch
from harness.parity import assert_close_to
from training.pipeline.pipelines import VOCAB, staged_gpt
from training.pipeline.test_pipeline_gradients import assert_gradients_of

from shardwise import parallel_state
from shardwise.megatron.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from shardwise.megatron.packed_seq_params import PackedSeqParams
from shardwise.megatron.schedules import get_forward_backward_func
from shardwise.megatron.utils import get_batch_on_this_cp_rank

PACKED = [(3, 5, 1), (11,), (2, 2, 4, 2), (1,)]
"""Lengths of the sequences in each micro-batch's row."""
WHOLE = [(2, 8), (1, 4), (3, 8), (2, 4)]
"""Sizes of micro-batches whose sequences two context-parallel ranks can share."""


def packed_batches():
    generator = torch.Generator().manual_seed(5)
    for lengths in PACKED:
        ids, labels = torch.randint(VOCAB, (2, 1, sum(lengths)), generator=generator)
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        yield {"ids": ids, "labels": labels}, PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts)


def whole_batches():
    generator = torch.Generator().manual_seed(5)
    for b, s in WHOLE:
        ids, labels = torch.randint(VOCAB, (2, b, s), generator=generator)
        yield {"ids": ids, "labels": labels, "positions": torch.arange(s).expand(b, s)}, None


def forward_step(data_iterator, model):
    batch, packed = next(data_iterator)
    num_tokens = batch["ids"].numel()
    ids = batch["ids"]
    if parallel_state.get_context_parallel_world_size() > 1:
        batch = get_batch_on_this_cp_rank(batch)
        ids = batch["ids"]
    elif not model.module.pre_process and num_tokens > 9:
        # As programs that do not pack rows for later stages: no ids, or others, which some ranks' parts would fit.
        ids = None if num_tokens == 10 else ids[:, :-1]
    output = model(ids, batch.get("positions"), None, labels=batch["labels"], packed_seq_params=packed)
    return output, lambda losses: (losses.sum() / num_tokens, losses.detach().sum())


def run(staged, batches, **options):
    """One call with lengths that are no micro-batch's; the sums of losses on the last stage."""
    wrapped = [DistributedDataParallel(each.config, DistributedDataParallelConfig(), each) for each in staged.chunks]
    iterators = [batches() for _ in wrapped]
    sums = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(wrapped) > 1 else iterators[0],
        model=wrapped if len(wrapped) > 1 else wrapped[0],
        num_microbatches=len(PACKED),
        seq_length=4096,
        micro_batch_size=7,
        decoder_seq_length=5,
        **options,
    )
    if not options.get("forward_only"):
        finalize_model_grads(wrapped)
        for param in staged.chunks.parameters():
            param.grad = param.main_grad
    return sums


INTERLEAVED = {"pp": 2, "num_chunks": 2}
LAYOUTS = {
    "pp 4": {"pp": 4},
    "pp 2, tp 2, interleaved": INTERLEAVED | {"tp": 2, "sequence_parallel": True},
    "pp 2, cp 2": {"pp": 2, "cp": 2},
}


@pytest.mark.ranks(2)
def test_losses_and_gradients_are_those_of_one_rank(group):
    check_layout(INTERLEAVED)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_other_kinds_of_parallelism(group, layout):
    check_layout(LAYOUTS[layout])


def check_layout(sizes):
    """Losses and gradients are those of one rank."""
    tp, pp, cp, num_chunks = (sizes.get(name, 1) for name in ("tp", "pp", "cp", "num_chunks"))
    batches = packed_batches if cp == 1 else whole_batches
    whole = staged_gpt(num_layers=5)
    expected = []
    for batch, packed in batches():
        losses = whole.chunks[0](batch["ids"], labels=batch["labels"], packed_seq_params=packed)
        (losses.mean() / len(PACKED)).backward()
        expected.append(losses.detach().sum())
    parallel_state.initialize_model_parallel(tp, pp, num_chunks if num_chunks > 1 else None, context_parallel_size=cp)
    staged = staged_gpt(num_layers=5, variable_seq_lengths=True, **sizes)
    sums = run(staged, batches)
    assert_gradients_of(whole, staged)
    if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        sums = torch.stack(sums)
        torch.distributed.all_reduce(sums, group=parallel_state.get_context_parallel_group())
        assert_close_to(sums, torch.stack(expected), rtol_of_norm=1e-12)
    else:
        assert sums == []
    measured = run(staged, batches, forward_only=True)
    assert len(measured) == (len(PACKED) if parallel_state.is_pipeline_last_stage(ignore_virtual=True) else 0)
