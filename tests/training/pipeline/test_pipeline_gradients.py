"""Whatever the schedule, a pipeline's losses, gradients and weights are those of the unpipelined model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness.parity import assert_bit_equal, assert_close_to, assert_unmodified
from training.pipeline.pipelines import random_batch, run_whole, staged_gpt

from shardwise.training.gradients.finalize import finalize_gradients_
from shardwise.training.optimizer.adamw import AdamW
from shardwise.training.optimizer.clipping import clip_grad_norm_
from shardwise.training.optimizer.grad_norm import global_grad_norm
from shardwise.training.pipeline import forward_only, make_schedule

CASES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 1}


def finalize(staged):
    topology = staged.topology
    finalize_gradients_(
        staged.chunks,
        tp_group=topology.group("tp"),
        dp_group=topology.group("dp"),
        embd_group=topology.group("embd") if "embd" in topology else None,
    )


def assert_gradients_of(whole, staged):
    rank = staged.topology.rank("tp")
    expected = whole.parameters_by_key()
    own = staged.parameters_by_key()
    assert own
    for key, shard in own.items():
        gradient = expected[key].data.grad
        assert gradient.abs().max() > 0
        assert_close_to(shard.data.grad, shard.layout.take(gradient, rank), rtol_of_norm=1e-12, name=key)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["tied", "untied"])
def test_gradients_equal_the_unpipelined_models(group, tied):
    pp = group.size()
    whole = staged_gpt(num_layers=2 * pp + 1, tied=tied)
    batch = random_batch(2 * pp)
    losses = run_whole(whole.chunks[0], batch)
    norm = global_grad_norm(whole.chunks, tp_group=whole.topology.group("tp"))
    for name, num_chunks in CASES.items():
        staged = staged_gpt(
            pp=pp, num_chunks=num_chunks, num_layers=2 * pp + 1, tied=tied, delay_wgrad_compute=name == "zero-bubble"
        )
        with assert_unmodified(*batch):
            results = staged.run(make_schedule(name, pp, 2 * pp, num_chunks), batch)
        finalize(staged)
        assert_gradients_of(whole, staged)
        if staged.topology.rank("pp") == pp - 1:
            assert_close_to(torch.stack(results), torch.stack(losses), rtol_of_norm=1e-13)
        else:
            assert results == []
        own_norm = global_grad_norm(
            staged.chunks, tp_group=staged.topology.group("tp"), pp_group=staged.topology.group("pp")
        )
        assert_close_to(own_norm, norm, rtol_of_norm=1e-13, name=name)


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", CASES)
def test_gradients_with_tensor_and_sequence_parallelism_in_the_stages(group, name):
    num_chunks = CASES[name]
    whole = staged_gpt(num_layers=2 * num_chunks + 1)
    batch = random_batch(4)
    run_whole(whole.chunks[0], batch)
    for sequence_parallel in (False, True):
        staged = staged_gpt(
            tp=2,
            pp=2,
            num_chunks=num_chunks,
            num_layers=2 * num_chunks + 1,
            sequence_parallel=sequence_parallel,
            delay_wgrad_compute=name == "zero-bubble",
        )
        staged.run(make_schedule(name, 2, 4, num_chunks), batch)
        finalize(staged)
        assert_gradients_of(whole, staged)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", CASES)
def test_tied_copies_stay_bit_equal(group, name):
    pp, num_chunks = group.size(), CASES[name]
    staged = staged_gpt(
        pp=pp, num_chunks=num_chunks, num_layers=pp * num_chunks, delay_wgrad_compute=name == "zero-bubble"
    )
    optimizer = AdamW(staged.chunks, learning_rate=0.01, weight_decay=0.1, betas=(0.9, 0.95), epsilon=1e-8)
    before = {key: shard.data.detach().clone() for key, shard in staged.parameters_by_key().items()}
    for step in range(10):
        optimizer.zero_grad()
        staged.run(make_schedule(name, pp, pp, num_chunks), random_batch(pp, seed=step))
        finalize(staged)
        groups = {name: staged.topology.group(f"{name[:2]}") for name in ("tp_group", "pp_group")}
        clip_grad_norm_(staged.chunks, 0.1, **groups)
        optimizer.step()
    if "embd" in staged.topology:
        key = "embedding.word_embeddings.weight"
        tied = staged.parameters_by_key()[key].data.detach()
        assert (tied - before[key]).abs().max() > 1e-3
        copies = [torch.empty_like(tied) for _ in range(2)]
        dist.all_gather(copies, tied, group=staged.topology.group("embd"))
        assert_bit_equal(copies[0], copies[1], name="the two copies")


@pytest.mark.ranks(2)
def test_measuring_leaves_no_trace(group):
    staged = staged_gpt(pp=2, num_chunks=2, num_layers=4)
    whole = staged_gpt(num_layers=4)
    # Not a multiple of the stages: only training's backward asks for that.
    batch = random_batch(5)
    with torch.no_grad():
        expected = [whole.chunks[0](tokens, labels=labels) for tokens, labels in zip(*batch, strict=True)]
    results = staged.run(forward_only(2, 5, 2), batch, forward_only=True)
    if staged.topology.rank("pp") == 1:
        assert_close_to(torch.stack(results), torch.stack(expected), rtol_of_norm=1e-13)
    else:
        assert results == []
    assert all(param.grad is None for param in staged.chunks.parameters())
